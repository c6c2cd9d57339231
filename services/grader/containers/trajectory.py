"""The files of an attempt for a container grader: its trajectory in Harbor's ATIF, its task and its output."""

from __future__ import annotations

import json
from collections.abc import Mapping

from leyden.libs.client.export.atif import Atif
from leyden.libs.client.export.conversations import conversations_of
from leyden.libs.contracts.api.rollouts import Call
from leyden.libs.contracts.conversation import Json
from leyden.libs.grading.facts import AttemptFacts
from leyden.libs.store.attempts import AttemptKey
from leyden.libs.store.database import ReadSession
from leyden.libs.store.read import views

PAGE = 200
TOKENS = ("completion_token_ids", "logprobs")
"""Metrics of a step that are left out. Why: they are most of a trajectory's bytes, and graders judge texts."""


async def files_of(session: ReadSession, attempt: AttemptKey, facts: AttemptFacts) -> dict[str, str]:
    """Returns texts by the name below /logs/agent.

    `trajectory.json` is the longest conversation, the first one of several, and `trajectories.json` all of them.
    """
    found = await trajectories(session, attempt)
    longest = max(found, key=lambda one: len(one["steps"]), default={})
    return {
        "trajectory.json": json.dumps(longest, ensure_ascii=False),
        "trajectories.json": json.dumps(found, ensure_ascii=False),
        "task.json": json.dumps(facts.task, ensure_ascii=False),
        "output.txt": facts.text,
    }


async def trajectories(session: ReadSession, attempt: AttemptKey) -> list[Json]:
    """Returns the attempt's conversations in ATIF, in the order of their last calls, without tokens."""
    rollout = await views.get_rollout(session, attempt.rollout_id)
    calls: list[Call] = []
    cursor: str | None = None
    while True:
        page = await views.list_calls(session, rollout.id, attempt=attempt.attempt, cursor=cursor, limit=PAGE)
        calls += page.items
        cursor = page.next_cursor
        if cursor is None:
            break
    form = Atif()
    return [_without_tokens(form.row(one)) for one in conversations_of(rollout, calls).found]


def _without_tokens(trajectory: Json) -> Json:
    return {**trajectory, "steps": [_slim(step) for step in trajectory["steps"]]}


def _slim(step: Mapping[str, Json]) -> Json:
    if "metrics" not in step:
        return dict(step)
    return {**step, "metrics": {name: one for name, one in step["metrics"].items() if name not in TOKENS}}
