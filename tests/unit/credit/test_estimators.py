"""Each estimator as a run would name it: refusals, whitening against verl, and a two-armed bandit.

The bandit's policy is a softmax over two logits; a rollout is one call that samples an arm, and earns 1 for arm 1.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from leyden.libs.contracts.config import Baseline, Credit, RunConfig
from leyden.services.credit.group import Credited, credit_group
from leyden.services.credit.records import Rollout
from leyden.services.trainer.rows.batch import whitened
from tests.support.builders import run_document
from tests.unit.credit.cases import call, chain

ORACLE: dict[str, Any] = json.loads((Path(__file__).parents[1] / "trainer/oracles/rl-oracle-vectors.json").read_text())
MASK = np.array(ORACLE["inputs"]["mask"], dtype=bool)
MONTE_CARLO = {"rule": {"type": "identical"}, "baseline": {"type": "monte_carlo"}}
FEEDBACK = {"components": [{"name": "stars", "from": "feedback"}], "wait": {"seconds": 60}}
REINFORCE_PP = {"rule": {"type": "token_discounted", "gamma": 0.9}, "baseline": {"type": "none", "whiten": True}}
ESTIMATORS: dict[str, dict[str, Any]] = {
    "dr_grpo": {"baseline": {"type": "mean"}},
    "grpo": {"baseline": {"type": "mean_std"}},
    "rloo": {"baseline": {"type": "leave_one_out"}},
    "opo": {"baseline": {"type": "opo"}},
    "gigpo": {"baseline": {"type": "mean", "per": "gigpo"}},
    "depth": {"rule": {"type": "temporal"}, "baseline": {"type": "mean", "per": "depth"}},
    "ema": {"baseline": {"type": "ema"}},
    "remax": {"rule": {"type": "identical"}, "baseline": {"type": "remax"}},
    "monte_carlo": {"rule": {"type": "identical"}, "baseline": {"type": "monte_carlo", "samples": 2}},
    "reinforce_pp": REINFORCE_PP,
    "reinforce_pp_baseline": {"baseline": {"type": "mean", "whiten": True}},
}


def credited(rollouts: list[Rollout], credit: Credit, averages: dict[str, float] | None = None) -> Credited:
    result = credit_group(rollouts, credit, min_siblings=1, averages=averages)
    assert isinstance(result, Credited)
    return result


def case(row: int) -> Rollout:
    """A row of the case as a rollout: one call for each run of sampled tokens, with an observation between them."""
    calls, prompt, sampled = [], [1], []
    for place, trained in enumerate([*MASK[row], False]):
        if trained:
            sampled.append(10 + place)
        elif sampled:
            calls.append(call(f"{row}.{place}", prompt, sampled, at=place))
            prompt, sampled = [*prompt, *sampled, 3], []
    return Rollout(f"row{row}", ORACLE["inputs"]["reward"][row], calls)


@pytest.mark.parametrize(
    ("name", "credit"),
    [
        ("reinforce_pp(gamma0.9)", REINFORCE_PP),
        ("reinforce_pp_baseline", {"rule": {"type": "identical"}, **ESTIMATORS["reinforce_pp_baseline"]}),
    ],
)
def test_whitened_advantages_equal_verl(name: str, credit: dict[str, Any]) -> None:
    config = Credit.model_validate(credit)
    found: list[np.ndarray] = []
    for rows in ([0, 1, 2, 3], [4, 5]):
        result = credited([case(row) for row in rows], config)
        found += [path.advantages[path.mask == 1] for row in rows for path in result.samples[f"row{row}"]]
    expected = np.array(ORACLE["advantages"][name]["adv"])[MASK]
    # Samples hold float32.
    assert whitened(np.concatenate(found)).tolist() == pytest.approx(expected.tolist(), abs=1e-6)


def test_whitening_equals_verl_in_float64() -> None:
    shifted = np.array(ORACLE["advantages"]["dr_grpo(mean only)"]["adv"])[MASK]
    expected = np.array(ORACLE["advantages"]["reinforce_pp_baseline"]["adv"])[MASK]
    assert whitened(shifted).tolist() == pytest.approx(expected.tolist(), abs=1e-9)
    assert whitened(3 * shifted + 7).tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    assert whitened(np.ones(4)).tolist() == [0.0] * 4
    assert whitened(np.ones(1)).tolist() == [0.0]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_two_armed_bandit_is_learned(name: str) -> None:
    config = Credit.model_validate(ESTIMATORS[name])
    random = np.random.default_rng(0)
    logit, averages, groups, size = 0.0, dict[str, float](), (16, 1) if name == "ema" else (4, 4), 0
    for step in range(60):
        chosen = 1 / (1 + np.exp(-logit))
        arms, advantages = [], []
        for group in range(groups[0]):
            arms_R = (random.random(groups[1]) < chosen).astype(int)
            rollouts = [
                Rollout(f"{step}.{group}.{i}", float(arm), [call(f"{step}.{group}.{i}", [1], [int(arm)], at=0)])
                for i, arm in enumerate(arms_R)
            ]
            if name == "remax":
                rollouts.append(Rollout(f"{step}.{group}.greedy", float(chosen > 0.5), greedy=True))
            result = credited(rollouts, config, averages)
            averages = result.averages or {}
            advantages += [path.advantages[path.mask == 1] for paths in result.samples.values() for path in paths]
            arms += arms_R.tolist()
        advantages_K = np.concatenate(advantages)
        advantages_K = whitened(advantages_K) if config.baseline.whiten else advantages_K
        logit += 2.0 * float(np.mean(advantages_K * (np.array(arms) - chosen)))
        size += len(arms)
    assert 1 / (1 + np.exp(-logit)) > 0.95, (logit, size)


def test_remax_compares_each_depth_with_that_of_the_greedy_rollout() -> None:
    credit = Credit.model_validate({"rule": {"type": "discounted", "gamma": 0.5}, "baseline": {"type": "remax"}})
    rollouts = [Rollout("a", 1.0, chain("a", 3)), Rollout("b", 0.0, [])]
    greedy = Rollout("greedy", 1.0, chain("g", 2), greedy=True)
    found = credited([*rollouts, greedy], credit).credits
    # The greedy rollout's calls return 0.5 and 1: their mean is its value.
    assert [(one.rollout_id, one.advantage) for one in found] == [("a", -0.5), ("a", -0.25), ("a", 0.25)]
    by_depth = credit.model_copy(update={"baseline": Baseline(type="remax", per="depth")})
    # It made no third call: the mean of the siblings' third calls, and no advantage.
    assert [one.advantage for one in credited([*rollouts, greedy], by_depth).credits] == [-0.25, -0.5, 0.0]


@pytest.mark.parametrize("rule", [{"type": "discounted"}, {"type": "identical"}], ids=["discounted", "identical"])
def test_siblings_that_equal_the_greedy_rollout_have_no_variance(rule: dict[str, Any]) -> None:
    credit = Credit.model_validate({"rule": rule, "baseline": {"type": "remax"}})
    lengths = (3, 3) if rule["type"] == "discounted" else (1, 5)
    rollouts = [Rollout(name, 0.7, chain(name, length)) for name, length in zip("ab", lengths, strict=True)]
    result = credited([*rollouts, Rollout("greedy", 0.7, chain("g", 3), greedy=True)], credit)
    assert {one.advantage for one in result.credits} == {0.0}
    assert not result.has_variance()


@pytest.mark.parametrize("credit", ESTIMATORS.values(), ids=ESTIMATORS)
def test_a_run_names_the_estimator(credit: dict[str, Any]) -> None:
    sampling = {"min_siblings": 1} if credit["baseline"]["type"] == "ema" else {}
    document = RunConfig.model_validate(run_document(credit=credit, sampling=sampling)).model_dump(mode="json")
    assert RunConfig.stored(document).model_dump(mode="json") == document


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"credit": {"baseline": {"type": "ema"}}, "sampling": {"min_siblings": 2}}, "write min_siblings 1"),
        ({"credit": {"baseline": {"type": "ema", "per": "state"}}}, "write per 'rollout' or 'role'"),
        ({"credit": {"baseline": {"type": "mean_std", "whiten": True}}}, "drop whiten"),
        ({"credit": {"baseline": {"type": "none", "per": "gigpo"}}}, "write type 'mean'"),
        ({"credit": {"baseline": {"type": "remax", "per": "gigpo"}}}, "write per 'rollout' or 'depth'"),
        ({"credit": {"baseline": {"type": "remax", "min_spread": 0.5}}}, "min_spread has no effect"),
        ({"credit": {"baseline": {"type": "mean", "state_weight": 0.5}}}, "state_weight has no effect"),
        ({"credit": {"baseline": {"type": "mean", "ema_decay": 0.5}}}, "ema_decay has no effect"),
        ({"credit": {"baseline": {"type": "none", "min_spread": 0.5}}}, "min_spread has no effect"),
        ({"credit": {"rule": {"type": "identical"}, "baseline": {"per": "depth"}}}, "write rule 'discounted'"),
        ({"credit": {"rule": {"type": "token_discounted"}}}, "write baseline 'none'"),
        ({"credit": {"baseline": {"type": "monte_carlo"}}}, "write rule 'identical'"),
        ({"credit": {"baseline": {"type": "monte_carlo", "per": "depth"}}}, "write per 'rollout'"),
        ({"credit": {"baseline": {"type": "mean", "calls": 2}}}, "calls has no effect"),
        ({"credit": {"baseline": {"type": "remax", "samples": 2}}}, "samples has no effect"),
        ({"credit": MONTE_CARLO, "sampling": {"min_siblings": 1}}, "write sampling.min_siblings 2"),
        ({"credit": MONTE_CARLO, "reward": FEEDBACK}, "write another grader"),
    ],
)
def test_a_contradiction_is_refused_with_the_remedy(changes: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ValidationError, match=remedy) as refused:
        RunConfig.model_validate(run_document(**changes))
    assert "credit" in str(refused.value)
