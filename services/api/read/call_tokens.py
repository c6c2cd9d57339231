"""The route of a call's tokens, with their texts."""

from __future__ import annotations

import asyncio
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query

from leyden.libs.contracts.api.call_tokens import CallTokens
from leyden.libs.contracts.model_folder import TokenText, find_tokenizer
from leyden.libs.store.read.call_tokens import read_call_tokens
from leyden.services.api.auth import GuardedRoute, Reader
from leyden.services.api.parameters import MAX_NUMBER, Store

router = APIRouter(prefix="/v1/rollouts", tags=["rollouts"], route_class=GuardedRoute)

MAX_TOKENS = 2000


@router.get("/{rollout_id}/calls/{call_id}/tokens")
async def get_call_tokens(
    store: Store,
    caller: Reader,
    rollout_id: str,
    call_id: str,
    start: Annotated[
        int | None,
        Query(ge=0, le=MAX_NUMBER, description="Position from the prompt's first token; the answer's when left out."),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_TOKENS, description="Tokens in the window.")] = 500,
) -> CallTokens:
    """Show a window of a call's tokens: text, log-probability, version, whether each trains and its advantage."""
    async with store.read() as session:
        found, folders = await read_call_tokens(session, rollout_id, call_id, start=start, limit=limit)
    texts = await asyncio.to_thread(_tokenizer, folders)
    if texts is None:
        return found
    return found.model_copy(update={"tokens": [one.model_copy(update={"text": texts(one.id)}) for one in found.tokens]})


def _tokenizer(folders: list[Path]) -> TokenText | None:
    """The tokenizer of the first folder that has one: a file of another time is another one."""
    path = next((folder for folder in folders if (folder / "tokenizer.json").is_file()), None)
    return None if path is None else _loaded(path, (path / "tokenizer.json").stat().st_mtime_ns)


@lru_cache(maxsize=4)
def _loaded(folder: Path, _changed: int) -> TokenText | None:
    return find_tokenizer([folder])
