"""`leyden demo`: the flight agent's model learns, on this machine, through the whole platform.

The demo reads every figure from the store through the REST API. A demo that was killed lost nothing: the same command
resumes its run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from leyden.libs.cli.context import Context, Home, context_of
from leyden.libs.cli.errors import CommandError, Exit
from leyden.libs.cli.local.platform import Platform, make_home, platform_options
from leyden.libs.cli.settings import EXAMPLES
from leyden.libs.cli.view.console_link import console_link, link_line
from leyden.libs.cli.view.output import console, report_event
from leyden.libs.cli.view.phases import in_words, phases_of
from leyden.libs.cli.view.run_report import measured, write_report
from leyden.libs.cli.view.watch import demand_completed, evaluation_table, watch_run
from leyden.libs.client import Client
from leyden.libs.contracts.api.runs import Evaluation, Run, Step
from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.states import ENDED

AGENT = EXAMPLES / "flight_agent"
TRAINING_TASKS, HELD_OUT_TASKS = 400, 200
GAMMA = 0.95
AIR_WEIGHTS = {"memory": 0.3, "search": 0.2}
READY_SECONDS = 600.0

AgentName = Literal["plain", "langgraph", "openai-agents", "autogen"]
Rule = Literal["identical", "equal_split", "discounted"]
Baseline = Literal["none", "mean", "mean_std", "leave_one_out"]


@dataclass(frozen=True)
class DemoOptions:
    """Choices of the demo; docs/demo.md shows the figures of the defaults."""

    agent: AgentName = "plain"
    steps: int = 7
    seed: int = 0
    groups_per_step: int = 6
    group_size: int = 8
    evaluation_tasks: int = 100
    credit: Rule = "discounted"
    baseline: Baseline = "mean"
    per: Literal["rollout", "state"] = "state"
    air: bool = True
    max_policy_lag: int = 0
    learning_rate: float = 1e-5
    precision: Literal["float32", "bfloat16"] = "float32"
    agent_python: str = "{python}"


def demo(
    ctx: typer.Context,
    home: Home = None,
    agent: Annotated[
        AgentName, typer.Option(help="Version of the flight agent: plain, or written with a framework.")
    ] = DemoOptions.agent,
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps.")] = DemoOptions.steps,
    seed: Annotated[int, typer.Option(min=0, help="Seed of tasks and of their order.")] = DemoOptions.seed,
    evaluation_tasks: Annotated[
        int, typer.Option(min=1, max=HELD_OUT_TASKS, help="Held-out tasks, one rollout each, before and after.")
    ] = DemoOptions.evaluation_tasks,
    credit: Annotated[Rule, typer.Option(help="Credit rule.")] = DemoOptions.credit,
    baseline: Annotated[Baseline, typer.Option(help="Baseline among siblings.")] = DemoOptions.baseline,
    per: Annotated[
        Literal["rollout", "state"], typer.Option(help="Compare whole rollouts, or calls in the same state.")
    ] = DemoOptions.per,
    air: Annotated[bool, typer.Option(help="Intermediate rewards for tool calls that worked.")] = DemoOptions.air,
    max_policy_lag: Annotated[int, typer.Option(min=0, help="Largest lag of a sample.")] = DemoOptions.max_policy_lag,
    agent_python: Annotated[
        Path | None, typer.Option(help="Interpreter with the agent's packages.", show_default="the runner's own")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin a new run, even if one can be resumed.")] = False,
    require_rise: Annotated[bool, typer.Option("--require-rise", help="Fail unless reward rose.")] = False,
) -> None:
    """Train the flight agent's model on this machine and compare it before and after.

    The last line of output is one JSON object. Ctrl-C stops everything; the same command resumes.
    """
    options = DemoOptions(
        agent=agent,
        steps=steps,
        seed=seed,
        evaluation_tasks=evaluation_tasks,
        credit=credit,
        baseline=baseline,
        per=per,
        air=air,
        max_policy_lag=max_policy_lag,
        # Not resolved: the interpreter of a virtual environment is a link.
        agent_python=str(agent_python.absolute()) if agent_python else DemoOptions.agent_python,
    )
    context = context_of(ctx, home)
    make_home(context.home)
    folder = context.home / "demo"
    tasks = write_tasks(folder / f"tasks-{seed}", options)
    with _platform(context) as platform, Client(platform.facts.url("api"), platform.token) as client:
        run, resumed = find_or_create_run(client, options, tasks, fresh=fresh)
        console.print(f"{'resuming' if resumed else 'created'} run {run.id}: evaluate, {steps} steps, evaluate again")
        link = console_link(client, platform.facts.url("api"), f"/runs/{run.id}")
        console.print(link_line(link), crop=False)
        _show(client, run, folder, require_rise=require_rise, model=str(platform.facts.model_path))


def _show(client: Client, run: Run, folder: Path, *, require_rise: bool, model: str) -> None:
    ended = watch_run(client, run.id, console)
    demand_completed(ended)
    steps, evaluations = list(client.steps(run.id)), list(client.evaluations(run.id))
    if not console.is_terminal:
        console.print(evaluation_table(evaluations), crop=False)
    report = write_report(client, ended, folder / f"{run.id}.html", model=model)
    console.print(f"report: {report}")
    spent = phases_of(client, ended)
    last = summary(ended, steps, evaluations, report) | {"phases": {p.name: round(p.seconds, 1) for p in spent}}
    # Not through rich, which would wrap the JSON object at the width of the terminal.
    sys.stdout.write(f"{in_words(spent)}\n{json.dumps(last)}\n")
    sys.stdout.flush()
    if require_rise:
        check_rise(steps)


@contextlib.contextmanager
def _platform(context: Context) -> Iterator[Platform]:
    """Runs the whole platform during the demo; Ctrl-C stops it in order."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    platform = Platform(context.home, platform_options(context.settings, free_ports=True), report=report_event)
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        platform.start()
        platform.ready(READY_SECONDS)
        yield platform
    except KeyboardInterrupt:
        report_event("interrupted; stopping everything (the same command resumes)")
        raise CommandError("stopped before the end: run `make demo` again to resume", Exit.INTERRUPTED) from None
    finally:
        # make passes on a Ctrl-C that the terminal has sent to the whole group: the second one must not end the stop.
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        platform.stop()
        for number, handler in before.items():
            signal.signal(number, handler)


