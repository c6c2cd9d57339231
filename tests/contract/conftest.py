"""The engines of the contract tests: the CPU engine always, and SGLang where `make test-sglang` has installed it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from leyden.services.engine.tiny import make_tiny_model
from tests.fakes import real_sglang
from tests.fakes.engine_client import ADMIN_KEY, KEY, EngineClient
from tests.fakes.tiny_engine import served_engine
from tests.shared import free_port

RUNNING_REQUESTS = 4
"""Requests that the engine of these tests runs at once; more wait in its queue."""
FIRST_VERSION = "r:0"


@pytest.fixture(scope="session")
def new_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights for the tiny model."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "new", seed=1)


@pytest.fixture(scope="session")
def sglang_url(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One SGLang server for all tests of this process."""
    log = tmp_path_factory.mktemp("sglang") / "server.log"
    flags = ("--enable-metrics", "--max-running-requests", str(RUNNING_REQUESTS))
    if real_sglang.RUNNING is not None:
        yield real_sglang.RUNNING
        return
    with real_sglang.serving_sglang(tiny_model, free_port(), log, *flags) as url:
        yield url


@pytest.fixture(params=["stand-in", *(["sglang"] if real_sglang.is_installed() else [])])
async def engine(request: pytest.FixtureRequest, tiny_model: Path) -> AsyncIterator[EngineClient]:
    """An idle engine with the tiny model's weights as version `r:0`, an empty cache and both keys."""
    if request.param == "sglang":
        url = request.getfixturevalue("sglang_url")
        headers = {"authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as http:
            client = EngineClient(http, str(tiny_model))
            await _reset(client)
            yield client
        return
    options = {"weight_version": FIRST_VERSION, "max_running_requests": RUNNING_REQUESTS}
    limits = {"health_timeout_seconds": real_sglang.HEALTH_SECONDS}
    async with served_engine(tiny_model, api_key=KEY, admin_api_key=ADMIN_KEY, **options, **limits) as stand_in:
        yield stand_in


async def _reset(client: EngineClient) -> None:
    """Ends what an earlier test left, and loads the first weights again."""
    await client.control("/continue_generation")
    await client.control("/abort_request", abort_all=True)
    await client.reach(running=0, waiting=0)
    body = {"model_path": client.model_path, "weight_version": FIRST_VERSION, "flush_cache": True}
    answer = await client.control("/update_weights_from_disk", **body)
    assert answer.json()["success"], answer.text
