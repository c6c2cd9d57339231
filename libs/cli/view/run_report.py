"""Writes the HTML report of any run from what the API has of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from leyden.libs.cli.view.report import Trajectory, render_report
from leyden.libs.client import Client
from leyden.libs.contracts.api.rollouts import Rollout
from leyden.libs.contracts.api.runs import Evaluation, Run, Step


def write_report(client: Client, run: Run, path: Path, *, model: str | None = None) -> Path:
    """The run's page, with trajectories of the first and the last measured version and of the first and the last step.

    Args: model: the platform's model, for a run that names none
    """
    steps, evaluations = list(client.steps(run.id)), list(client.evaluations(run.id))
    shown = [*_evaluated(client, evaluations), *_trained(client, run, steps)]
    trajectories = [_trajectory(client, title, rollout) for title, rollout in shown]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        render_report(
            run,
            steps,
            evaluations,
            trajectories,
            held_out=[point for curve in client.curves([run.id]) for point in curve.held_out],
            model=(run.config and run.config.model) or model,
        )
    )
    return path


def measured(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """The whole evaluations by the version that they measured."""
    complete = [e for e in evaluations if e.results.is_whole and e.measured_version is not None]
    return sorted(complete, key=lambda e: (e.measured_version or 0, e.number))


def _evaluated(client: Client, evaluations: Sequence[Evaluation]) -> Iterator[tuple[str, Rollout]]:
    """A rollout with the most frequent reward of the first evaluation, and one of the last."""
    complete = measured(evaluations)
    ends = dict.fromkeys((0, len(complete) - 1)) if complete else []
    for evaluation in (complete[index] for index in ends):
        found = client.rollouts(run=evaluation.run_id, evaluation=evaluation.id)
        rollouts = [rollout for rollout in found if rollout.reward is not None]
        rewards = [rollout.reward for rollout in rollouts]
        if rewards:
            usual = max(sorted(set(rewards), key=str), key=rewards.count)
            title = "Before training" if evaluation.measured_version == 0 else "After training"
            yield title, next(rollout for rollout in rollouts if rollout.reward == usual)


def _trained(client: Client, run: Run, steps: Sequence[Step]) -> Iterator[tuple[str, Rollout]]:
    """The best trained rollout of the first step, and that of the last."""
    for number in dict.fromkeys((steps[0].number, steps[-1].number)) if steps else ():
        rewarded = [r for r in client.rollouts(run=run.id, step=number) if r.reward is not None]
        if rewarded:
            title = f"Trained in step {number}, the best of its rollouts"
            yield title, max(rewarded, key=lambda rollout: rollout.reward or 0.0)


def _trajectory(client: Client, title: str, rollout: Rollout) -> Trajectory:
    calls = list(client.calls(rollout.id, attempt=rollout.attempt))
    return Trajectory(title, client.rollout(rollout.id), calls, list(client.spans(rollout.id, attempt=rollout.attempt)))
