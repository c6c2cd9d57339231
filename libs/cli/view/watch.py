"""The live table of a run, one row a step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from itertools import chain

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from leyden.libs.cli.errors import CommandError
from leyden.libs.cli.view.alarms import Alarms, alarm_lines, alarm_news
from leyden.libs.cli.view.output import (
    as_text,
    best_words,
    left_words,
    mean_and_interval,
    next_step_words,
    pass_words,
    print_json_line,
    steps_words,
    table,
)
from leyden.libs.client import Client, Unreachable
from leyden.libs.contracts.api.runs import Evaluation, Run, RunPolicy, Step
from leyden.libs.contracts.call_counts import CallCounts, why_nothing_trains
from leyden.libs.contracts.states import ENDED

ROWS = 30
OUTAGE_SECONDS = 600.0
OUTAGE_PAUSE_SECONDS = 5.0

METRICS = {"loss": "loss", "entropy": "entropy", "kl_reference": "KL"}
"""The trainer's metrics in the table, with their titles."""
CRITICS = {"value_loss": "value loss", "value_explained_variance": "value explained"}
"""Further metrics of runs with a critic."""
TEACHERS = {"kl_teacher": "KL to teacher"}
"""Further metrics of runs with a teacher."""


def watch_run(leyden: Client, run_id: str, console: Console, *, as_json: bool = False) -> Run:
    """Shows a run until it has ended and all its evaluations are complete; returns its last state.

    A terminal shows one table that is drawn again at every change; other outputs get one line a step. `as_json` prints
    each step as one JSON object on one line of standard output, then each evaluation, then the run.
    """
    printed, alarms = 0, Alarms()
    changes = leyden.changes(run_id)
    with Live(console=console, auto_refresh=False, transient=False) as live, closing(changes):
        # The first look needs no stream.
        for _ in chain([()], changes):
            run, steps, evaluations = _poll(leyden, run_id, console)
            # Rewards from outside may come days later: nobody waits for them here.
            complete = all(one.results.complete or one.results.pending for one in evaluations)
            if console.is_terminal:
                live.update(view(run, steps, evaluations), refresh=True)
            else:
                for news in alarm_news(run, alarms):
                    console.print(news, soft_wrap=True)
                for step in [] if as_json else steps[printed:]:
                    console.print(as_text(line(step)), soft_wrap=True)
            for step in steps[printed:] if as_json else []:
                print_json_line({"type": "step", **step.model_dump(mode="json")})
            printed = len(steps)
            if run.phase in ENDED and (complete or run.phase != "completed"):
                break
    if not console.is_terminal:
        console.print(summary(run), soft_wrap=True)
    if as_json:
        for evaluation in evaluations:
            print_json_line({"type": "evaluation", **evaluation.model_dump(mode="json")})
        print_json_line({"type": "run", **run.model_dump(mode="json")})
    return run


def demand_completed(run: Run) -> None:
    """Raises: CommandError: a watched run failed or was cancelled, so that no script goes on with half of it"""
    if run.phase != "completed":
        raise CommandError(f"run {run.id} is {run.phase}: {run.reason or 'see `leyden logs controller`'}")


def _poll(leyden: Client, run_id: str, console: Console) -> tuple[Run, list[Step], list[Evaluation]]:
    """The run as it is now. A slow or restarting API ends no watch: the run goes on without it.

    Raises: Unreachable: the API has not answered for `OUTAGE_SECONDS`
    """
    deadline = time.monotonic() + OUTAGE_SECONDS
    while True:
        try:
            return leyden.run(run_id), list(leyden.steps(run_id)), list(leyden.evaluations(run_id))
        except Unreachable as error:
            if time.monotonic() > deadline:
                raise
            console.print(as_text(f"waiting for the API: {error}"), soft_wrap=True)
            time.sleep(OUTAGE_PAUSE_SECONDS)


def view(run: Run, steps: Sequence[Step], evaluations: Sequence[Evaluation]) -> RenderableType:
    """The terminal's view of a run."""
    parts: list[RenderableType] = [summary(run), step_table(steps[-ROWS:])]
    parts += [agent_table(run)] if run.agents else []
    measured = [evaluation for evaluation in evaluations if evaluation.results.rollouts]
    return Group(*parts, evaluation_table(measured)) if measured else Group(*parts)


def summary(run: Run) -> Text:
    """A run's phase and progress in one line, one of the next step and the time left where they are known,
    and a line for each of its further policies and alarms."""
    progress = run.progress
    rollouts = ", ".join(f"{count} {state}" for state, count in sorted(progress.rollouts.items())) or "none"
    words = f"{run.name} ({run.id}): {run.phase}, step {steps_words(progress, ' of ')}, rollouts {rollouts}"
    first = f"{words}: {run.reason}" if run.reason else words
    left = left_words(progress)
    next_step = ", ".join(filter(None, (next_step_words(progress), left and f"{left} left")))
    policies = [f"policy {name}: {policy_words(one)}" for name, one in run.policies.items()]
    return Text("\n").join([*map(as_text, filter(None, [first, next_step, *policies])), *alarm_lines(run)])


def policy_words(policy: RunPolicy) -> str:
    """The progress of a further policy, in a few words."""
    version = "no version yet" if policy.policy_version is None else f"version {policy.policy_version}"
    return f"step {steps_words(policy, ' of ')}, {version}" if policy.trains else f"frozen, {version}"


