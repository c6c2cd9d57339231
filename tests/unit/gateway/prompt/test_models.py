"""The models of a process: runs over one folder share one, and all share one memory of completed calls."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from leyden.libs.contracts.conversation import Turn
from leyden.libs.store.engines import Pool, RunModel
from leyden.services.gateway.prompt.models import PoolModels, ServedModel
from leyden.services.gateway.prompt.prefix import StoredCall
from leyden.services.gateway.prompt.rendering import Renderer
from leyden.services.gateway.prompt.template import ChatModel
from tests.fakes.chat_model import EOS, make_chat_model
from tests.unit.gateway.prompt.test_prefix import request


def models_of(runs: dict[str, RunModel], default: Path, history_bytes: int) -> PoolModels:
    async def run_model(run_id: str) -> RunModel:
        return runs[run_id]

    reader: Any = SimpleNamespace(run_model=run_model)
    chat = ChatModel(default)
    return PoolModels(
        chat, reader, history_bytes=history_bytes, renderer=Renderer(), tool_parsers={}, reasoning_parsers={}
    )


async def reads_when_continued(served: ServedModel, key: str) -> int:
    """How often an attempt's second prompt reads the store: 0 where its first call is in memory."""
    reads = 0

    async def read(_known: Collection[str]) -> Sequence[StoredCall]:
        nonlocal reads
        reads += 1
        return []

    turns = (Turn("user", "a"), Turn("assistant", "x"), Turn("user", "b"))
    await served.prefixes.prompt(key, request(*turns), read)
    return reads


async def call(served: ServedModel, key: str) -> None:
    async def nothing(_known: Collection[str]) -> Sequence[StoredCall]:
        return []

    prompt = await served.prefixes.prompt(key, request(Turn("user", "a")), nothing)
    served.prefixes.remember(key, f"call-{key}", prompt, Turn("assistant", "x"), [5, EOS])


async def test_all_models_share_one_memory_of_completed_calls(tmp_path: Path) -> None:
    folders = [make_chat_model(tmp_path / str(number)) for number in range(4)]
    runs = {f"r{number}": RunModel(Pool("p"), str(folder)) for number, folder in enumerate(folders)}
    # Room for two attempts with one call each.
    models = models_of(runs, folders[0], 2**12 + 2**11)
    served = [await models.of_run(run) for run in runs]
    for one in served:
        await call(one, "attempt")
    reads = [await reads_when_continued(one, "attempt") for one in served]
    assert reads == [1, 1, 0, 0]


async def test_runs_over_one_pool_and_folder_share_the_model(tmp_path: Path) -> None:
    folder = make_chat_model(tmp_path / "model")
    pool = Pool("p", str(folder))
    runs = {"of pool": RunModel(pool, None), "by name": RunModel(pool, str(folder))}
    models = models_of(runs, folder, 2**20)
    assert await models.of_run("of pool") is await models.of_run("by name")
