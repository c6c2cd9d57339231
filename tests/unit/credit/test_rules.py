import numpy as np
import pytest

from leyden.libs.contracts.config import DiscountedCredit, EqualSplitCredit, IdenticalCredit
from leyden.services.credit.forest import call_forest
from leyden.services.credit.rules import call_returns
from tests.unit.credit.cases import call, chain

EARNED = np.array([0.3, 0.2, 0.0])


def test_identical_gives_every_call_the_total_return() -> None:
    returns = call_returns(IdenticalCredit(), call_forest(chain("a", 3)), EARNED, 1.0)
    assert returns.tolist() == pytest.approx([1.5, 1.5, 1.5])


def test_equal_split_gives_every_call_its_part() -> None:
    returns = call_returns(EqualSplitCredit(), call_forest(chain("a", 3)), EARNED, 1.0)
    assert returns.tolist() == pytest.approx([0.5, 0.5, 0.5])


def test_discounted_on_a_chain() -> None:
    # G3 = 0 + 1; G2 = 0.2 + 0.9 · 1 = 1.1; G1 = 0.3 + 0.9 · 1.1 = 1.29.
    returns = call_returns(DiscountedCredit(gamma=0.9), call_forest(chain("a", 3)), EARNED, 1.0)
    assert returns.tolist() == pytest.approx([1.29, 1.1, 1.0])


def test_discounted_uses_the_mean_over_branches() -> None:
    # Root r forks into a (which b continues) and c, a sub-agent's answer; outcome 1, γ = 0.5.
    # G_b = 0.4 + 1 = 1.4; G_a = 0.2 + 0.5 · 1.4 = 0.9; G_c = 0.1 + 1 = 1.1; G_r = 0 + 0.5 · (0.9 + 1.1) / 2 = 0.5.
    calls = [
        call("r", [1], [2], at=0),
        call("a", [1, 2, 3], [4], at=1),
        call("c", [1, 2, 5], [6], at=2),
        call("b", [1, 2, 3, 4, 7], [8], at=3),
    ]
    returns = call_returns(DiscountedCredit(gamma=0.5), call_forest(calls), np.array([0, 0.2, 0.1, 0.4]), 1.0)
    assert returns.tolist() == pytest.approx([0.5, 0.9, 1.1, 1.4])


def test_every_tree_of_the_forest_ends_with_the_outcome() -> None:
    calls = [call("a", [1], [2], at=0), call("b", [9], [2], at=1)]
    returns = call_returns(DiscountedCredit(gamma=0.5), call_forest(calls), np.zeros(2), 1.0)
    assert returns.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("rule", [IdenticalCredit(), EqualSplitCredit(), DiscountedCredit()])
def test_a_rollout_without_calls_has_no_returns(rule: IdenticalCredit | EqualSplitCredit | DiscountedCredit) -> None:
    assert call_returns(rule, call_forest([]), np.zeros(0), 1.0).tolist() == []
