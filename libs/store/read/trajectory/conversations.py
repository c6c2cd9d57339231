"""The conversations of one stored attempt, as graders of the operator's own code read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import text

from leyden.libs.contracts.conversation import Json, Turn, parse_turn, turn_json
from leyden.libs.contracts.ids import run_of
from leyden.libs.contracts.states import CallStatus
from leyden.libs.store.attempts import AttemptKey
from leyden.libs.store.database import ReadSession
from leyden.libs.store.records.chains import MissingParent, full_conversation
from leyden.libs.store.records.deliveries import RECEIVED

_CALLS = text(f"""
    SELECT m.id, m.parent_call_id, m.shared_turns, m.shared_tokens, m.turns, m.tools, m.answer, m.agent_name, m.role,
           m.status = '{CallStatus.COMPLETED}' AND m.answer IS NOT NULL AND {RECEIVED} AS answered
    FROM model_calls m
    WHERE m.run_id = :run AND m.rollout_id = :rollout AND m.attempt = :attempt
    ORDER BY m.sequence, m.choice, m.id
""")  # noqa: S608  # constants alone

_BYTES = text("""
    SELECT coalesce(sum(octet_length(turns::text) + coalesce(octet_length(tools::text), 0)
                        + coalesce(octet_length(answer::text), 0)), 0)
    FROM model_calls
    WHERE run_id = :run AND rollout_id = :rollout AND attempt = :attempt
""")


async def conversation_bytes(session: ReadSession, attempt: AttemptKey) -> int:
    """Returns the size of all that the attempt's calls add to their conversations, as JSON."""
    return int(await session.scalar(_BYTES, _scope(attempt)))


async def conversations_of(session: ReadSession, attempt: AttemptKey) -> list[Json]:
    """Returns each conversation once, with the agent's name and its role: a call that a later one continues is part
    of that one's. An answer that never reached the agent is in none. The order is that of their last calls.

    Raises: MissingParent: an earlier call is not in the store
    """
    rows: Sequence[Any] = (await session.execute(_CALLS, _scope(attempt))).all()
    by_id = {row.id: row for row in rows}
    answered = [row for row in rows if row.answered]
    turns = {row.id: _turns(by_id, row) for row in answered}
    # A request that holds the parent's answer, too, continues it.
    continued = {row.parent_call_id for row in answered if row.shared_turns > len(turns.get(row.parent_call_id) or ())}
    return [
        {"agent": row.agent_name, "role": row.role, "turns": _shown(turns[row.id], row)}
        for row in answered
        if row.id not in continued
    ]


def _scope(attempt: AttemptKey) -> dict[str, str | int]:
    return {"run": run_of(attempt.rollout_id), "rollout": attempt.rollout_id, "attempt": attempt.attempt}


def _turns(by_id: Mapping[str, Any], row: Any) -> list[Turn] | None:
    try:
        return full_conversation(by_id, row)[0]
    except MissingParent:
        return None


def _shown(turns: list[Turn] | None, row: Any) -> list[Json] | None:
    return None if turns is None else [turn_json(turn) for turn in (*turns, parse_turn(row.answer))]
