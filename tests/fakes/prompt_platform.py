"""A platform in memory for prompts: its agent earns a tenth for each letter that the prompt shares with the task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from leyden.libs.client import Conflict, NotFound
from leyden.libs.contracts.api.datasets import Dataset
from leyden.libs.contracts.api.rollouts import Attempt, Outcome, Rollout, RolloutDetail
from leyden.libs.contracts.api.runs import Evaluation, EvaluationRequest, EvaluationResults, Run
from leyden.libs.prompts.journal import digest_of

NOW = datetime(2026, 1, 1, tzinfo=UTC)
Json = dict[str, Any]


def reward_of(prompt: str, task: Mapping[str, Any]) -> float:
    """The share of the task's letters that the prompt has."""
    letters = set(task["letters"])
    return len(letters & set(prompt)) / len(letters)


@dataclass
class FakePlatform:
    """The methods of `Client` that an optimisation calls. All rollouts end at once.

    `unrewarded`: so many evaluations more have a rollout without a reward.
    """

    datasets: dict[str, list[Json]] = field(default_factory=dict)
    runs: dict[str, Json] = field(default_factory=dict)
    evaluations: dict[str, tuple[str, EvaluationRequest]] = field(default_factory=dict)
    by_key: dict[str, Any] = field(default_factory=dict)
    phases: dict[str, str] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    unrewarded: int = 0
    lost: set[str] = field(default_factory=set)
    regraded: dict[str, float] = field(default_factory=dict)
    """The reward of all rollouts of an evaluation from now on."""
    busy: set[str] = field(default_factory=set)
    """Runs that cannot be deleted."""
    unfinished: set[str] = field(default_factory=set)
    offset: float = 0.0
    """The part of each reward that no prompt changes."""
    crashing: str | None = None
    """A prompt with it makes every agent crash, so that its run fails; a failure earns 0 in a run without a success."""
    interrupt_at: int | None = None
    """The number of the evaluation that does not end; the first look at it meets Ctrl-C."""

    def upload_dataset(self, name: str, rows: Sequence[Json]) -> Dataset:
        tasks = list(rows)
        made = f"{name}.{digest_of(tasks)[:4]}"
        self.datasets[made] = tasks
        return Dataset(id=made, name=name, content_sha256="", task_count=len(tasks), created_at=NOW)

    def create_run(self, document: Json, *, key: str) -> Any:
        if key not in self.by_key:
            self.by_key[key] = f"run-{len(self.runs)}"
            self.runs[self.by_key[key]] = document
        return Run.model_construct(id=self.by_key[key])

    def run(self, run_id: str) -> Any:
        if run_id not in self.runs:
            raise NotFound("it is gone")
        phase = "failed" if self._has_crashed(run_id) else self.phases.get(run_id, "evaluating")
        return Run.model_construct(id=run_id, phase=phase, reason="out of luck")

    def _crashes(self, run_id: str) -> bool:
        return self.crashing is not None and self.crashing in self.runs[run_id]["agent"]["environment"]["PROMPT"]

    def _has_crashed(self, run_id: str) -> bool:
        return self._crashes(run_id) and any(run == run_id for run, _ in self.evaluations.values())

    def delete_run(self, run_id: str) -> None:
        if run_id in self.busy:
            raise Conflict(f"{run_id} is evaluating")
        if self.runs.pop(run_id, None) is None:
            raise NotFound("it is gone")
        self.evaluations = {name: one for name, one in self.evaluations.items() if one[0] != run_id}

    def delete_dataset(self, dataset: str) -> None:
        if any(request.dataset == dataset for _, request in self.evaluations.values()):
            raise Conflict("it has runs")
        self.datasets.pop(dataset, None)

    def cancel_run(self, run_id: str) -> Any:
        self.cancelled.append(run_id)
        self.phases[run_id] = "cancelled"

    def evaluate_run(self, run_id: str, request: EvaluationRequest, *, key: str) -> Evaluation:
        if key not in self.by_key:
            if self._has_crashed(run_id):
                raise Conflict(f"run {run_id} is failed")
            number = len(self.evaluations)
            self.by_key[key] = f"{run_id}.e{number}"
            if number == self.interrupt_at or run_id in self.phases:
                self.unfinished.add(self.by_key[key])
            self.evaluations[self.by_key[key]] = run_id, request
            if self.unrewarded:
                self.unrewarded -= 1
                self.lost.add(self.by_key[key])
        return self._evaluation(self.by_key[key])

    def evaluation(self, run_id: str, number: int) -> Evaluation:
        if f"{run_id}.e{number}" not in self.evaluations:
            raise NotFound("it is gone")
        if number == self.interrupt_at:
            self.interrupt_at = None
            raise KeyboardInterrupt
        return self._evaluation(f"{run_id}.e{number}")

    def _evaluation(self, name: str) -> Evaluation:
        run_id, request = self.evaluations[name]
        number = int(name.rpartition(".e")[2])
        return Evaluation(
            id=name,
            run_id=run_id,
            number=number,
            dataset_id=str(request.dataset),
            policy_version=None,
            measured_version=0,
            rollouts_per_task=request.rollouts_per_task or 1,
            max_tasks=request.max_tasks,
            tasks=len(self.datasets[str(request.dataset)][: request.max_tasks]),
            created_at=NOW,
            results=EvaluationResults(rollouts={}, complete=name not in self.unfinished, reward=None, facts=[]),
        )

    def rollouts(self, *, run: str, evaluation: str) -> Iterator[Rollout]:
        run_id, request = self.evaluations[evaluation]
        assert run_id == run
        prompt = self.runs[run]["agent"]["environment"]["PROMPT"]
        tasks = self.datasets[str(request.dataset)][: request.max_tasks]
        for number, task in reversed(list(enumerate(tasks))):
            for sibling in range(request.rollouts_per_task or 1):
                reward = None if evaluation in self.lost and number == 0 else reward_of(prompt, task) + self.offset
                reward = self.regraded.get(evaluation, reward)
                made = self._rollout(f"{evaluation}.{number}.{sibling}", run, str(request.dataset), number, reward)
                crash = {"reward": 0.0, "reason": "agent_error"}
                yield made.model_copy(update=crash) if self._crashes(run) else made

    @staticmethod
    def _rollout(name: str, run: str, dataset: str, number: int, reward: float | None) -> Rollout:
        return Rollout(
            id=name,
            run_id=run,
            group_id=name.rpartition(".")[0],
            evaluation_id=None,
            sibling=int(name.rpartition(".")[2]),
            dataset_id=dataset,
            task_number=number,
            admitted_version=0,
            step=None,
            state="finished" if reward is not None else "excluded",
            attempt=1,
            reward=reward,
            reason="succeeded" if reward is not None else "infra_error",
            created_at=NOW,
            finished_at=NOW,
        )

    def rollout(self, rollout_id: str) -> RolloutDetail:
        evaluation, number, _ = rollout_id.rsplit(".", 2)
        run_id, request = self.evaluations[evaluation]
        [found] = [one for one in self.rollouts(run=run_id, evaluation=evaluation) if one.id == rollout_id]
        outcome = Outcome(
            kind="succeeded",
            reward=found.reward,
            facts={},
            exit_code=0,
            detail=None,
            stdout_tail="done",
            stderr_tail="",
            created_at=NOW,
        )
        times = dict.fromkeys(("lease_expires_at", "created_at", "started_at", "finished_at"), NOW)
        attempt = Attempt(number=1, state="settled", owner="", outcome=outcome, **times)
        task = self.datasets[str(request.dataset)][int(number)]
        return RolloutDetail(**found.model_dump(), task=task, attempts=[attempt], rewards=[])

    def calls(self, rollout_id: str, *, attempt: int, whole: bool) -> Iterator[Any]:
        return iter(())
