"""Measures versions of a prompt: each is a run without steps, and each set of tasks an evaluation of that run."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leyden.libs.client import Client, LeydenError, NotFound
from leyden.libs.contracts.api.rollouts import Rollout
from leyden.libs.contracts.api.runs import Evaluation, EvaluationRequest
from leyden.libs.contracts.states import RunPhase
from leyden.libs.prompts.errors import PromptError
from leyden.libs.prompts.journal import Journal, Json, digest_of

POLL_SECONDS = 1.0
POLLS_BEFORE_WORDS = 15
"""A wait is worth a line after so many polls with one reason."""
AGAIN = "mend the cause, and run the command again: it goes on"
NEGATIVE = (
    "where rewards may be negative, a crash earns another number under each prompt: write in `sampling.failure_reward`"
    " of the document what each earns, at most the smallest reward, and use another folder"
)


@dataclass(frozen=True)
class Example:
    """A task of a dataset, with its number there."""

    dataset_id: str
    number: int
    task: Json


@dataclass(frozen=True)
class Measured:
    """One task under one version of the prompt.

    `rewards`: the least first. `rollout`: the id of the one with the least reward, the first of several.
    """

    rewards: tuple[float, ...]
    rollout: str

    @property
    def score(self) -> float:
        """The mean reward."""
        return sum(self.rewards) / len(self.rewards)


class Measuring:
    """The versions of one optimisation. Rollouts whose reward is unknown are an error, and never 0.

    Args: document: the run's, with datasets by id; held_out: the first tasks of `evaluation.dataset`, in its order
    """

    def __init__(
        self,
        leyden: Client,
        document: Json,
        held_out: Sequence[Example],
        journal: Journal,
        tell: Callable[[str], None],
        *,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        self.leyden = leyden
        self._document, self._held_out = document, list(held_out)
        self._journal, self._tell, self._poll_seconds = journal, tell, poll_seconds

    @property
    def rollouts_per_task(self) -> int:
        """Rollouts of each task in a measurement."""
        return int(self._document["evaluation"].get("rollouts_per_task") or 1)

    def version_of(self, texts: Mapping[str, str]) -> int:
        """Returns the number of a version, from 0 in the order of their first measurements."""
        key = digest_of(dict(texts))
        if (known := self._journal.get("version", key)) is None:
            known = {"number": len(self._journal.all("version")), "texts": dict(texts)}
            self._journal.add("version", key, known)
        return int(known["number"])

    def run_of(self, version: int) -> str | None:
        """Returns the id of the newest run of a version; None before its first measurement."""
        known = self._journal.get("run", str(version))
        return None if known is None else str(known["id"])

    def measure(self, texts: Mapping[str, str], examples: Sequence[Example]) -> list[Measured]:
        """Returns one measurement for each example, in their order; equal ones are made once.

        The journal has them from the first time on, since the platform's may change: a grade is given again.

        Ctrl-C cancels the run that is measured. Raises: PromptError; LeydenError
        """
        version = self.version_of(texts)
        place = f"{version}.{self._tasks_of(examples)}"
        if (measured := self._journal.get("measured", place)) is not None:
            return [Measured(tuple(rewards), rollout) for rewards, rollout in measured]
        known = self._journal.get("evaluation", place)
        if known is None or self._journal.get("dropped", known["id"]) is not None:
            request = self._request(examples)
            known = self._begin(version, texts, request, place, 1 if known is None else known["try"] + 1)
        try:
            self._wait(version, known)
            found = self._read(version, known, len(examples))
            self._journal.add("measured", place, [[one.rewards, one.rollout] for one in found])
            return found
        except NotFound:
            self._drop(known, "it was deleted", run=True)
            raise PromptError(f"run {known['run']} of version {version} is gone: run the command again") from None
        except KeyboardInterrupt:
            self._cancel(known)
            raise

    def _tasks_of(self, examples: Sequence[Example]) -> str:
        return "held-out" if list(examples) == self._held_out else digest_of([one.task for one in examples])[:8]

    def _request(self, examples: Sequence[Example]) -> EvaluationRequest:
        repeats = self.rollouts_per_task
        if list(examples) == self._held_out:
            dataset = self._document["evaluation"]["dataset"]
            return EvaluationRequest(dataset=dataset, rollouts_per_task=repeats, max_tasks=len(examples))
        # Equal examples are one dataset, those of another optimisation of this document, too.
        name = f"{self._document['name'][:150]} prompt examples {self._tasks_of(examples)}"
        made = self.leyden.upload_dataset(name, [one.task for one in examples])
        self._journal.add("dataset", made.id, name)
        return EvaluationRequest(dataset=made.id, rollouts_per_task=repeats, max_tasks=len(examples))

    def _begin(
        self, version: int, texts: Mapping[str, str], request: EvaluationRequest, place: str, number: int
    ) -> Json:
        run_id = self._live_run(version, texts)
        key = f"{self._journal.id}.{place}.{run_id}.{number}"
        made = self.leyden.evaluate_run(run_id, request, key=key)
        known = {"id": made.id, "run": run_id, "number": made.number, "try": number}
        self._journal.add("evaluation", place, known)
        return known

    def _live_run(self, version: int, texts: Mapping[str, str]) -> str:
        known, number = self._journal.get("run", str(version)), 1
        if known is not None:
            if self._journal.get("dropped", known["id"]) is None and not self._has_ended(known["id"]):
                return str(known["id"])
            number = known["try"] + 1
        document = document_of(self._document, texts, version)
        run = self.leyden.create_run(document, key=f"{self._journal.id}.{version}.{number}")
        self._journal.add("run", str(version), {"id": run.id, "try": number})
        return run.id

    def _has_ended(self, run_id: str) -> bool:
        """Whether it can be evaluated no more: one whose agents all crash fails."""
        return self.leyden.run(run_id).phase in {RunPhase.FAILED, RunPhase.CANCELLED}

    def _wait(self, version: int, known: Json) -> None:
        words, polls = "", 0
        while not self._evaluation(known).results.complete:
            run = self.leyden.run(known["run"])
            if run.phase in {RunPhase.FAILED, RunPhase.CANCELLED}:
                reason = f"run {run.id} of version {version} is {run.phase}{f': {run.reason}' if run.reason else ''}"
                self._drop(known, reason, run=True)
                raise PromptError(f"{reason}; {AGAIN}")
            now = f"version {version} waits: run {run.id} is {run.phase}{f', {run.reason}' if run.reason else ''}"
            words, polls = now, polls + 1 if now == words else 1
            if polls == POLLS_BEFORE_WORDS and (run.reason or run.phase == RunPhase.PAUSED):
                self._tell(now)
            time.sleep(self._poll_seconds)

    def _evaluation(self, known: Json) -> Evaluation:
        return self.leyden.evaluation(known["run"], known["number"])

    def _read(self, version: int, known: Json, tasks: int) -> list[Measured]:
        siblings = defaultdict[int, list[tuple[float, Rollout]]](list)
        unknown = []
        for rollout in self.leyden.rollouts(run=known["run"], evaluation=known["id"]):
            if rollout.reward is None:
                unknown.append(rollout)
            elif rollout.reward < 0 and not self._has_failure_reward:
                raise PromptError(f"rollout {rollout.id} of version {version} earned {rollout.reward:g}; {NEGATIVE}")
            else:
                siblings[rollout.task_number].append((rollout.reward, rollout))
        if unknown or siblings.keys() != set(range(tasks)):
            reason = self._unknown(version, unknown)
            self._drop(known, reason)
            raise PromptError(f"{reason}; {AGAIN}")
        return [_measured(siblings[number]) for number in range(tasks)]

    @property
    def _has_failure_reward(self) -> bool:
        return self._document.get("sampling", {}).get("failure_reward") is not None

    @staticmethod
    def _unknown(version: int, unknown: Sequence[Rollout]) -> str:
        if not unknown:
            return f"an evaluation of version {version} lacks rollouts"
        first = unknown[0]
        return (
            f"{len(unknown)} rollouts of version {version} have no reward, such as {first.id}"
            f" ({first.reason or first.state}), which `leyden rollout show {first.id}` explains"
        )

    def _drop(self, known: Json, reason: str, *, run: bool = False) -> None:
        """Measures it no longer: the next start makes another evaluation. Args: run: and another run"""
        self._journal.add("dropped", known["id"], reason)
        if run:
            self._journal.add("dropped", known["run"], reason)

    def _cancel(self, known: Json) -> None:
        try:
            if self._evaluation(known).results.complete:
                return
            self.leyden.cancel_run(known["run"])
        except LeydenError as error:
            self._tell(f"run {known['run']} goes on: {error}")
            return
        self._drop(known, "interrupted", run=True)
        self._tell(f"run {known['run']} is cancelled")


def _measured(siblings: list[tuple[float, Rollout]]) -> Measured:
    siblings.sort(key=lambda one: (one[0], one[1].sibling))
    return Measured(tuple(reward for reward, _ in siblings), siblings[0][1].id)


def document_of(document: Json, texts: Mapping[str, str], version: int) -> Json:
    """Returns the document of a version's run, which samples nothing by itself."""
    agent: Json = document["agent"]
    changes: dict[str, Any] = {
        "name": f"{document['name'][:180]} prompt {version}",
        "agent": {**agent, "environment": {**agent["environment"], **texts}},
        "training": {**document.get("training", {}), "steps": 0, "early_stopping": None},
        "evaluation": {**document["evaluation"], "at_start": False, "at_end": False, "every": None},
    }
    return {**document, **changes}