def dataset_names(seed: int) -> tuple[str, str]:
    """Names of the training and the held-out tasks of a seed."""
    return f"flight-{seed}", f"flight-{seed}-held-out"


def run_document(options: DemoOptions) -> RunConfig:
    """The run that the demo creates; `identical` credit needs a baseline per rollout."""
    training, held_out = dataset_names(options.seed)
    per = "rollout" if options.credit == "identical" else options.per
    document: dict[str, Any] = {
        "name": run_name(options),
        "dataset": training,
        "agent": {"command": [options.agent_python, agent_file(options.agent)], "directory": str(AGENT)},
        "runner": {"timeout_seconds": 180},
        "sampling": {
            "group_size": options.group_size,
            "groups_per_step": options.groups_per_step,
            "max_policy_lag": options.max_policy_lag,
            "seed": options.seed,
        },
        "credit": {
            "rule": {"type": options.credit, **({"gamma": GAMMA} if options.credit == "discounted" else {})},
            "air": {"weights": AIR_WEIGHTS, "failure": 0.0, "null": "nothing"} if options.air else None,
            "baseline": {"type": options.baseline, "per": per},
        },
        "algorithm": {"type": "ppo_clip"},
        "optimizer": {"learning_rate": options.learning_rate},
        "training": {"steps": options.steps, "precision": options.precision, "micro_batch_tokens": 1024},
        "evaluation": {"dataset": held_out, "max_tasks": options.evaluation_tasks},
    }
    return RunConfig.model_validate(document)


def agent_file(agent: AgentName) -> str:
    """The program of a version of the flight agent."""
    return "agent.py" if agent == "plain" else f"{agent.replace('-', '_')}_agent.py"


def run_name(options: DemoOptions) -> str:
    """A name that depends on the options alone, so that the same command finds its run again."""
    digest = hashlib.sha256(json.dumps(asdict(options), sort_keys=True).encode()).hexdigest()[:8]
    version = "" if options.agent == "plain" else f"{options.agent}-"
    return f"flight-{version}{options.credit}{'' if options.air else '-no-air'}-seed{options.seed}-{digest}"


def write_tasks(folder: Path, options: DemoOptions) -> tuple[Path, Path]:
    """Files of training and held-out tasks from the agent's own generator; the same seed writes the same tasks."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = [sys.executable, str(AGENT / "tasks.py"), "--out", str(folder), "--seed", str(options.seed)]
    sizes = ["--train", str(TRAINING_TASKS), "--heldout", str(HELD_OUT_TASKS)]
    subprocess.run([*generator, *sizes], check=True)
    return folder / "train.jsonl", folder / "heldout.jsonl"


def find_or_create_run(
    client: Client, options: DemoOptions, tasks: tuple[Path, Path], *, fresh: bool
) -> tuple[Run, bool]:
    """The run to watch, and whether an earlier demo created it."""
    for name, path in zip(dataset_names(options.seed), tasks, strict=True):
        client.upload_dataset(name, path)
    earlier = next((run for run in client.runs(name=run_name(options)) if run.phase not in ENDED), None)
    if earlier is not None and not fresh:
        return client.resume_run(earlier.id) if earlier.intent == "paused" else earlier, True
    if earlier is not None:
        client.cancel_run(earlier.id)
    return client.create_run(run_document(options)), False


def summary(run: Run, steps: list[Step], evaluations: list[Evaluation], report: Path) -> dict[str, Any]:
    """The last line of the demo. `seconds` are those between the run's creation and its end."""
    assert run.finished_at is not None
    before, after = before_and_after(evaluations)
    return {
        "memory_first": [_share(before, "memory_first"), _share(after, "memory_first")],
        "success": [_share(before, "success"), _share(after, "success")],
        "held_out_tasks": after.results.reward.count if after.results.reward else 0,
        "steps": len(steps),
        "seconds": round((run.finished_at - run.created_at).total_seconds(), 1),
        "report": str(report),
    }


def before_and_after(evaluations: list[Evaluation]) -> tuple[Evaluation, Evaluation]:
    """The evaluations of the first and of the last policy version.

    Raises: CommandError: there are less than two
    """
    complete = measured(evaluations)
    if len(complete) < 2:
        raise CommandError("the run has no evaluation before and after training: `leyden run show` says why it ended")
    return complete[0], complete[-1]


def _share(evaluation: Evaluation, name: str) -> float | None:
    fact = next((fact for fact in evaluation.results.facts if fact.name == name), None)
    return round(fact.statistic.mean, 4) if fact and fact.statistic else None


def check_rise(steps: list[Step]) -> None:
    """Raises: CommandError: the last step did not earn more than the first"""
    means = [step.reward_mean for step in steps if step.reward_mean is not None]
    if len(means) < 2 or means[-1] <= means[0]:
        raise CommandError(f"reward did not rise over the steps: {[round(mean, 3) for mean in means]}")
