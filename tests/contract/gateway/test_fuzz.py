"""The gateway's endpoints answer any request as their OpenAPI document declares, and never with a 500."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schemathesis import GenerationMode

from leyden.libs.store.database import Database
from tests.fakes.fuzzing import bounded, check, operations, schema_of
from tests.fakes.gateway import scene
from tests.fakes.gateway_document import openapi_document

SCHEMA = schema_of(openapi_document())


@pytest.fixture(scope="module")
def door(postgres_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, str]]:
    """Address, rollout and key of a gateway with an engine, in a thread of its own."""
    dsn, folder = postgres_server.create(), tmp_path_factory.mktemp("gateway")
    ready: Future[tuple[str, str, str]] = Future()
    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(_serve(dsn, folder, ready, stop)))
    thread.start()
    yield ready.result(timeout=60)
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()
    postgres_server.drop(dsn)


async def _serve(dsn: str, folder: Path, ready: Future[tuple[str, str, str]], stop: asyncio.Event) -> None:
    database = Database(dsn)
    async with scene(folder, database) as found:
        ready.set_result((found.gateway.url, found.rollout_id, found.gateway.key(found.rollout_id)))
        await stop.wait()
    await database.close()


@pytest.mark.parametrize("operation", operations(SCHEMA), ids=lambda found: found.label)
def test_every_endpoint_conforms_to_its_openapi_document(operation: Any, door: tuple[str, str, str]) -> None:
    url, rollout, key = door

    @bounded(60)
    @given(st.data())
    def send(data: st.DataObject) -> None:
        mode = data.draw(st.sampled_from(list(GenerationMode)))
        case = data.draw(operation.as_strategy(generation_mode=mode))
        if data.draw(st.integers(0, 4)):
            case.path_parameters.update(rollout=rollout, attempt="1")
        check(case, url, {"authorization": f"Bearer {key}"})

    send()
