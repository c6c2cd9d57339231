"""`leyden agent …`"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import typer

from leyden.libs.cli.commands.rollouts import trajectory
from leyden.libs.cli.commands.runs import Changes, RunFile
from leyden.libs.cli.context import context_of
from leyden.libs.cli.document import Document, read_document
from leyden.libs.cli.errors import CommandError, Exit
from leyden.libs.cli.view.output import AsJson, as_text, error_console, format_value, print_result
from leyden.libs.cli.view.watch import ENDED
from leyden.libs.client import Client
from leyden.libs.contracts import untrainable
from leyden.libs.contracts.api.rollouts import Call, RolloutDetail
from leyden.libs.contracts.api.runs import Run
from leyden.libs.contracts.config import Override

POLL_SECONDS = 0.5
NOTHING_FOUND = "nothing keeps this rollout from training; one alone cannot show whether the rewards of a group differ"

app = typer.Typer(no_args_is_help=True, help="Agents: try one before a run trains it.")


@app.callback()
def root() -> None:
    """Makes `try` a command of its own: typer would merge a single command into its group."""


@app.command("try")
def try_(ctx: typer.Context, file: RunFile, changes: Changes = None, as_json: AsJson = False) -> None:
    """Run the agent once on the document's first task and train nothing: calls, tools, output and reward.

    The last lines name everything that would keep the rollout from training; exit status 1 when there is anything.
    The trial is a run of its own with one evaluation rollout of the base model. Ctrl-C cancels it.
    """
    with context_of(ctx).client() as leyden:
        asked = read_document(file, changes or [])
        run = leyden.create_run(trial_document(asked))
        try:
            run = _wait(leyden, run)
        except KeyboardInterrupt:
            leyden.cancel_run(run.id)
            raise
        found = next(leyden.rollouts(run=run.id), None)
        if found is None:
            raise CommandError(
                f"the trial {run.id} ran no agent, it is {run.phase}: {run.reason or 'see `leyden logs`'}"
            )
        rollout = leyden.rollout(found.id)
        calls, spans = list(leyden.calls(found.id)), list(leyden.spans(found.id))
    problems = list(problems_of(rollout, calls, replaced_by(asked)))
    document = {**rollout.model_dump(mode="json"), "calls": calls, "spans": spans, "problems": problems}
    tools = sum(span.kind == "tool" for span in spans)
    counts = f"\nmodel calls {len(calls)}, spans {len(spans)} ({tools} of tools), reward {format_value(rollout.reward)}"
    verdict = [as_text(f"would not train: {problem}", "red") for problem in problems]
    parts = [*trajectory(rollout, calls, spans), counts, *(verdict or [as_text(NOTHING_FOUND, "green")])]
    print_result(as_json, document, *parts)
    if problems:
        raise typer.Exit(Exit.ERROR)


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
        yield f"the agent ended as {outcome.kind}: {outcome.detail or f'exit status {outcome.exit_code}'}"
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
            yield f"{len(same)} of {len(calls)} model calls cannot be trained: {left}{hint}"
    unfinished = [call.status for call in calls if call.status != "completed"]
    if unfinished:
        yield f"{len(unfinished)} of {len(calls)} model calls did not complete: {', '.join(sorted(set(unfinished)))}"
