"""Reads model calls in full: a row stores only what its call adds to its parent call.

A call's conversation begins with the first `shared_turns` turns of its parent: the parent's turns, then its answer. Its
prompt begins with the first `shared_tokens` tokens of its parent: the parent's prompt, then its sampled tokens. All
calls of a chain belong to one attempt, and each was durable before the gateway served the next one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, TypeVar

from sqlalchemy import text

from leyden.libs.contracts.conversation import Json, Turn, parse_turn, parse_turns
from leyden.libs.contracts.samples import RoutedExperts
from leyden.libs.store import tables
from leyden.libs.store.database import ReadSession

TOKEN_BYTES = 4


class FullCall(NamedTuple):
    """A call with all that it shares: prompt_ids is int32[prompt_tokens]."""

    turns: tuple[Turn, ...]
    tools: tuple[Json, ...]
    prompt_ids: bytes


class MissingParent(LookupError):
    """The parent of a call, or an earlier one, is not in the store."""

    def __init__(self, call_id: str, parent_call_id: str) -> None:
        super().__init__(f"call {call_id} has the parent {parent_call_id}, which is not in the store")


class TokenRow(Protocol):
    """The columns from which `full_prompt` joins a prompt."""

    @property
    def id(self) -> str: ...
    @property
    def parent_call_id(self) -> str | None: ...
    @property
    def shared_tokens(self) -> int: ...
    @property
    def prompt_ids(self) -> bytes: ...
    @property
    def sampled_ids(self) -> bytes: ...


R = TypeVar("R", bound=TokenRow)

_CHAINS = """
    WITH RECURSIVE ancestor (id, parent_call_id) AS (
        SELECT id, parent_call_id FROM model_calls WHERE run_id = :run AND id = ANY(:calls)
        UNION
        SELECT m.id, m.parent_call_id FROM ancestor a JOIN model_calls m ON m.run_id = :run AND m.id = a.parent_call_id
    )
    SELECT m.id, m.parent_call_id, m.shared_tokens, {columns}
    FROM ancestor a JOIN model_calls m ON m.run_id = :run AND m.id = a.id
"""
_ANCESTORS = text(_CHAINS.format(columns="m.shared_turns, m.turns, m.tools, m.answer, m.prompt_ids, m.sampled_ids"))
_ROUTED = text(_CHAINS.format(columns="m.routed_experts"))


class RoutedCall(NamedTuple):
    """A call's own experts, behind those of its parent's first `shared_tokens` tokens; None: not recorded."""

    shared_tokens: int
    experts: RoutedExperts | None


async def routed_calls(session: ReadSession, run_id: str, call_ids: Sequence[str]) -> dict[str, list[RoutedCall]]:
    """The experts of some calls of a run, by call: those of its ancestors, the oldest first, then its own. A call
    without all its ancestors is left out."""
    rows = await session.execute(_ROUTED, {"run": run_id, "calls": sorted(set(call_ids))})
    by_id: dict[str, Any] = {row.id: row for row in rows}
    read = {
        name: RoutedCall(
            row.shared_tokens, None if row.routed_experts is None else RoutedExperts.parse(row.routed_experts)
        )
        for name, row in by_id.items()
    }
    found: dict[str, list[RoutedCall]] = {}
    for name in by_id.keys() & set(call_ids):
        with suppress(MissingParent):
            found[name] = [read[one.id] for one in _chain(by_id, by_id[name])]
    return found


async def full_calls(session: ReadSession, rows: Sequence[tables.ModelCall]) -> list[FullCall | MissingParent]:
    """The calls of one run in full, in one statement; a call without all its ancestors comes as the error."""
    by_id: dict[str, Any] = {row.id: row for row in rows}
    unread = {row.parent_call_id for row in rows if row.parent_call_id is not None} - by_id.keys()
    if unread:
        ancestors = await session.execute(_ANCESTORS, {"run": rows[0].run_id, "calls": sorted(unread)})
        by_id = {row.id: row for row in ancestors} | by_id
    return [_full_or_missing(by_id, row) for row in rows]


def _full_or_missing(by_id: Mapping[str, Any], row: Any) -> FullCall | MissingParent:
    try:
        return full_call(by_id, row)
    except MissingParent as error:
        return error


def full_call(by_id: Mapping[str, Any], row: Any) -> FullCall:
    """The call of a row in full.

    Args: by_id: rows by call id, with all ancestors of the call
    Raises: MissingParent
    """
    turns, tools = full_conversation(by_id, row)
    return FullCall(tuple(turns), tuple(tools), _prompt(_chain(by_id, row)))


def full_conversation(by_id: Mapping[str, Any], row: Any) -> tuple[list[Turn], Sequence[Json]]:
    """The turns and the tools in the request of the call of a row.

    Args, raises: as `full_call`
    """
    chain = _chain(by_id, row)
    turns: list[Turn] = []
    tools: Sequence[Json] = ()
    for one in chain:
        turns = [*turns[: one.shared_turns], *parse_turns(one.turns)]
        tools = tools if one.tools is None else one.tools
        if one is not row and one.answer is not None:
            turns.append(parse_turn(one.answer))
    return turns, tools


def full_prompt(by_id: Mapping[str, TokenRow], row: TokenRow, known: dict[str, bytes]) -> bytes:
    """int32[prompt_tokens] of the call of a row.

    Args: by_id: as `full_call`; known: prompts by call id, which gets those of the call and of its ancestors
    Raises: MissingParent
    """
    for one in _chain(by_id, row):
        if one.id not in known:
            parent = one.parent_call_id
            before = b"" if parent is None else known[parent] + by_id[parent].sampled_ids
            known[one.id] = before[: TOKEN_BYTES * one.shared_tokens] + one.prompt_ids
    return known[row.id]


def _chain(by_id: Mapping[str, R], row: R) -> list[R]:
    """The ancestors of a row, the oldest first, and the row."""
    chain = [row]
    while (parent := chain[-1].parent_call_id) is not None:
        if parent not in by_id:
            raise MissingParent(chain[-1].id, parent)
        chain.append(by_id[parent])
    return chain[::-1]


def _prompt(chain: Sequence[TokenRow]) -> bytes:
    ids = bytearray()
    for one in chain:
        del ids[TOKEN_BYTES * one.shared_tokens :]
        ids += one.prompt_ids
        if one is not chain[-1]:
            ids += one.sampled_ids
    return bytes(ids)
