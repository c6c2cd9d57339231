"""Calls made whole: a row of `model_calls` holds what it adds to the call that it continues, or to the beginning of it.

All calls of a chain belong to one attempt, and each was durable before the next one was asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from sqlalchemy import text

from leyden.libs.store import tables
from leyden.libs.store.database import ReadSession

Json = dict[str, Any]


class Whole(NamedTuple):
    """A call as it was asked: prompt_ids is int32[prompt_tokens], messages `{messages, tools}`."""

    prompt_ids: bytes
    messages: Json


class Link(Protocol):
    """What a call's row holds of its prompt and answer."""

    @property
    def id(self) -> str: ...
    @property
    def continues(self) -> str | None: ...
    @property
    def prompt_ids(self) -> bytes: ...
    @property
    def sampled_ids(self) -> bytes: ...
    @property
    def kept_tokens(self) -> int | None: ...


L = TypeVar("L", bound=Link)
TOKEN_BYTES = 4


class LostCall(LookupError):
    """A call continues one that is not in the store."""


_CONTINUED = text("""
    WITH RECURSIVE continued (id, continues) AS (
        SELECT id, continues FROM model_calls WHERE run_id = :run AND id = ANY(:calls)
        UNION
        SELECT m.id, m.continues FROM continued c JOIN model_calls m ON m.run_id = :run AND m.id = c.continues
    )
    SELECT m.id, m.continues, m.kept_messages, m.kept_tokens, m.messages, m.prompt_ids, m.sampled_ids
    FROM continued c JOIN model_calls m ON m.run_id = :run AND m.id = c.id
""")


async def whole_calls(session: ReadSession, calls: Sequence[tables.ModelCall]) -> list[Whole | LostCall]:
    """Calls of one run as they were asked, each that cannot be made whole with the reason."""
    known: dict[str, Any] = {call.id: call for call in calls}
    missing = {call.continues for call in calls if call.continues is not None} - known.keys()
    if missing:
        rows = await session.execute(_CONTINUED, {"run": calls[0].run_id, "calls": sorted(missing)})
        known = {row.id: row for row in rows} | known
    return [_whole_or_lost(known, call) for call in calls]


def _whole_or_lost(known: Mapping[str, Any], call: Any) -> Whole | LostCall:
    try:
        return whole_call(known, call)
    except LostCall as error:
        return error


def whole_call(known: Mapping[str, Any], call: Any) -> Whole:
    """A call as it was asked.

    Args: known: rows by id, all that it continues
    Raises: LostCall
    """
    chain = _chain(known, call)
    messages: list[Json] = []
    for one in chain:
        if one.kept_messages is not None:
            del messages[one.kept_messages :]
        messages += one.messages["messages"]
    return Whole(_prompt(chain), {**chain[0].messages, "messages": messages})


def whole_prompt(known: Mapping[str, Link], call: Link) -> bytes:
    """int32[prompt_tokens] of a call.

    Args, raises: as `whole_call`
    """
    return _prompt(_chain(known, call))


def _chain(known: Mapping[str, L], call: L) -> list[L]:
    """What the call continues from the first on, and the call."""
    chain = [call]
    while (earlier := chain[-1].continues) is not None:
        if earlier not in known:
            raise LostCall(f"call {chain[-1].id} continues {earlier}, which is not in the store")
        chain.append(known[earlier])
    return chain[::-1]


def _prompt(chain: Sequence[Link]) -> bytes:
    ids = bytearray()
    for one in chain:
        if one.kept_tokens is not None:
            del ids[TOKEN_BYTES * one.kept_tokens :]
        ids += one.prompt_ids
        ids += one.sampled_ids
    del ids[len(ids) - len(chain[-1].sampled_ids) :]
    return bytes(ids)
