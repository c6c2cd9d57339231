"""Values by re-rolls, to 1e-9 against numbers worked by hand."""

from __future__ import annotations

from typing import Any

import pytest

from leyden.libs.contracts.config import Credit
from leyden.services.credit.group import Credited, credit_group
from leyden.services.credit.records import Rollout
from tests.unit.credit.cases import call, chain

EXACT = 1e-9


def monte_carlo(**baseline: Any) -> Credit:
    return Credit.model_validate({"rule": {"type": "identical"}, "baseline": {"type": "monte_carlo", **baseline}})


def reroll(name: str, of: str, from_call: int, outcome: float, **columns: Any) -> Rollout:
    return Rollout(f"{of}/{name}", outcome, chain(f"{of}{name}", 4), rerolls_of=of, from_call=from_call, **columns)


def credited(rollouts: list[Rollout], credit: Credit) -> Credited:
    result = credit_group(rollouts, credit, min_siblings=2)
    assert isinstance(result, Credited)
    return result


def found(result: Credited, name: str) -> list[tuple[float, float, float]]:
    return [(one.return_, one.baseline, one.advantage) for one in result.credits if one.rollout_id == name]


def approx(expected: list[tuple[float, float, float]]) -> list[Any]:
    return [pytest.approx(one, abs=EXACT) for one in expected]


def test_a_call_gains_the_difference_of_the_states_around_it() -> None:
    """Siblings earn 1, 0 and 0.5, with four calls each; every state inside `a` has two samples."""
    siblings = [Rollout(name, outcome, chain(name, 4)) for name, outcome in (("a", 1.0), ("b", 0.0), ("c", 0.5))]
    outcomes = {1: (1.0, 0.2), 2: (1.0, 0.5), 3: (1.0, 1.0)}
    rerolls = [
        reroll(f"{state}{number}", "a", state, outcome)
        for state, of_state in outcomes.items()
        for number, outcome in enumerate(of_state)
    ]
    result = credited([*siblings, *rerolls], monte_carlo(calls=3, samples=2))
    # The start is worth the mean of b and c, 0.25; then 0.6, 0.75 and 1.0, and the rollout's own 1.
    assert found(result, "a") == approx([(0.6, 0.25, 0.35), (0.75, 0.6, 0.15), (1.0, 0.75, 0.25), (1.0, 1.0, 0.0)])
    assert sum(advantage for _, _, advantage in found(result, "a")) == pytest.approx(1.0 - 0.25, abs=EXACT)
    # b and c have no re-rolls: their advantages are those of leave_one_out.
    assert found(result, "b") == approx([(0.0, 0.75, -0.75)] * 4)
    assert found(result, "c") == approx([(0.5, 0.5, 0.0)] * 4)
    counts = result.counts[None]
    assert (counts.calls, counts.states, counts.unmeasured) == (12, 9, 6)
    assert result.rewards == [1.0, 0.0, 0.5]
    assert set(result.samples) == {"a", "b", "c"}


def test_calls_between_two_states_are_one_action() -> None:
    siblings = [Rollout("a", 1.0, chain("a", 4)), Rollout("b", 0.0, chain("b", 4))]
    rerolls = [reroll("x", "a", 2, 1.0), reroll("y", "a", 2, 0.5), reroll("x", "b", 2, 0.0), reroll("y", "b", 2, 0.5)]
    result = credited([*siblings, *rerolls], monte_carlo(calls=1, samples=2))
    assert [advantage for _, _, advantage in found(result, "a")] == pytest.approx([0.75, 0.75, 0.25, 0.25], abs=EXACT)
    expected = [0.25 - 1.0, 0.25 - 1.0, -0.25, -0.25]
    assert [advantage for _, _, advantage in found(result, "b")] == pytest.approx(expected, abs=EXACT)


@pytest.mark.parametrize(("samples", "left", "expected"), [(4, 2, [0.6, 0.6, 0.4, 0.4]), (4, 1, [1.0] * 4)])
def test_a_state_with_less_than_half_of_its_samples_has_no_value(
    samples: int, left: int, expected: list[float]
) -> None:
    siblings = [Rollout("a", 1.0, chain("a", 4)), Rollout("b", 0.0, chain("b", 4))]
    rerolls = [reroll(str(number), "a", 2, 0.6) for number in range(left)]
    result = credited([*siblings, *rerolls], monte_carlo(calls=1, samples=samples))
    assert [advantage for _, _, advantage in found(result, "a")] == pytest.approx(expected, abs=EXACT)
    assert result.counts[None].unmeasured == (1 if left == 2 else 2)


def test_a_failure_of_a_reroll_is_worth_no_more_than_the_worst_sibling() -> None:
    siblings = [Rollout("a", 1.0, chain("a", 2)), Rollout("b", -0.5, chain("b", 2))]
    rerolls = [reroll("x", "a", 1, 0.0, failed=True), reroll("y", "a", 1, 1.0)]
    result = credited([*siblings, *rerolls], monte_carlo(calls=1, samples=2))
    assert found(result, "a")[0] == pytest.approx((0.25, -0.5, 0.75), abs=EXACT)


def test_equal_values_leave_no_advantage_of_rounding() -> None:
    siblings = [Rollout(name, 0.1 + 0.2, chain(name, 3)) for name in "ab"]
    rerolls = [reroll(str(number), "a", 1, 0.3) for number in range(3)]
    result = credited([*siblings, *rerolls], monte_carlo(calls=1, samples=3))
    assert {one.advantage for one in result.credits} == {0.0}
    assert not result.has_variance()


def test_choices_and_unanswered_requests_keep_their_place() -> None:
    """The second request has two choices; the third was refused; the state before the last one has a value."""
    calls = [
        call("first", [1], [2], at=0),
        call("left", [1, 2], [3], at=1, request_id="twice"),
        call("right", [1, 2], [4], at=1, request_id="twice", choice=1),
        call("refused", [1, 2, 3, 5], [], at=2, completed=False),
        call("last", [1, 2, 3, 6], [7], at=3),
    ]
    siblings = [Rollout("a", 1.0, calls), Rollout("b", 0.0, [])]
    rerolls = [reroll("x", "a", 1, 0.25), reroll("y", "a", 2, 0.5)]
    result = credited([*siblings, *rerolls], monte_carlo(calls=2, samples=1))
    by_id = {one.call_id: one.advantage for one in result.credits}
    trained = [by_id[one.id] for one in calls if one.completed]
    assert trained == pytest.approx([0.25, 0.25, 0.25, 0.5], abs=EXACT)
