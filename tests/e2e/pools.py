"""A platform whose pools have CPU engines of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from leyden.libs.cli.local.platform import Options, Platform
from leyden.libs.cli.local.services import SERVICES
from tests.campaigns.soak import VICTIMS, running_platform
from tests.support.shared import free_port

THREADS = {"OMP_NUM_THREADS": "1"}


@contextmanager
def engine_process(model: Path) -> Iterator[str]:
    """The CPU engine as a process; yields its address."""
    port = free_port()
    own = {"ENGINE_MODEL_PATH": str(model), "ENGINE_PORT": str(port), "ENGINE_INCREMENTAL_STREAMING_OUTPUT": "true"}
    command = [sys.executable, "-m", "leyden.services.engine"]
    with (
        (model / "engine.log").open("wb") as output,
        subprocess.Popen(command, env={**os.environ, **own, **THREADS}, stdout=output) as process,
    ):
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


@contextmanager
def platform_with_pools(
    folder: Path, models: Mapping[str, Path], environment: Mapping[str, str] = MappingProxyType({}), **settings: Any
) -> Iterator[Platform]:
    """A platform with an engine for each pool. models: by pool; environment: of every service; settings: of
    every pool."""
    with ExitStack() as stack:
        urls = {pool: stack.enter_context(engine_process(model)) for pool, model in models.items()}
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
