"""Descriptions of rollouts for the reflection model: the task, the conversation, the reward and its reasons."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from leyden.libs.client import Client
from leyden.libs.client.export.conversations import Conversation, conversations_of
from leyden.libs.contracts.api.rollouts import Call, ComponentGrade, Outcome, RolloutDetail
from leyden.libs.contracts.conversation import Json, Turn
from leyden.libs.prompts.journal import Journal
from leyden.libs.prompts.measuring import Measured

CONVERSATION_LETTERS = 8000
OUTPUT_LETTERS = 2000


def described(leyden: Client, journal: Journal, measured: Measured) -> Json:
    """Describes a task's worst rollout, as GEPA's template shows it. The journal has it from the first time on: its
    grades may change."""
    known: Json | None = journal.get("described", measured.rollout)
    if known is None:
        rollout = leyden.rollout(measured.rollout)
        calls = leyden.calls(rollout.id, attempt=rollout.attempt, whole=False) if rollout.attempt is not None else ()
        known = description(rollout, calls, measured.rewards)
        journal.add("described", measured.rollout, known)
    return known


def description(rollout: RolloutDetail, calls: Iterable[Call], rewards: Sequence[float]) -> Json:
    """Args: calls: of the attempt that counts, in their order; rewards: of the task's rollouts, this one's first"""
    outcome = next((one.outcome for one in rollout.attempts if one.number == rollout.attempt), None)
    conversations = conversations_of(rollout, calls).found
    made: Json = {name: cut(text, CONVERSATION_LETTERS) for name, text in map(_conversation, conversations)}
    if outcome is not None and outcome.stdout_tail.strip():
        made["output of the agent"] = cut(outcome.stdout_tail.strip(), OUTPUT_LETTERS)
    return {
        "Inputs": rollout.task,
        "Generated Outputs": made or "nothing: the agent asked no model and printed nothing",
        "Feedback": "\n".join(_feedback(rollout, outcome, rewards)),
    }


def _feedback(rollout: RolloutDetail, outcome: Outcome | None, rewards: Sequence[float]) -> Iterator[str]:
    yield f"Reward: {rewards[0]:g}"
    if len(rewards) > 1:
        every = ", ".join(f"{one:g}" for one in rewards)
        yield f"Rewards of {len(rewards)} tries of this task, this one first: {every}"
    yield from map(_grade, rollout.components)
    comments = [(one.name, one.comment) for one in rollout.rewards]
    comments += [(one.component, one.comment) for one in rollout.feedback]
    yield from (f"{name}: {comment}" for name, comment in comments if comment)
    if outcome is not None and outcome.kind != "succeeded":
        yield f"The agent ended as {outcome.kind}: {outcome.detail or f'exit status {outcome.exit_code}'}"
        if outcome.stderr_tail.strip():
            yield cut(outcome.stderr_tail.strip(), OUTPUT_LETTERS)


def _grade(one: ComponentGrade) -> str:
    value = one.state if one.value is None else f"{one.value:g}"
    extracted = "" if one.extracted is None else f", for the answer {one.extracted!r}"
    return f"{one.component}: {value}{extracted}{f': {one.explanation}' if one.explanation else ''}"


def _conversation(one: Conversation) -> tuple[str, str]:
    name = one.role or one.agent
    title = f"conversation {one.number}{f' of {name}' if name else ''}"
    return title, "\n\n".join(map(_turn, one.turns))


def _turn(turn: Turn) -> str:
    calls = "".join(f"\ncalls {call.name}({call.arguments})" for call in turn.tool_calls)
    return f"[{turn.role}] {turn.content}{calls}"


def cut(text: str, letters: int) -> str:
    """Leaves out the middle of a text that is longer.

    >>> cut("abcdefghij", 4)
    'ab\\n[6 letters are left out]\\nij'
    """
    if len(text) <= letters:
        return text
    head = letters // 2
    return f"{text[:head]}\n[{len(text) - letters} letters are left out]\n{text[head - letters :]}"
