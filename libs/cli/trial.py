"""One rollout of each agent of a run, not trained, and everything that would keep such a rollout from training."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from leyden.libs.cli.document import Document
from leyden.libs.cli.errors import CommandError
from leyden.libs.cli.view.output import as_text, error_console
from leyden.libs.client import Client
from leyden.libs.contracts import untrainable
from leyden.libs.contracts.api.rollouts import Call, RolloutDetail, Span
from leyden.libs.contracts.api.runs import Run
from leyden.libs.contracts.config import Override
from leyden.libs.contracts.states import CONTEXT_EXCEEDED, ENDED

POLL_SECONDS = 0.5
LINE_LENGTH = 300
"""Characters of an agent's line in a message."""


@dataclass(frozen=True)
class Trial:
    """The records of one rollout, and the problems found in them, each with its remedy."""

    rollout: RolloutDetail
    calls: list[Call]
    spans: list[Span]
    problems: list[str]


def try_agents(leyden: Client, document: Document) -> list[Trial]:
    """Runs each agent once on the document's first task, as a run of its own with one evaluation rollout of each.

    Ctrl-C cancels that run.

    Raises: CommandError: the agent did not run
    """
    run = leyden.create_run(trial_document(document))
    external = [one for one in run.config.group_agents if one.runner.type == "external"] if run.config else []
    for one in external:
        whose = f" of agent {one.name}" if one.name else ""
        words = f"waiting for a client{whose}: run yours with this run's id, {run.id}"
        error_console.print(as_text(words), soft_wrap=True)
    try:
        run = _wait(leyden, run)
    except KeyboardInterrupt:
        leyden.cancel_run(run.id)
        raise
    found = list(leyden.rollouts(run=run.id, sort="oldest"))
    if not found:
        raise CommandError(f"the trial {run.id} ran no agent, it is {run.phase}: {run.reason or 'see `leyden logs`'}")
    return [_trial(leyden, one.id, document) for one in found]


def _trial(leyden: Client, rollout_id: str, document: Document) -> Trial:
    rollout = leyden.rollout(rollout_id)
    calls, spans = list(leyden.calls(rollout_id)), list(leyden.spans(rollout_id))
    return Trial(rollout, calls, spans, list(problems_of(rollout, calls, replaced_by(document))))


def trial_document(document: Document) -> Document:
    """The document as a run without a step, whose evaluation runs the first task once; the API validates it."""
    changes: dict[str, dict[str, Any]] = {"training": {"steps": 0}, "sampling": {"max_attempts": 1}}
    trial = {**document, "evaluation": {"dataset": document.get("dataset"), "max_tasks": 1, "at_end": False}}
    for name, fields in changes.items():
        section = document.get(name, {})
        trial[name] = {**section, **fields} if isinstance(section, dict) else section
    return {**trial, "name": f"trial of {document.get('name')}"[:200]}


def _wait(leyden: Client, run: Run) -> Run:
    """The run's state at its end; reports each change of its phase on standard error."""
    reported = ""
    while run.phase not in ENDED:
        if reported != (words := f"trial {run.id}: {run.phase}{f', {run.reason}' if run.reason else ''}"):
            error_console.print(as_text(words), soft_wrap=True)
        reported = words
        time.sleep(POLL_SECONDS)
        run = leyden.run(run.id)
    return run


def replaced_by(document: Document) -> tuple[str, ...]:
    """The sampling parameters that the run would decide; a trial, like an evaluation, samples as the agent asks."""
    override = document.get("sampling", {}).get("override", "keep")
    return () if override == "keep" else Override.model_validate(override).replaced


def is_cured_by_override(calls: Sequence[Call], replaced: Collection[str] = ()) -> bool:
    """Whether calls would train if the run decided all sampling parameters that it can. Args: replaced: as below"""
    left = [
        reason
        for call in calls
        if (reason := call.untrainable_reason) is not None and untrainable.where_replaced(reason, replaced) is not None
    ]
    return any(untrainable.where_replaced(reason, Override().replaced) is None for reason in left)


def problems_of(rollout: RolloutDetail, calls: Sequence[Call], replaced: Collection[str] = ()) -> Iterator[str]:
    """Everything that would keep such a rollout from training, with its remedy.

    Args: replaced: sampling parameters that training decides, whatever the agent asks
    """
    outcome = rollout.attempts[-1].outcome if rollout.attempts else None
    if outcome is None or outcome.kind == "infra_error":
        cause = outcome.detail if outcome else rollout.reason or rollout.state
        yield f"the platform, not the agent, failed: {cause}"
        return
    if outcome.kind != "succeeded":
        last = next((line.strip() for line in reversed(outcome.stderr_tail.splitlines()) if line.strip()), "")
        said = f"; the last line of its stderr: {last[:LINE_LENGTH]}" if last else ""
        yield f"the agent ended as {outcome.kind}: {outcome.detail or f'exit status {outcome.exit_code}'}{said}"
    if rollout.reason == "no_reward":
        yield 'it gave no reward: end its output with a line such as {"reward": 1.0}, or name graders in `reward`'
    for one in rollout.components:
        if one.value is None:
            yield f"component {one.component} of its reward is {one.state}: {one.explanation}"
    if not calls:
        yield "it made no model call: does the agent use OPENAI_BASE_URL?"
    for reason in dict.fromkeys(call.untrainable_reason for call in calls if call.status == "completed"):
        if reason is not None and (left := untrainable.where_replaced(reason, replaced)) is not None:
            same = [call for call in calls if call.untrainable_reason == reason]
            hint = f" {same[0].temperature:g}" if left.endswith("temperature") else ""
            words = f"{len(same)} of {len(calls)} model calls cannot be trained: {left}{hint}"
            yield f"{words}; {untrainable.remedy_of(left)}"
    unfinished = [
        call.status for call in calls if call.status != "completed" and call.finish_reason != CONTEXT_EXCEEDED
    ]
    if overflows := sum(call.finish_reason == CONTEXT_EXCEEDED for call in calls):
        words = f"{overflows} of {len(calls)} model calls were refused: their messages exceed the model's context"
        yield f"{words}; {untrainable.CONTEXT_REMEDY}"
    if unfinished:
        yield f"{len(unfinished)} of {len(calls)} model calls did not complete: {', '.join(sorted(set(unfinished)))}"
