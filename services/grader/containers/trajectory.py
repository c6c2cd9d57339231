"""The files of an attempt for a container grader: its trajectory in Harbor's ATIF, its task and its output."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from leyden.libs.client.export.atif import Atif
from leyden.libs.client.export.conversations import conversations_of
from leyden.libs.contracts.api.rollouts import Call, RolloutDetail
from leyden.libs.contracts.conversation import Json
from leyden.libs.grading.facts import AttemptFacts
from leyden.libs.store.attempts import AttemptKey
from leyden.libs.store.database import ReadSession
from leyden.libs.store.read import views
from leyden.libs.store.read.trajectory.conversations import conversation_bytes
from leyden.libs.store.records.artifacts import Artifact
from leyden.services.grader.containers.verification import PackedTooLarge, packed

PAGE = 50
MAX_BYTES = 2**25
"""The most that conversations or files have. Why: they are in memory, and a Secret holds 0.7 MB of them packed."""
LONGEST_TEXTS = (None, 100_000, 10_000, 1_000)
"""Bounds on the characters of each text, of which the first counts with which a Secret holds the files."""
TOKENS = ("completion_token_ids", "logprobs")
"""Metrics of a step that are left out. Why: they are most of a trajectory's bytes, and graders judge texts."""


class TooLarge(ValueError):
    """No Secret could hold the attempt's files, however short their texts."""

    def __init__(self, part: str) -> None:
        super().__init__(f"the attempt's {part} are more than a grader's Secret holds: it earns 0")


async def read_calls(session: ReadSession, attempt: AttemptKey) -> tuple[RolloutDetail, list[Call]]:
    """Returns the attempt's calls, each with the part that it adds to an earlier one. Raises: TooLarge"""
    if await conversation_bytes(session, attempt) > MAX_BYTES:
        raise TooLarge(f"conversations, beyond {MAX_BYTES} bytes,")
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


def files_of(
    rollout: RolloutDetail, calls: Sequence[Call], facts: AttemptFacts, artifacts: Sequence[Artifact] = ()
) -> dict[str, str]:
    """Returns texts by the name below /logs/agent that a Secret holds. It takes a while: call it in a thread.

    `trajectory.json` is the longest conversation, the first one of several, and `trajectories.json` all of them, in the
    order of their last calls, without tokens. Those below `artifacts` are the agent's, read as UTF-8. A mark takes the
    place of the middle of each long text if the files are too large: otherwise an agent could escape its grader by
    printing too much.

    Raises: TooLarge; PackedTooLarge: the task alone is, which is no agent's fault
    """
    packed({"task.json": _task(facts)})
    for longest in LONGEST_TEXTS:
        try:
            files = _files(rollout, calls, facts, longest) | _of_agent(artifacts, longest)
            packed(files)
        except (TooLarge, PackedTooLarge):
            continue
        return files
    raise TooLarge("conversations")


def _files(
    rollout: RolloutDetail, calls: Sequence[Call], facts: AttemptFacts, longest_text: int | None
) -> dict[str, str]:
    """Raises: TooLarge: the trajectories have more than MAX_BYTES"""
    form, size = Atif(), 0
    found: list[str] = []
    longest, most = "{}", 0
    # One after the other: each fork of a conversation repeats what came before it.
    for one in conversations_of(rollout, calls).found:
        trajectory = _shortened(_without_tokens(form.row(one)), longest_text)
        found.append(json.dumps(trajectory, ensure_ascii=False))
        size += len(found[-1].encode("utf-8", "replace"))
        if size > MAX_BYTES:
            raise TooLarge("conversations")
        if len(trajectory["steps"]) > most:
            longest, most = found[-1], len(trajectory["steps"])
    return {
        "trajectory.json": longest,
        "trajectories.json": f"[{', '.join(found)}]",
        "task.json": _task(facts),
        "output.txt": _shortened(facts.text, longest_text),
    }


def _of_agent(artifacts: Sequence[Artifact], longest_text: int | None) -> dict[str, str]:
    return {
        f"artifacts/{one.path}": _shortened(one.content.decode(errors="replace"), longest_text) for one in artifacts
    }


def _task(facts: AttemptFacts) -> str:
    return json.dumps(facts.task, ensure_ascii=False)


def _shortened(value: Any, longest: int | None) -> Any:
    """JSON whose texts have both ends and a mark between them where they have more characters than `longest`."""
    match value:
        case str() if longest is not None and len(value) > longest:
            half = longest // 2
            return f"{value[:half]}\n[{len(value) - 2 * half} characters left out]\n{value[-half:]}"
        case dict():
            return {name: _shortened(one, longest) for name, one in value.items()}
        case list():
            return [_shortened(one, longest) for one in value]
    return value


def _without_tokens(trajectory: Json) -> Json:
    return {**trajectory, "steps": [_slim(step) for step in trajectory["steps"]]}


def _slim(step: Mapping[str, Json]) -> Json:
    if "metrics" not in step:
        return dict(step)
    return {**step, "metrics": {name: one for name, one in step["metrics"].items() if name not in TOKENS}}
