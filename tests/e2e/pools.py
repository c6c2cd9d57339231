"""A platform whose pools have CPU engines of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from leyden.libs.cli.local.platform import Options, Platform
from leyden.libs.cli.local.services import SERVICES
from tests.campaigns.soak import VICTIMS, running_platform
from tests.support.engines import engine_process

THREADS = {"OMP_NUM_THREADS": "1"}


@contextmanager
def platform_with_pools(
    folder: Path, models: Mapping[str, Path], environment: Mapping[str, str] = MappingProxyType({}), **settings: Any
) -> Iterator[Platform]:
    """A platform with an engine for each pool. models: by pool; environment: of every service; settings: of
    every pool."""
    with ExitStack() as stack:
        urls = {
            pool: stack.enter_context(engine_process(model, model / "engine.log", THREADS))
            for pool, model in models.items()
        }
        pools = {pool: {"model_path": str(models[pool]), "engine_urls": [urls[pool]], **settings} for pool in models}
        own = {"trainer": THREADS, "controller": {"CONTROLLER_POOLS": json.dumps(pools)}}
        variables = {name: {**environment, **own.get(name, {})} for name in VICTIMS}
        options = Options(
            environment=variables,
            model_path=models["default"],
            free_ports=True,
            services=tuple(name for name in SERVICES if name != "engine"),
            engine_urls=tuple(urls.values()),
        )
        yield stack.enter_context(running_platform(folder / "home", options))
