import numpy as np
import pytest

from leyden.libs.contracts.config import (
    CreditRule,
    DiscountedCredit,
    EqualSplitCredit,
    IdenticalCredit,
    OwnCredit,
    TemporalCredit,
    TemporalDiscountCredit,
    TokenDiscountedCredit,
)
from leyden.services.credit.forest import call_forest
from leyden.services.credit.rules import call_returns, token_shares
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


def test_temporal_discount_has_the_published_values() -> None:
    forest, last = call_forest(chain("a", 4)), np.zeros(4)
    returns = call_returns(TemporalDiscountCredit(gamma=0.9), forest, last, 1.0)
    assert returns.tolist() == pytest.approx([0.164025, 0.18225, 0.2025, 0.225], abs=1e-9)
    returns = call_returns(TemporalDiscountCredit(gamma=0.9, minus="future_average"), forest, last, 1.0)
    baselines = [1 / 4, 1 / 3, 1 / 2, 1]
    expected = [0.164025 - baselines[0], 0.18225 - baselines[1], 0.2025 - baselines[2], 0.225 - baselines[3]]
    assert returns.tolist() == pytest.approx(expected, abs=1e-9)
    assert returns.tolist() == pytest.approx([-0.085975, -0.151083, -0.2975, -0.775], abs=1e-6)
    assert call_returns(TemporalDiscountCredit(), call_forest([]), np.zeros(0), 1.0).tolist() == []


def test_temporal_follows_the_order_of_arrival_over_branches() -> None:
    # Three roots, as of an agent that rewrites its prompt each time; outcome 1, γ = 0.5, the second earned 0.2.
    calls = [call(name, [prompt], [2], at=at) for at, (name, prompt) in enumerate([("a", 1), ("b", 8), ("c", 9)])]
    returns = call_returns(TemporalCredit(gamma=0.5), call_forest(calls), np.array([0, 0.2, 0]), 1.0)
    assert returns.tolist() == pytest.approx([0.35, 0.7, 1.0])
    # On a chain it equals the tree's.
    forest = call_forest(chain("a", 3))
    for gamma in (0.0, 0.9, 1.0):
        tree = call_returns(DiscountedCredit(gamma=gamma), forest, EARNED, 1.0)
        assert call_returns(TemporalCredit(gamma=gamma), forest, EARNED, 1.0).tolist() == pytest.approx(tree.tolist())


def test_token_discounted_counts_trained_tokens_alone() -> None:
    # Calls of 2, 1 (untrainable) and 3 tokens, outcome 1, γ = 0.5: the last call's tokens have 1/4, 1/2, 1; the call
    # before passes 1/8 on, and the first has 1/16, 1/8.
    calls = [
        call("a", [1], [2, 3], at=0),
        call("b", [1, 2, 3], [4], at=1, trainable=False),
        call("c", [1, 2, 3, 4], [5, 6, 7], at=2),
    ]
    forest = call_forest(calls)
    returns = call_returns(TokenDiscountedCredit(gamma=0.5), forest, np.zeros(3), 1.0)
    assert returns.tolist() == [0.125, 0.125, 1.0]
    tokens = [(g * token_shares(node, 0.5)).tolist() for g, node in zip(returns, forest.nodes, strict=True)]
    assert tokens == [[0.0625, 0.125], [], [0.25, 0.5, 1.0]]


RULES = [
    *(IdenticalCredit(), EqualSplitCredit(), DiscountedCredit(), TemporalCredit(), TokenDiscountedCredit()),
    *(TemporalDiscountCredit(), TemporalDiscountCredit(minus="future_average"), OwnCredit()),
]


@pytest.mark.parametrize("rule", RULES)
def test_a_rollout_without_calls_has_no_returns(rule: CreditRule) -> None:
    assert call_returns(rule, call_forest([]), np.zeros(0), 1.0).tolist() == []
