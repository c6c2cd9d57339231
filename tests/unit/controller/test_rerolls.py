"""The re-rolls that a group gets: numbers, sources and calls follow from its ended siblings alone."""

from __future__ import annotations

from leyden.libs.contracts.config import Baseline
from leyden.libs.store.runs.rerolls import EndedSibling, NewReroll
from leyden.services.controller.runs.rerolls import planned_rerolls


def test_every_chosen_call_of_every_sibling_gets_its_samples() -> None:
    siblings = [
        EndedSibling("run", "run.0", 3, "run.0.0", 3),
        EndedSibling("run", "run.0", 3, "run.0.1", 1),
        EndedSibling("run", "run.0", 3, "run.0.2", 8),
    ]
    planned = list(planned_rerolls(siblings, Baseline(type="monte_carlo", calls=2, samples=2)))
    chosen = [("run.0.0", 1), ("run.0.0", 2), ("run.0.2", 2), ("run.0.2", 5)]
    assert planned == [
        NewReroll("run.0", 3 + 2 * place + sample, source, call)
        for place, (source, call) in enumerate(chosen)
        for sample in range(2)
    ]


def test_chosen_calls_are_different_and_inside_the_rollout() -> None:
    for calls in range(1, 200):
        for most in (1, 4, 64):
            chosen = Baseline(type="monte_carlo", calls=most).rerolled_calls(calls)
            assert len(set(chosen)) == len(chosen) == min(most, calls - 1)
            assert all(0 < call < calls for call in chosen) and chosen == sorted(chosen)
