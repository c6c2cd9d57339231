"""`leyden run …` and `leyden policy …`: training jobs and the weights that they make."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Annotated

import typer

from leyden.libs.cli.cluster.release import copy_from_storage
from leyden.libs.cli.commands.filters import OfEvaluation
from leyden.libs.cli.context import context_of
from leyden.libs.cli.document import read_document, set_values
from leyden.libs.cli.errors import CommandError, Exit
from leyden.libs.cli.view.alarms import alarm_lines
from leyden.libs.cli.view.comparison import comparison_parts, run_table
from leyden.libs.cli.view.output import (
    AsJson,
    Count,
    Part,
    best_words,
    console,
    error_console,
    facts,
    judge_words,
    left_words,
    next_step_words,
    print_result,
    steps_words,
    table,
)
from leyden.libs.cli.view.run_report import write_report
from leyden.libs.cli.view.watch import (
    agent_table,
    call_lines,
    demand_completed,
    evaluation_table,
    policy_table,
    step_table,
    watch_run,
)
from leyden.libs.client.weights import version_folder
from leyden.libs.contracts.api.runs import EvaluationRequest, ResumeRequest, Run, RunParent, RunSort
from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.states import ENDED

app = typer.Typer(no_args_is_help=True, help="Runs: training jobs.")
policies = typer.Typer(no_args_is_help=True, help="Policies: the weights that a run makes.")

Name = Annotated[str, typer.Argument(metavar="RUN", help="Id, or a name; of several runs with one name the newest.")]


PolicyName = Annotated[
    str | None, typer.Option("--policy", help="A further policy of the run.", show_default="the run's own model")
]


RunFile = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="The run's document, JSON or TOML.")]
Changes = Annotated[
    list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Lay a value over the document; repeatable.")
]


@app.command("create")
def create(
    ctx: typer.Context,
    file: RunFile,
    changes: Changes = None,
    key: Annotated[str | None, typer.Option(help="The same key with the same document creates nothing new.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Stay and show its progress, as `run watch`.")] = False,
    as_json: AsJson = False,
) -> None:
    """Create a run from its document; it begins as soon as an engine is free.

    Example: leyden run create run.json --set training.steps=10
    """
    with context_of(ctx).client() as leyden:
        made = leyden.create_run(read_document(file, changes or []), key=key)
        if watch:
            made = watch_run(leyden, made.id, error_console if as_json else console)
    if as_json or not watch:
        shown = facts(("run", made.id), ("name", made.name), ("phase", made.phase), ("steps", made.progress.steps))
        print_result(as_json, made, shown, *alarm_lines(made), f"Watch it with: leyden run watch {made.id}")
    if watch:
        demand_completed(made)


@app.command("list")
def list_(
    ctx: typer.Context,
    phase: Annotated[str | None, typer.Option(help="Only runs in this phase.")] = None,
    dataset: Annotated[
        str | None, typer.Option(help="Id or name: only runs that train on it, or evaluate a version on it.")
    ] = None,
    sort: Annotated[
        RunSort | None,
        typer.Option(help="highest and lowest are by the last step's reward.", show_default="newest"),
    ] = None,
    limit: Count = 20,
    as_json: AsJson = False,
) -> None:
    """List runs, newest first."""
    with context_of(ctx).client() as leyden:
        found = list(itertools.islice(leyden.runs(phase=phase, dataset=dataset, sort=sort), limit))
        curves = {one.run_id: one for one in leyden.curves([run.id for run in found])}
    documents = [{**run.model_dump(mode="json", by_alias=True), "curve": curves.get(run.id)} for run in found]
    print_result(as_json, documents, run_table(found, curves))


@app.command("show")
def show(ctx: typer.Context, run: Name, policy: PolicyName = None, as_json: AsJson = False) -> None:
    """Show a run's progress, its policies, its steps and its evaluations."""
    with context_of(ctx).client() as leyden:
        found = leyden.run(leyden.find_run(run).id)
        steps, evaluations = list(leyden.steps(found.id, policy=policy)), list(leyden.evaluations(found.id))
    shown = facts(
        ("run", found.id),
        ("name", found.name),
        ("phase", f"{found.phase}{f': {found.reason}' if found.reason else ''}"),
        *([("continues", _words(found.parent))] if found.parent else []),
        *(_of_document(found.config) if found.config else []),
        *([("computes in", f"{found.computation.words}, on {found.computation.device}")] if found.computation else []),
        ("step", steps_words(found.progress, " of ")),
        *([("next step", words)] if (words := next_step_words(found.progress)) else []),
        *([("time left", words)] if (words := left_words(found.progress)) else []),
        ("policy version", found.progress.policy_version),
        ("best version", best_words(found, with_reason=True)),
        ("weights", f"{(found.weights_bytes or 0) / 2**20:.1f} MiB, without checkpoints"),
        ("rollouts", found.progress.rollouts),
        *([("judges", words)] if (words := judge_words(found)) else []),
        ("made", found.created_at),
        ("allowed actions", ", ".join(map(_action, found.allowed_actions)) or "none"),
    )
    tables: list[Part] = [*alarm_lines(found), *call_lines(found.calls)]
    tables += [agent_table(found)] if found.agents else []
    tables += [policy_table(found)] if found.policies else []
    tables += [step_table(steps)] if steps else []
    tables += [evaluation_table(evaluations)] if evaluations else []
    document = {**found.model_dump(mode="json"), "step_list": steps, "evaluations": evaluations}
    print_result(as_json, document, shown, *tables)


