"""`leyden demo`: the flight agent's model learns, on this machine, through the whole platform.

Everything it shows and its last line come from the store through the REST API; killing the demo loses nothing, and
running it again goes on with the run it left.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import leyden
from leyden.libs.cli.report import Trajectory, render_report
from leyden.libs.client import Client
from leyden.libs.contracts.api import Evaluation, Fact, Rollout, Run, Step
from leyden.libs.contracts.config import RunConfig

AGENT = (Path(leyden.__file__).parent / "examples" / "flight_agent").resolve()
TRAINING_TASKS, HELD_OUT_TASKS = 400, 200
ENDED = {"completed", "failed", "cancelled"}
AIR_WEIGHTS = {"memory": 0.3, "search": 0.2}


@dataclass(frozen=True)
class DemoOptions:
    """What of the demo can be chosen; the defaults are the recipe whose figures docs/demo.md shows."""

    steps: int = 7
    seed: int = 0
    groups_per_step: int = 6
    group_size: int = 8
    evaluation_tasks: int = 100
    credit: Literal["identical", "equal_split", "discounted"] = "discounted"
    baseline: Literal["none", "mean", "mean_std", "leave_one_out"] = "mean"
    per: Literal["rollout", "state"] = "state"
    air: bool = True
    max_policy_lag: int = 0
    learning_rate: float = 1e-5
    precision: Literal["float32", "bfloat16"] = "float32"
    agent_python: str = "{python}"


class DemoError(RuntimeError):
    """The demo did not show what it is for; the message says where to look."""


def dataset_names(seed: int) -> tuple[str, str]:
    """Training and held-out tasks of a seed."""
    return f"flight-{seed}", f"flight-{seed}-held-out"


def run_document(options: DemoOptions) -> RunConfig:
    """The run that the demo creates; the state baseline compares returns of calls, so it goes without `identical`."""
    training, held_out = dataset_names(options.seed)
    per = "rollout" if options.credit == "identical" else options.per
    document: dict[str, Any] = {
        "name": run_name(options),
        "dataset": training,
        "agent": {"command": [options.agent_python, "agent.py"], "directory": str(AGENT)},
        "runner": {"timeout_seconds": 180},
        "sampling": {
            "group_size": options.group_size,
            "groups_per_step": options.groups_per_step,
            "max_policy_lag": options.max_policy_lag,
            "seed": options.seed,
        },
        "credit": {
            "rule": {"type": options.credit},
            "air": {"weights": AIR_WEIGHTS} if options.air else None,
            "baseline": {"type": options.baseline, "per": per},
        },
        "algorithm": {"type": "ppo_clip"},
        "optimizer": {"learning_rate": options.learning_rate},
        "training": {"steps": options.steps, "precision": options.precision, "micro_batch_tokens": 1024},
        "evaluation": {"dataset": held_out, "max_tasks": options.evaluation_tasks},
    }
    return RunConfig.model_validate(document)


def run_name(options: DemoOptions) -> str:
    """The same options name the same run, so that it can be resumed."""
    digest = hashlib.sha256(json.dumps(asdict(options), sort_keys=True).encode()).hexdigest()[:8]
    return f"flight-{options.credit}{'' if options.air else '-no-air'}-seed{options.seed}-{digest}"


def write_tasks(folder: Path, options: DemoOptions) -> tuple[Path, Path]:
    """The agent's own generator writes training and held-out tasks; the same seed writes the same."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [
            *(sys.executable, str(AGENT / "tasks.py"), "--out", str(folder), "--seed", str(options.seed)),
            *("--train", str(TRAINING_TASKS), "--heldout", str(HELD_OUT_TASKS)),
        ],
        check=True,
    )
    return folder / "train.jsonl", folder / "heldout.jsonl"


