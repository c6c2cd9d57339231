"""`leyden run …`"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated

import typer

from leyden.libs.cli.context import context_of
from leyden.libs.cli.document import read_document
from leyden.libs.cli.errors import CommandError
from leyden.libs.cli.output import AsJson, Count, console, print_facts, print_json, print_table
from leyden.libs.cli.watch import evaluation_table, step_table, watch_run
from leyden.libs.contracts.api import EvaluationRequest, Run

app = typer.Typer(no_args_is_help=True, help="Runs: training jobs.")

Name = Annotated[str, typer.Argument(metavar="RUN", help="Id, or the name of the newest run that has it.")]


@app.command("create")
def create(
    ctx: typer.Context,
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="The run's document, JSON or TOML.")],
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Lay a value over the document; repeatable.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="The same key with the same document creates nothing new.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Stay and show its progress.")] = False,
    as_json: AsJson = False,
) -> None:
    """Create a run from its document; it begins as soon as an engine is free.

    Example: leyden run create run.json --set training.steps=10
    """
    with context_of(ctx).client() as leyden:
        made = leyden.create_run(read_document(file, changes or []), key=key)
        if watch:
            made = watch_run(leyden, made.id, console)
    if as_json:
        print_json(made)
    elif not watch:
        print_facts([("run", made.id), ("name", made.name), ("phase", made.phase), ("steps", made.progress.steps)])
        console.print(f"Watch it with: leyden run watch {made.id}")


@app.command("list")
def list_(
    ctx: typer.Context,
    phase: Annotated[str | None, typer.Option(help="Only runs in this phase.")] = None,
    limit: Count = 20,
    as_json: AsJson = False,
) -> None:
    """List runs, newest first."""
    with context_of(ctx).client() as leyden:
        found = list(itertools.islice(leyden.runs(phase=phase), limit))
    if as_json:
        print_json(found)
        return
    rows = [
        (
            run.id,
            run.name,
            run.phase,
            f"{run.progress.step}/{run.progress.steps}",
            run.progress.reward_mean,
            run.created_at,
        )
        for run in found
    ]
    print_table(("run", "name", "phase", "step", "reward", "made"), rows, empty="No runs: `leyden run create FILE`.")


@app.command("show")
def show(ctx: typer.Context, run: Name, as_json: AsJson = False) -> None:
    """Show a run: where it is, its steps and evaluations."""
    with context_of(ctx).client() as leyden:
        found = leyden.find_run(run)
        steps, evaluations = list(leyden.steps(found.id)), list(leyden.evaluations(found.id))
    if as_json:
        print_json(
            {
                **found.model_dump(mode="json"),
                "step_list": [step.model_dump(mode="json") for step in steps],
                "evaluations": [evaluation.model_dump(mode="json") for evaluation in evaluations],
            }
        )
        return
    _print_run(found)
    if steps:
        console.print(step_table(steps))
    if evaluations:
        console.print(evaluation_table(evaluations))


def _print_run(run: Run) -> None:
    print_facts(
        [
            ("run", run.id),
            ("name", run.name),
            ("phase", f"{run.phase}{f': {run.reason}' if run.reason else ''}"),
            ("step", f"{run.progress.step} of {run.progress.steps}"),
            ("policy version", run.progress.policy_version),
            ("rollouts", run.progress.rollouts),
            ("made", run.created_at),
            ("you may", ", ".join(run.allowed_actions) or "nothing"),
        ]
    )


@app.command("watch")
def watch(ctx: typer.Context, run: Name, as_json: AsJson = False) -> None:
    """Show a run's progress until it is over; Ctrl-C leaves it running. Exit status 1 when the run failed."""
    with context_of(ctx).client() as leyden:
        seen = watch_run(leyden, leyden.find_run(run).id, console)
    if as_json:
        print_json(seen)
    if seen.phase == "failed":
        raise CommandError(f"run {seen.id} failed: {seen.reason}")


@app.command("pause")
def pause(ctx: typer.Context, run: Name, as_json: AsJson = False) -> None:
    """Pause a run: rollouts under way end, no new ones begin."""
    with context_of(ctx).client() as leyden:
        _tell(leyden.pause_run(leyden.find_run(run).id), as_json)


@app.command("resume")
def resume(ctx: typer.Context, run: Name, as_json: AsJson = False) -> None:
    """Resume a paused run."""
    with context_of(ctx).client() as leyden:
        _tell(leyden.resume_run(leyden.find_run(run).id), as_json)


@app.command("cancel")
def cancel(ctx: typer.Context, run: Name, as_json: AsJson = False) -> None:
    """Cancel a run for good; its weights and records stay."""
    with context_of(ctx).client() as leyden:
        _tell(leyden.cancel_run(leyden.find_run(run).id), as_json)


@app.command("prune")
def prune(
    ctx: typer.Context,
    run: Name,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Drop the calls, spans, credits and samples of a run that has ended, for good; its results and weights stay."""
    with context_of(ctx).client() as leyden:
        found = leyden.find_run(run)
        if not yes:
            typer.confirm(f"Drop what {found.name} ({found.id}) recorded?", abort=True)
        pruned = leyden.prune_run(found.id)
    if as_json:
        print_json(pruned)
    else:
        print_facts([("run", pruned.run_id), ("freed", f"{pruned.freed_bytes / 2**20:.1f} MiB")])


def _tell(run: Run, as_json: bool) -> None:
    if as_json:
        print_json(run)
    else:
        print_facts([("run", run.id), ("wanted", run.intent), ("phase", run.phase)])


@app.command("evaluate")
def evaluate(
    ctx: typer.Context,
    run: Name,
    version: Annotated[int | None, typer.Option(min=0, help="Policy version [default: the last].")] = None,
    dataset: Annotated[str | None, typer.Option(help="Id or name [default: the run's evaluation dataset].")] = None,
    rollouts: Annotated[int | None, typer.Option(min=1, help="Rollouts per task.")] = None,
    tasks: Annotated[int | None, typer.Option(min=1, help="At most this many tasks.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a policy version on held-out tasks."""
    request = EvaluationRequest(policy_version=version, dataset=dataset, rollouts_per_task=rollouts, max_tasks=tasks)
    with context_of(ctx).client() as leyden:
        made = leyden.evaluate_run(leyden.find_run(run).id, request)
    if as_json:
        print_json(made)
    else:
        print_facts([("evaluation", made.id), ("version", made.policy_version), ("dataset", made.dataset_id)])
        console.print(f"See its results with: leyden run show {made.run_id}")
