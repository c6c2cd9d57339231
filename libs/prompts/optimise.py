"""GEPA over the versions of a prompt (arXiv 2507.19457), by the package `gepa`, an extra.

GEPA decides by rewards, rewritten prompts and its seed alone. Both are kept, by the platform and the journal, so that a
killed optimisation begins again from the seed's prompt and comes to where it was without a new rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import gepa

from leyden.libs.contracts.rewards import ROUNDING, reaches
from leyden.libs.prompts.errors import PromptError
from leyden.libs.prompts.feedback import described
from leyden.libs.prompts.journal import Journal, Json
from leyden.libs.prompts.measuring import Example, Measured, Measuring
from leyden.libs.prompts.results import Version, write_results

T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """The size of an optimisation.

    `seed_texts`: the present prompts by name. `budget`: the most rollouts. `examples`: training tasks of a reflection.
    `solved`: the reward from which a task teaches nothing more.
    """

    seed_texts: Mapping[str, str]
    training: Sequence[Example]
    held_out: Sequence[Example]
    rollouts_per_task: int
    budget: int
    examples: int = 3
    seed: int = 0
    solved: float = 1.0

    @property
    def step_rollouts(self) -> int:
        """The most rollouts of a rewritten prompt: its parent's and its own on the examples, and the held-out ones."""
        return self.rollouts_per_task * (2 * self.examples + len(self.held_out))

    @property
    def least_budget(self) -> int:
        """Rollouts of the present prompt on the held-out tasks, and of one rewritten prompt."""
        return self.rollouts_per_task * len(self.held_out) + self.step_rollouts


def optimise(
    plan: Plan,
    measuring: Measuring,
    reflection: Callable[[str], str],
    folder: Path,
    journal: Journal,
    tell: Callable[[str], None],
) -> list[Version]:
    """Returns all versions, the present prompt first; the results in the folder are up to date after each.

    Raises: PromptError: the budget is too small, or see `Measuring` and `Reflection`
    """
    if plan.budget < plan.least_budget:
        raise PromptError(
            f"--budget {plan.budget} is below {plan.least_budget}: {len(plan.held_out)} held-out tasks for the present"
            f" prompt and a rewritten one, and {plan.examples} examples for both, {plan.rollouts_per_task} rollouts a"
            " task; raise it, or lower evaluation.max_tasks"
        )
    work = _Work(plan, measuring, reflection, folder, journal, tell)
    gepa.optimize(
        seed_candidate=dict(plan.seed_texts),
        trainset=list(plan.training),
        valset=list(plan.held_out),
        adapter=work,
        reflection_lm=work.reflect,
        reflection_minibatch_size=plan.examples,
        perfect_score=plan.solved - ROUNDING,
        stop_callbacks=work.stops,
        callbacks=[work],
        logger=_Silent(),
        track_best_outputs=False,
        seed=plan.seed,
    )
    return work.versions


class _Silent:
    """GEPA's logger; `_Work` tells the same in fewer words."""

    def log(self, message: str) -> None:
        """Drops it."""


class _Work:
    """GEPA's adapter, its condition to stop and its listener."""

    propose_new_texts = None

    def __init__(
        self,
        plan: Plan,
        measuring: Measuring,
        reflection: Callable[[str], str],
        folder: Path,
        journal: Journal,
        tell: Callable[[str], None],
    ) -> None:
        self._plan, self._measuring, self._reflection = plan, measuring, reflection
        self._folder, self._journal, self._tell = folder, journal, tell
        self._failure: Exception | None = None
        self._parents: dict[int, tuple[int, ...]] = {}
        self._parent = 0
        self.versions: list[Version] = []

    def evaluate(self, batch: list[Example], candidate: dict[str, str], capture_traces: bool = False) -> Any:
        """Measures a candidate on tasks."""
        measured = self._measuring.measure(candidate, batch)
        version = self._measuring.version_of(candidate)
        # The parent of a new version was measured right before it.
        self._parents.setdefault(version, (self._parent,) if version else ())
        self._parent = version
        return gepa.EvaluationBatch(
            outputs=[one.rollout for one in measured],
            scores=[one.score for one in measured],
            trajectories=measured if capture_traces else None,
        )

    def make_reflective_dataset(
        self, candidate: dict[str, str], eval_batch: Any, components_to_update: list[str]
    ) -> dict[str, list[Json]]:
        """Describes the rollouts of a candidate to the reflection model."""
        measured: list[Measured] = eval_batch.trajectories
        found = self._noted(lambda: [described(self._measuring.leyden, self._journal, one) for one in measured])
        return dict.fromkeys(components_to_update, found)

    def reflect(self, question: str) -> str:
        """Asks the reflection model."""
        return self._noted(lambda: self._reflection(question))

    def _noted(self, ask: Callable[[], T]) -> T:
        """GEPA goes on after an error in these: `stops` raises it."""
        if self._failure is not None:
            raise self._failure
        try:
            return ask()
        except Exception as error:
            self._failure = error
            raise

    def stops(self, state: Any) -> bool:
        """Writes the results so far; tells whether the rest of the budget is too small for one more version.

        Raises: PromptError, LeydenError: that of a reflection
        """
        self._write(state)
        if self._failure is not None:
            raise self._failure
        used = self._plan.rollouts_per_task * state.total_num_evals
        solved = any(
            reaches(min(scores.values()), self._plan.solved) for scores in state.prog_candidate_val_subscores if scores
        )
        return solved or self._plan.budget - used < self._plan.step_rollouts

    def _write(self, state: Any) -> None:
        scored: dict[int, tuple[float, ...]] = {}
        for texts, scores in zip(state.program_candidates, state.prog_candidate_val_subscores, strict=True):
            scored[self._measuring.version_of(texts)] = tuple(scores[number] for number in sorted(scores))
        known = sorted(self._journal.all("version").values(), key=lambda one: int(one["number"]))
        # Versions that are measured next lie in the journal of a killed optimisation.
        reached = [one for one in known if one["number"] in self._parents]
        self.versions = [
            Version(
                number=one["number"],
                parents=self._parents[one["number"]],
                texts=one["texts"],
                scores=scored.get(one["number"]),
                run=self._measuring.run_of(one["number"]),
            )
            for one in reached
        ]
        write_results(self._folder, self.versions, list(self._plan.seed_texts))

    def on_valset_evaluated(self, event: Any) -> None:
        """Tells the score of a version."""
        version, best = self._measuring.version_of(event["candidate"]), event["is_best_program"]
        words = "the present prompt" if version == 0 else f"from version {self._parents[version][0]}"
        score, count = event["average_score"], event["num_examples_evaluated"]
        best_yet = ", the best so far" if best and version else ""
        self._tell(f"version {version} ({words}): {score:.3f} on {count} held-out tasks{best_yet}")

    def on_candidate_rejected(self, event: Any) -> None:
        """Tells that a version earned no more than its parent."""
        before, after = (event[name] / self._plan.examples for name in ("old_score", "new_score"))
        self._tell(f"version {self._parent}: {after:.3f} on {self._plan.examples} examples, its parent {before:.3f}")

    def on_evaluation_skipped(self, event: Any) -> None:
        """Tells that a version has nothing to learn from its examples."""
        self._tell(f"version {self._parent} solves its {len(event['scores'])} examples: others follow")

    def on_iteration_end(self, event: Any) -> None:
        """Tells how much of the budget is used."""
        used = self._plan.rollouts_per_task * event["state"].total_num_evals
        self._tell(f"{used} of {self._plan.budget} rollouts")