def find_or_create_run(
    client: Client, options: DemoOptions, tasks: tuple[Path, Path], *, fresh: bool
) -> tuple[Run, bool]:
    """The run to follow, and whether it is one that an earlier demo left."""
    for name, path in zip(dataset_names(options.seed), tasks, strict=True):
        client.upload_dataset(name, path)
    left = next((run for run in client.runs(name=run_name(options)) if run.phase not in ENDED), None)
    if left is None or fresh:
        if left is not None:
            client.cancel_run(left.id)
        return client.create_run(run_document(options)), False
    return (client.resume_run(left.id) if left.intent == "paused" else left), True


def summary(run: Run, steps: list[Step], evaluations: list[Evaluation], report: Path) -> dict[str, Any]:
    """The demo's last line. `seconds` is from the run's creation to its end, as the store knows them."""
    before, after = before_and_after(evaluations)
    if run.finished_at is None:
        raise DemoError(f"run {run.id} is {run.phase} and has no end yet: `leyden run watch {run.id}` follows it")
    return {
        "memory_first": [_share(before, "memory_first"), _share(after, "memory_first")],
        "success": [_share(before, "success"), _share(after, "success")],
        "held_out_tasks": after.results.reward.count if after.results.reward else 0,
        "steps": len(steps),
        "seconds": round((run.finished_at - run.created_at).total_seconds(), 1),
        "report": str(report),
    }


def before_and_after(evaluations: list[Evaluation]) -> tuple[Evaluation, Evaluation]:
    """The measurements of the first and of the last policy version."""
    measured = sorted(
        (e for e in evaluations if e.results.complete and e.measured_version is not None),
        key=lambda e: (e.measured_version or 0, e.number),
    )
    if len(measured) < 2:
        raise DemoError("the run has no evaluation before and after training: see `leyden run show` for why it ended")
    return measured[0], measured[-1]


def _share(evaluation: Evaluation, name: str) -> float | None:
    fact: Fact | None = next((fact for fact in evaluation.results.facts if fact.name == name), None)
    return round(fact.statistic.mean, 4) if fact and fact.statistic else None


def check_rise(steps: list[Step]) -> None:
    """Raises DemoError unless the last steps earned more than the first."""
    means = [step.reward_mean for step in steps if step.reward_mean is not None]
    if len(means) < 2 or means[-1] <= means[0]:
        raise DemoError(f"reward did not rise over the steps: {[round(mean, 3) for mean in means]}")


def write_report(client: Client, run: Run, folder: Path) -> Path:
    """The run's HTML page, with one trajectory of the first and one of the last policy version."""
    evaluations = list(client.evaluations(run.id))
    before, after = before_and_after(evaluations)
    trajectories = [
        _trajectory(client, "Before training", _typical(client, before)),
        _trajectory(client, "After training", _typical(client, after)),
        *_credited(client, run),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{run.id}.html"
    path.write_text(render_report(run, list(client.steps(run.id)), evaluations, trajectories))
    return path


def _typical(client: Client, evaluation: Evaluation) -> Rollout:
    """A rollout whose reward is the more frequent one of an evaluation."""
    rollouts = [r for r in client.rollouts(run=evaluation.run_id, evaluation=evaluation.id) if r.reward is not None]
    rewards = [r.reward for r in rollouts]
    usual = max(sorted(set(rewards), key=str), key=rewards.count)
    return next(r for r in rollouts if r.reward == usual)


def _credited(client: Client, run: Run) -> list[Trajectory]:
    """A training rollout of the first step and one of the last that succeeded, with what each call was credited."""
    chosen = []
    for title, step in (("Trained in the first step", 1), ("Trained in the last step", run.progress.step)):
        rollouts = [r for r in client.rollouts(run=run.id, step=step) if r.reward is not None]
        if rollouts:
            chosen.append(_trajectory(client, title, max(rollouts, key=lambda r: r.reward or 0.0)))
    return chosen


def _trajectory(client: Client, title: str, rollout: Rollout) -> Trajectory:
    calls = list(client.calls(rollout.id, attempt=rollout.attempt))
    return Trajectory(title, client.rollout(rollout.id), calls, list(client.spans(rollout.id, attempt=rollout.attempt)))