def _of_document(config: RunConfig) -> list[tuple[str, object]]:
    return [("pool", config.pool), ("learning rate", f"{config.optimizer.rate:.3g}")]


@app.command("compare")
def compare(
    ctx: typer.Context,
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Ids or names of runs, the first one first.")],
    as_json: AsJson = False,
) -> None:
    """Compare runs with the first one: figures, differences of their documents, and tasks won and lost."""
    with context_of(ctx).client() as leyden:
        found = leyden.compare_runs([leyden.find_run(run).id for run in runs])
    print_result(as_json, found, *comparison_parts(found))


@app.command("watch")
def watch(ctx: typer.Context, run: Name, as_json: AsJson = False) -> None:
    """Show a run's progress until it has ended; Ctrl-C leaves it running. Exit status 1 where it was not completed.

    With --json each line is one JSON object: a step as soon as it is made, at the end the evaluations and the run.
    """
    with context_of(ctx).client() as leyden:
        seen = watch_run(leyden, leyden.find_run(run).id, error_console if as_json else console, as_json=as_json)
    demand_completed(seen)


@app.command("report")
def report(
    ctx: typer.Context,
    run: Name,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", dir_okay=False, help="File.", show_default="RUN.html, by the id")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a run's report: one HTML page with curves, evaluations and trajectories that needs no other file."""
    context = context_of(ctx)
    record = None if context.settings.url or context.on_cluster else context.record()
    with context.client() as leyden:
        found = leyden.find_run(run)
        path = output or Path(f"{found.id}.html")
        write_report(leyden, found, path, model=record.model_path if record else None)
    print_result(as_json, {"report": str(path.resolve())}, f"report: {path}")


@app.command("pause")
def pause(ctx: typer.Context, run: Name, as_json: AsJson = False) -> None:
    """Pause a run: its running rollouts end, and no new ones begin."""
    with context_of(ctx).client() as leyden:
        _print_intent(leyden.pause_run(leyden.find_run(run).id), as_json)


@app.command("resume")
def resume(
    ctx: typer.Context,
    run: Name,
    changes: Changes = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Further steps.", show_default="those that the ended run did not make")
    ] = None,
    from_version: Annotated[
        int | None, typer.Option(min=0, help="Policy version to begin with.", show_default="the newest")
    ] = None,
    policy_versions: Annotated[
        list[str] | None,
        typer.Option(
            "--policy-version",
            metavar="POLICY=VERSION",
            help="Version for a further policy to begin with; repeatable.",
            show_default="the same number, or its newest where that has no files",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Resume a paused run, or continue an ended one as a new run, with changes of its document.

    The further policies of a run continue with it, as policies of the new run.

    Example: leyden run resume RUN --set optimizer.learning_rate=5e-7 --steps 200
    """
    amendments = [*(changes or []), *([] if steps is None else [f"training.steps={steps}"])]
    with context_of(ctx).client() as leyden:
        found = leyden.find_run(run)
        if found.phase not in ENDED and not amendments and from_version is None and not policy_versions:
            return _print_intent(leyden.resume_run(found.id), as_json)
        request = ResumeRequest(
            changes=set_values({}, amendments),
            from_version=from_version,
            policy_versions=dict(map(_policy_version, policy_versions or [])),
        )
        made = leyden.continue_run(found.id, request)
    _print_continued(made, as_json)
    return None


def _print_continued(made: Run, as_json: bool) -> None:
    of_policies = (
        (f"policy {name}", f"from {_words(one.parent) or 'its base model'}") for name, one in made.policies.items()
    )
    shown = facts(
        ("run", made.id),
        ("continues", _words(made.parent)),
        ("phase", made.phase),
        ("steps", made.progress.steps),
        *of_policies,
    )
    print_result(as_json, made, shown, *alarm_lines(made), f"Watch it with: leyden run watch {made.id}")


def _policy_version(given: str) -> tuple[str, int]:
    policy, _, version = given.rpartition("=")
    if not policy or not (version.isascii() and version.isdecimal()):
        example = "--policy-version checker=17"
        raise CommandError(f"--policy-version {given!r} is not POLICY=VERSION: write {example}", Exit.USAGE)
    return policy, int(version)


def _action(name: str) -> str:
    """The command of an action."""
    return "resume (as a new run)" if name == "continue" else name


def _words(parent: RunParent | None) -> str | None:
    return None if parent is None else f"{parent.run_id}, version {parent.version}"


@app.command("cancel")
def cancel(ctx: typer.Context, run: Name, as_json: AsJson = False) -> None:
    """Cancel a run for good; its weights and records stay."""
    with context_of(ctx).client() as leyden:
        _print_intent(leyden.cancel_run(leyden.find_run(run).id), as_json)


def _print_intent(run: Run, as_json: bool) -> None:
    print_result(as_json, run, facts(("run", run.id), ("intent", run.intent), ("phase", run.phase)))


@app.command("prune")
def prune(
    ctx: typer.Context,
    run: Name,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete calls, spans, credits, samples, agents' outputs and files of an ended run; results and weights stay."""
    with context_of(ctx).client() as leyden:
        found = leyden.find_run(run)
        if not yes:
            typer.confirm(f"Delete the records, outputs and files of {found.name} ({found.id})?", abort=True)
        pruned = leyden.prune_run(found.id)
    shown = facts(("run", pruned.run_id), ("freed", f"{pruned.freed_bytes / 2**20:.1f} MiB"))
    print_result(as_json, pruned, shown)


@app.command("delete")
def delete(
    ctx: typer.Context, run: Name, yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False
) -> None:
    """Delete a run that has ended, with its records, results, weights and checkpoints."""
    with context_of(ctx).client() as leyden:
        found = leyden.find_run(run)
        if not yes:
            typer.confirm(f"Delete everything of {found.name} ({found.id}), its weights too?", abort=True)
        leyden.delete_run(found.id)


@app.command("evaluate")
def evaluate(
    ctx: typer.Context,
    run: Name,
    version: Annotated[int | None, typer.Option(min=0, help="Policy version.", show_default="the last")] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            help="Id or name; needed for a run that plans no evaluation.", show_default="the run's evaluation dataset"
        ),
    ] = None,
    rollouts: Annotated[int | None, typer.Option(min=1, help="Rollouts per task.")] = None,
    tasks: Annotated[int | None, typer.Option(min=1, help="At most this many tasks.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a policy version on held-out tasks."""
    request = EvaluationRequest(policy_version=version, dataset=dataset, rollouts_per_task=rollouts, max_tasks=tasks)
    with context_of(ctx).client() as leyden:
        made = leyden.evaluate_run(leyden.find_run(run).id, request)
    shown = facts(("evaluation", made.id), ("version", made.policy_version), ("dataset", made.dataset_id))
    print_result(as_json, made, shown, f"See its results with: leyden run show {made.run_id}")


@app.command("agents")
def list_agents(ctx: typer.Context, run: Name, as_json: AsJson = False) -> None:
    """List the agents that called the model in a run: the shares of calls that extend, fork or start a conversation."""
    with context_of(ctx).client() as leyden:
        found = list(leyden.agents(leyden.find_run(run).id))
    rows = [
        (
            *(one.identity, one.name, ", ".join(one.roles), ", ".join(one.tools), one.calls),
            *(f"{share:.0%}" for share in (one.extend_share, one.fork_share, one.fresh_share)),
            *(one.first_seen_at, one.last_seen_at),
        )
        for one in found
    ]
    heads = ("agent", "name", "role", "tools", "calls", "extend", "fork", "fresh", "first call", "last call")
    print_result(as_json, found, table(heads, rows))


@app.command("tasks")
def list_tasks(
    ctx: typer.Context,
    run: Name,
    evaluation: OfEvaluation = None,
    verdict: Annotated[str | None, typer.Option(help="solved, unsolved, mixed or unknown.")] = None,
    sort: Annotated[
        str | None, typer.Option(help="number, highest, lowest, attempts or failure.", show_default="number")
    ] = None,
    limit: Count = 100,
    as_json: AsJson = False,
) -> None:
    """List the tasks of a run: attempts, mean reward by version, whether they are solved, and the last failure."""
    with context_of(ctx).client() as leyden:
        listed = leyden.run_tasks(leyden.find_run(run).id, evaluation=evaluation, verdict=verdict, sort=sort)
        found = list(itertools.islice(listed, limit))
    rows = [
        (
            *(one.number, one.text, one.rollouts, one.attempts, one.reward_mean, one.verdict or "unknown"),
            " ".join(
                f"{of.version}:{'–' if of.reward_mean is None else f'{of.reward_mean:.2f}'}" for of in one.versions
            ),
            one.last_failure and f"{one.last_failure.reason} ({one.last_failure.rollout_id})",
        )
        for one in found
    ]
    heads = ("task", "text", "rollouts", "attempts", "reward", "verdict", "by version", "last failure")
    print_result(as_json, found, table(heads, rows))


@policies.command("list")
def list_policies(
    ctx: typer.Context,
    run: Name,
    policy: PolicyName = None,
    kept: Annotated[bool, typer.Option("--kept", help="Versions alone whose files are there.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the policy versions of a run with the mean training reward that each earned; 0 is the base model."""
    with context_of(ctx).client() as leyden:
        found = list(leyden.policies(leyden.find_run(run).id, policy=policy, kept=kept or None))
    rows = [
        (
            p.version,
            None if p.reward_mean is None else f"{p.reward_mean:.3f}",
            p.engines,
            f"{p.size_bytes / 2**20:.0f} MiB",
            p.content_sha256[:12],
            p.path if p.pruned_at is None else "removed (training.keep_checkpoints)",
            p.created_at,
        )
        for p in found
    ]
    print_result(as_json, found, table(("version", "reward", "engines", "size", "sha256", "folder", "made"), rows))


@policies.command("export")
def export(
    ctx: typer.Context,
    run: Name,
    to: Annotated[Path, typer.Option("--to", help="Folder to make; it must not exist.")],
    version: Annotated[int | None, typer.Option(min=0, help="Policy version.", show_default="the last")] = None,
    policy: PolicyName = None,
    as_json: AsJson = False,
) -> None:
    """Copy a policy version as an ordinary Hugging Face folder, which is there once its weights are checked.

    From another machine the API sends it, if that has the trainer's files; with --context, the cluster's storage.
    """
    context = context_of(ctx)
    with context.client() as leyden:
        run_id = leyden.find_run(run).id
        available = [p for p in leyden.policies(run_id, policy=policy) if p.pruned_at is None]
        matching = [p for p in available if version is None or p.version == version]
        if not matching:
            versions = ", ".join(str(p.version) for p in available) or "none yet"
            raise CommandError(f"no weights of that version; there are: {versions}", Exit.NOT_FOUND)
        chosen = matching[-1]
        if context.on_cluster:
            with version_folder(to, chosen.content_sha256) as made:
                copy_from_storage(context.release(), chosen.path, made)
        elif Path(chosen.path).is_dir():
            with version_folder(to, chosen.content_sha256) as made:
                shutil.copytree(chosen.path, made)
        else:
            leyden.download_version(run_id, chosen.version, to, policy=policy)
    print_result(
        as_json,
        {**chosen.model_dump(mode="json"), "exported_to": str(to.resolve())},
        f"version {chosen.version} is in {to}; open it with transformers or serve it with SGLang",
    )