def call_lines(counts: CallCounts) -> list[Text]:
    """The counts of a run's model calls and tools, in lines; none before its first credited group."""
    if not counts.calls:
        return []
    odd = (
        ("malformed", counts.malformed),
        ("empty", counts.empty),
        ("cut off", counts.cut),
        ("beyond the context", counts.overflows),
    )
    words = [f"{counts.calls} model calls", *(f"{count} {name}" for name, count in odd if count)]
    lines = [", ".join(words)]
    lines += [f"{count} calls do not train: {reason}" for reason, count in counts.untrainable.items()]
    lines += [
        f"tool {tool}: " + ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))
        for tool, statuses in counts.tools.items()
    ]
    return list(map(as_text, lines))


def step_table(steps: Sequence[Step]) -> Table:
    """Reward with its standard deviation, facts, loss, entropy, KL, tokens and seconds, by step; with the metrics of
    a critic and the samples that were used again, where the run has them."""
    replays = any(step.metrics.get("samples_replayed") for step in steps)
    metrics = _metrics(steps)
    facts = list(dict.fromkeys(name for step in steps for name in step.facts))
    rows = [
        (
            step.number,
            _number(step.reward_mean),
            _number(step.reward_std),
            *(_share(step.facts.get(name)) for name in facts),
            *(_metric(step, name) for name in metrics),
            *([_replayed(step)] if replays else []),
            _count(step),
            _seconds(step.metrics.get("step_seconds")),
        )
        for step in steps
    ]
    titles = [name.replace("_", " ") for name in facts]
    head = ("step", "reward", "±", *titles, *metrics.values(), *(["replayed"] if replays else []), "tokens", "seconds")
    return table(head, rows, justify="right")


def agent_table(run: Run) -> Table:
    """The agents of a run that has several, with their rewards in the last step that had rollouts of each."""
    rows = [(name, one.step, one.rollouts, one.reward_mean) for name, one in run.agents.items()]
    return table(("agent", "last step", "rollouts", "reward"), rows)


def policy_table(run: Run) -> Table:
    """The further policies of a run, those of providers too."""
    rows = []
    for name, policy in (run.config.policies if run.config else {}).items():
        made = run.policies.get(name)
        rows.append(
            (
                name,
                policy.pool or f"provider {policy.provider}",
                policy_words(made) if made else "answers only",
                None if made is None else best_words(made),
                None if made is None or made.weights_bytes is None else f"{made.weights_bytes / 2**20:.1f} MiB",
                None if made is None else made.id,
            )
        )
    return table(("policy", "pool", "progress", "best version", "weights", "id"), rows)


def line(step: Step) -> str:
    """A step in one line, for logs."""
    parts = [f"step {step.number}: reward {_number(step.reward_mean)} ± {_number(step.reward_std)}"]
    parts += [f"{name} {_share(step.facts[name])}" for name in step.facts]
    metrics = _metrics([step])
    parts += [f"{title} {_metric(step, name)}" for name, title in metrics.items()]
    parts += [f"replayed {_replayed(step)}"] if step.metrics.get("samples_replayed") else []
    parts += [f"tokens {_count(step)}", f"seconds {_seconds(step.metrics.get('step_seconds'))}"]
    return ", ".join(parts + idle(step))


def idle(step: Step) -> list[str]:
    """Says that none of a step's tokens can be trained, and why."""
    if step.metrics.get("trainable_tokens", 1):
        return []
    return [f"no token can be trained: {why_nothing_trains(step.calls)}"]


def evaluation_table(evaluations: Sequence[Evaluation]) -> Table:
    """Reward, also of each agent where the run has several, and facts of each evaluation with their 95 % intervals."""
    rows = []
    for evaluation in evaluations:
        results = evaluation.results
        shares = [
            f"{fact.name} {mean_and_interval(fact.statistic, '.1%')}"
            for fact in results.facts
            if fact.kind == "share" and fact.statistic is not None
        ]
        texts = [f"{fact.name} {fact.counts}" for fact in results.facts if fact.counts is not None]
        rewards = [mean_and_interval(results.reward, ".3f") if results.reward else "–"]
        rewards += [f"pass@{one.k} {pass_words(one, evaluation)}" for one in results.pass_at]
        rewards += [f"{name} {mean_and_interval(one, '.3f')}" for name, one in results.agents.items()]
        rows.append(
            (
                evaluation.number,
                evaluation.measured_version,
                ", ".join(f"{count} {state}" for state, count in sorted(results.rollouts.items())),
                Text("\n").join(map(as_text, rewards)),
                Text("\n").join(map(as_text, [*shares, *texts])),
            )
        )
    return table(("evaluation", "version", "rollouts", "reward", "facts"), rows)


def _metrics(steps: Sequence[Step]) -> dict[str, str]:
    """The shown metrics with their titles: of a critic and a teacher where the steps have them."""
    found = set[str]().union(*(step.metrics for step in steps))
    return METRICS | {name: title for name, title in (CRITICS | TEACHERS).items() if name in found}


def _metric(step: Step, name: str) -> str:
    """Three digits; "–" for an unknown one."""
    value = step.metrics.get(name)
    return "–" if value is None else f"{value:.3g}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _share(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0%}" if 0 <= value <= 1 else f"{value:.2f}"


def _replayed(step: Step) -> str:
    replayed, samples = (step.metrics.get(name) or 0.0 for name in ("samples_replayed", "samples"))
    return f"{replayed:.0f} of {samples:.0f}"


def _count(step: Step) -> str:
    tokens = step.metrics.get("trained_tokens", step.metrics.get("tokens"))
    return "–" if tokens is None else f"{tokens:,.0f}"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"
