"""The files of an attempt for a container grader: its trajectory in Harbor's ATIF, its task and its output."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from leyden.libs.client.export.atif import Atif
from leyden.libs.client.export.conversations import conversations_of
from leyden.libs.contracts.api.rollouts import Call, RolloutDetail
from leyden.libs.contracts.conversation import Json
from leyden.libs.grading.facts import AttemptFacts
from leyden.libs.store.attempts import AttemptKey
from leyden.libs.store.database import ReadSession
from leyden.libs.store.read import views
from leyden.libs.store.read.trajectory import conversation_bytes

PAGE = 50
MAX_BYTES = 2**25
"""The most that conversations or files have. Why: they are in memory, and a Secret holds 0.7 MB of them packed."""
TOKENS = ("completion_token_ids", "logprobs")
"""Metrics of a step that are left out. Why: they are most of a trajectory's bytes, and graders judge texts."""


class TooLarge(ValueError):
    """No Secret could hold the attempt's files."""

    def __init__(self, part: str) -> None:
        super().__init__(f"the attempt's {part} have more than {MAX_BYTES} bytes, and no grader's Secret holds them")


async def read_calls(session: ReadSession, attempt: AttemptKey) -> tuple[RolloutDetail, list[Call]]:
    """Returns the attempt's calls, each with the part that it adds to an earlier one. Raises: TooLarge"""
    if await conversation_bytes(session, attempt) > MAX_BYTES:
        raise TooLarge("conversations")
    rollout = await views.get_rollout(session, attempt.rollout_id)
    calls: list[Call] = []
    cursor: str | None = None
    while True:
        page = await views.list_calls(
            session, rollout.id, attempt=attempt.attempt, whole=False, cursor=cursor, limit=PAGE
        )
        calls += page.items
        cursor = page.next_cursor
        if cursor is None:
            return rollout, calls


def files_of(rollout: RolloutDetail, calls: Sequence[Call], facts: AttemptFacts) -> dict[str, str]:
    """Returns texts by the name below /logs/agent. It takes a while: call it in a thread.

    `trajectory.json` is the longest conversation, the first one of several, and `trajectories.json` all of them, in the
    order of their last calls, without tokens.

    Raises: TooLarge
    """
    form, size = Atif(), 0
    found: list[str] = []
    longest, most = "{}", 0
    # One after the other: each fork of a conversation repeats what came before it.
    for one in conversations_of(rollout, calls).found:
        trajectory = _without_tokens(form.row(one))
        found.append(json.dumps(trajectory, ensure_ascii=False))
        size += len(found[-1].encode("utf-8", "replace"))
        if size > MAX_BYTES:
            raise TooLarge("trajectories")
        if len(trajectory["steps"]) > most:
            longest, most = found[-1], len(trajectory["steps"])
    return {
        "trajectory.json": longest,
        "trajectories.json": f"[{', '.join(found)}]",
        "task.json": json.dumps(facts.task, ensure_ascii=False),
        "output.txt": facts.text,
    }


def _without_tokens(trajectory: Json) -> Json:
    return {**trajectory, "steps": [_slim(step) for step in trajectory["steps"]]}


def _slim(step: Mapping[str, Json]) -> Json:
    if "metrics" not in step:
        return dict(step)
    return {**step, "metrics": {name: one for name, one in step["metrics"].items() if name not in TOKENS}}
