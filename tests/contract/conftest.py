"""The engines of the contract tests: the CPU engine always, and SGLang where `make test-sglang` has installed it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.fakes import real_sglang
from tests.fakes.engine_client import ADMIN_KEY, KEY, EngineClient
from tests.fakes.tiny_engine import served_engine
from tests.support.shared import free_port
from tests.support.tiny_model import make_tiny_model

RUNNING_REQUESTS = 4
"""Requests that the engine of these tests runs at once; more wait in its queue."""
FIRST_VERSION = "r:0"
KINDS = ["stand-in", *(["sglang"] if real_sglang.is_installed() else [])]


@pytest.fixture(scope="session")
def new_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights for the tiny model."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "new", seed=1)


@pytest.fixture(scope="session")
def sglang_url(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One SGLang server for all tests of this process, whose streams repeat all tokens so far in each event."""
    with _sglang(tiny_model, tmp_path_factory, real_sglang.RUNNING) as url:
        yield url


@pytest.fixture(scope="session")
def incremental_sglang_url(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One SGLang server whose streams are as those of `leyden up` and the chart, with several tokens an event."""
    flags = ("--incremental-streaming-output", "--stream-interval", "8")
    with _sglang(tiny_model, tmp_path_factory, real_sglang.RUNNING_INCREMENTAL, *flags) as url:
        yield url


@contextmanager
def _sglang(model: Path, folders: pytest.TempPathFactory, running: str | None, *flags: str) -> Iterator[str]:
    if running is not None:
        yield running
        return
    log = folders.mktemp("sglang") / "server.log"
    common = ("--enable-metrics", "--max-running-requests", str(RUNNING_REQUESTS))
    with real_sglang.serving_sglang(model, free_port(), log, *common, *flags) as url:
        yield url


@pytest.fixture(params=KINDS)
async def engine(request: pytest.FixtureRequest, tiny_model: Path) -> AsyncIterator[EngineClient]:
    """An idle engine with the tiny model's weights as version `r:0`, an empty cache and both keys."""
    url = request.getfixturevalue("sglang_url") if request.param == "sglang" else None
    async with _engine(tiny_model, url) as client:
        yield client


@pytest.fixture(params=KINDS)
async def platform_engine(request: pytest.FixtureRequest, tiny_model: Path) -> AsyncIterator[EngineClient]:
    """The same with incremental streams, as the platform starts its engines."""
    url = request.getfixturevalue("incremental_sglang_url") if request.param == "sglang" else None
    async with _engine(tiny_model, url, incremental_streaming_output=True) as client:
        yield client


@asynccontextmanager
async def _engine(model: Path, url: str | None, **options: object) -> AsyncIterator[EngineClient]:
    """SGLang at an address, reset; without one the CPU engine."""
    if url is not None:
        headers = {"authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as http:
            client = EngineClient(http, str(model))
            await _reset(client)
            yield client
        return
    keys = {"api_key": KEY, "admin_api_key": ADMIN_KEY, "weight_version": FIRST_VERSION}
    limits = {"max_running_requests": RUNNING_REQUESTS, "health_timeout_seconds": real_sglang.HEALTH_SECONDS}
    async with served_engine(model, **keys, **limits, **options) as stand_in:
        yield stand_in


async def _reset(client: EngineClient) -> None:
    """Ends what an earlier test left, and loads the first weights again."""
    await client.control("/continue_generation")
    await client.control("/abort_request", abort_all=True)
    await client.reach(running=0, waiting=0)
    body = {"model_path": client.model_path, "weight_version": FIRST_VERSION, "flush_cache": True}
    answer = await client.control("/update_weights_from_disk", **body)
    assert answer.json()["success"], answer.text
