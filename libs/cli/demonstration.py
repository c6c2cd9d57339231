"""`leyden demo` as a command: options in, a live table, a comparison, a report, and one last line of JSON out."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal

import typer

from leyden.libs.cli.context import Context, Home, context_of
from leyden.libs.cli.demo import (
    HELD_OUT_TASKS,
    DemoOptions,
    check_rise,
    find_or_create_run,
    summary,
    write_report,
    write_tasks,
)
from leyden.libs.cli.errors import CommandError, Exit
from leyden.libs.cli.output import console
from leyden.libs.cli.phases import in_words, phases_of
from leyden.libs.cli.platform import Platform, platform_options
from leyden.libs.cli.watch import evaluation_table, watch_run
from leyden.libs.client import Client
from leyden.libs.contracts.api import Run

READY_SECONDS = 600.0


def demo(
    ctx: typer.Context,
    home: Home = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps.")] = DemoOptions.steps,
    seed: Annotated[int, typer.Option(min=0, help="Seed of tasks and of their order.")] = DemoOptions.seed,
    evaluation_tasks: Annotated[
        int, typer.Option(min=1, max=HELD_OUT_TASKS, help="Held-out tasks, one rollout each, before and after.")
    ] = DemoOptions.evaluation_tasks,
    credit: Annotated[
        Literal["identical", "equal_split", "discounted"], typer.Option(help="Credit rule.")
    ] = DemoOptions.credit,
    baseline: Annotated[
        Literal["none", "mean", "mean_std", "leave_one_out"], typer.Option(help="Baseline among siblings.")
    ] = DemoOptions.baseline,
    per: Annotated[
        Literal["rollout", "state"], typer.Option(help="Compare whole rollouts, or calls in the same state.")
    ] = DemoOptions.per,
    air: Annotated[bool, typer.Option(help="Intermediate rewards for tool calls that worked.")] = DemoOptions.air,
    max_policy_lag: Annotated[int, typer.Option(min=0, help="How old a sample may be.")] = DemoOptions.max_policy_lag,
    agent_python: Annotated[
        Path | None, typer.Option(help="Interpreter with the agent's packages [default: the runner's own].")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew, even if a run can be resumed.")] = False,
    require_rise: Annotated[bool, typer.Option("--require-rise", help="Fail unless reward rose.")] = False,
) -> None:
    """Train the flight agent's model on this machine and show what it learned.

    The last line of output is one JSON object. Ctrl-C stops everything; the same command resumes.
    """
    options = DemoOptions(
        steps=steps,
        seed=seed,
        evaluation_tasks=evaluation_tasks,
        credit=credit,
        baseline=baseline,
        per=per,
        air=air,
        max_policy_lag=max_policy_lag,
        # Not resolved: a virtual environment's interpreter is a link, and the link is what makes it one.
        agent_python=str(agent_python.absolute()) if agent_python else DemoOptions.agent_python,
    )
    context = context_of(ctx, home)
    folder = context.home
    tasks = write_tasks(folder / "demo" / f"tasks-{seed}", options)
    with _platform(context) as platform, Client(platform.facts.url("api"), platform.token) as client:
        run, resumed = find_or_create_run(client, options, tasks, fresh=fresh)
        console.print(f"{'resuming' if resumed else 'created'} run {run.id}: evaluate, {steps} steps, evaluate again")
        _show(client, run, folder / "demo", require_rise=require_rise)


def _show(client: Client, run: Run, folder: Path, *, require_rise: bool) -> None:
    ended = watch_run(client, run.id, console)
    if ended.phase != "completed":
        raise CommandError(f"run {run.id} is {ended.phase}: {ended.reason or 'see `leyden logs controller`'}")
    steps, evaluations = list(client.steps(run.id)), list(client.evaluations(run.id))
    if not console.is_terminal:
        console.print(evaluation_table(evaluations), width=140, crop=False)
    report = write_report(client, ended, folder)
    console.print(f"report: {report}")
    spent = phases_of(client, ended)
    # Plain, so that a machine finds one line whatever the width of the terminal.
    sys.stdout.write(in_words(spent) + "\n")
    last = summary(ended, steps, evaluations, report) | {"phases": {p.name: round(p.seconds, 1) for p in spent}}
    sys.stdout.write(json.dumps(last) + "\n")
    sys.stdout.flush()
    if require_rise:
        check_rise(steps)


@contextlib.contextmanager
def _platform(context: Context) -> Iterator[Platform]:
    """The whole platform while the demo runs; Ctrl-C ends it in order and says how to go on."""
    platform = Platform(context.home, platform_options(context.settings, free_ports=True), report=_say)
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        platform.start()
        platform.ready(READY_SECONDS)
        yield platform
    except KeyboardInterrupt:
        _say("interrupted; stopping everything (the same command goes on where this one was)")
        message = "stopped before the end: run `make demo` again to resume"
        raise CommandError(message, Exit.INTERRUPTED) from None
    finally:
        # A second one must not interrupt the stop: make tells its children what a whole group was told already.
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        platform.stop()
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _say(words: str) -> None:
    sys.stderr.write(f"leyden: {words}\n")
    sys.stderr.flush()
