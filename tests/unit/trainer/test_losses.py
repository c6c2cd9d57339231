import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from leyden.libs.contracts.config import DecoupledCorrection, Reinforce, Weighting
from leyden.services.trainer.loss import losses
from leyden.services.trainer.loss.corrections import (
    effective_sample_share,
    importance_weights,
)
from leyden.services.trainer.loss.objective import Terms, objective
from leyden.services.trainer.rows.token_weights import token_weights
from tests.unit.trainer import oracle

Loss = Callable[[Tensor], losses.TokenLoss]


def weights(weighting: Weighting, sum_constant: int | None = None) -> Tensor:
    rows_K = oracle.ROWS_K.numpy()
    return torch.from_numpy(token_weights(weighting, rows_K, rows_K, oracle.GROUPS_K, sum_constant=sum_constant))


def evaluated(loss: Loss, weights_K: Tensor) -> tuple[float, Tensor, losses.TokenLoss]:
    logprobs_K = oracle.column("logprobs").requires_grad_()
    result = loss(logprobs_K)
    total = (result.losses_K * weights_K).sum()
    total.backward()
    assert logprobs_K.grad is not None
    return float(total.detach()), logprobs_K.grad, result


def ppo(low: float, high: float, dual: float | None, old: str = "old_logprobs") -> Loss:
    return lambda logprobs_K: losses.ppo_clip(
        logprobs_K, oracle.column(old), oracle.ADVANTAGES, clip_low=low, clip_high=high, dual_clip=dual
    )


def gspo(low: float, high: float) -> Loss:
    return lambda logprobs_K: losses.gspo(
        logprobs_K, oracle.column("old_logprobs"), oracle.ADVANTAGES, oracle.ROWS_K, clip_low=low, clip_high=high
    )


def cispo(low: float, high: float) -> Loss:
    return lambda logprobs_K: losses.cispo(
        logprobs_K, oracle.column("old_logprobs"), oracle.ADVANTAGES, clip_low=low, clip_high=high
    )


def sapo(logprobs_K: Tensor) -> losses.TokenLoss:
    anchor_K = oracle.column("old_logprobs")
    return losses.sapo(logprobs_K, anchor_K, oracle.ADVANTAGES, tau_positive=1.0, tau_negative=1.05)


def dppo_tv(logprobs_K: Tensor) -> losses.TokenLoss:
    generator_K = oracle.column("rollout_logprobs")
    return losses.dppo_tv(
        logprobs_K, generator_K, oracle.ADVANTAGES, mask_low=0.2, mask_high=0.2, drift_coefficient=1e-3
    )


def reinforce(logprobs_K: Tensor) -> losses.TokenLoss:
    return losses.reinforce(logprobs_K, oracle.ADVANTAGES)


def decoupled(weights: str, **bounds: float) -> Tensor:
    """The weights of the fixed case."""
    correction = DecoupledCorrection.model_validate({"weights": weights, **bounds})
    old_K, generator_K = oracle.column("old_logprobs"), oracle.column("rollout_logprobs")
    return importance_weights(correction, old_K, generator_K, oracle.ROWS_K)


@pytest.mark.parametrize(
    ("name", "loss", "weighting", "constant"),
    [
        ("verl_ppo_clip_token-mean", ppo(0.2, 0.2, 3.0), "token_mean", None),
        ("verl_ppo_clip_seq-mean-token-mean", ppo(0.2, 0.2, 3.0), "seq_mean_token_mean", None),
        ("verl_ppo_clip_seq-mean-token-mean", ppo(0.2, 0.2, 3.0), "rollout_mean", None),
        ("verl_ppo_clip_seq-mean-token-sum-norm", ppo(0.2, 0.2, 3.0), "rollout_sum_const", 6),
        ("verl_ppo_clip_seq-mean-token-sum", ppo(0.2, 0.2, 3.0), "rollout_sum_const", 1),
        ("verl_dapo_cliphigher_.2_.28_token-mean", ppo(0.2, 0.28, 3.0), "token_mean", None),
        ("slime_ppo_c3_token-sum/ntok", ppo(0.2, 0.28, 3.0), "token_mean", None),
        ("areal_ppo_.2_.28_c3 decoupled off", ppo(0.2, 0.28, 3.0), "token_mean", None),
        ("verl_ppo_clip_NO_dual(c=1e6)_token-mean", ppo(0.2, 0.2, None), "token_mean", None),
        ("trl_grpo_.2_.2", ppo(0.2, 0.2, None), "seq_mean_token_mean", None),
        ("trl_bnpo_.2_.2", ppo(0.2, 0.2, None), "token_mean", None),
        ("trl_dapo_.2_.2", ppo(0.2, 0.2, None), "token_mean", None),
        ("trl_dr_grpo_.2_.2", ppo(0.2, 0.2, None), "rollout_sum_const", 6),
        ("verl_gspo_.2_.2", gspo(0.2, 0.2), "seq_mean_token_mean", None),
        ("verl_gspo_3e-4_4e-4", gspo(3e-4, 4e-4), "seq_mean_token_mean", None),
        ("verl_gspo_.2_.2_token-mean", gspo(0.2, 0.2), "token_mean", None),
        ("areal_gspo_.2", gspo(0.2, 0.2), "token_mean", None),
        ("trl_gspo(grpo,sequence,.2)", gspo(0.2, 0.2), "seq_mean_token_mean", None),
        ("verl_cispo_lo1.0_hi4.0_token-mean", cispo(1.0, 4.0), "token_mean", None),
        ("verl_cispo_.2_.2_token-mean", cispo(0.2, 0.2), "token_mean", None),
        ("trl_cispo_epshigh5", cispo(1.0, 4.0), "token_mean", None),
        ("slime_cispo_1.0_4.0", cispo(1.0, 4.0), "token_mean", None),
        ("verl_sapo", sapo, "seq_mean_token_mean", None),
        ("trl_sapo_.2_.2", sapo, "seq_mean_token_mean", None),
        ("prime_rl_dppo_tv_.2_.2_kl1e-3 (vs rollout logprobs, /ntok)", dppo_tv, "token_mean", None),
        ("verl_gpg", reinforce, "token_mean", None),
    ],
)
def test_loss_and_gradient_equal_the_reference(
    name: str, loss: Loss, weighting: Weighting, constant: int | None
) -> None:
    value, gradient_K, _ = evaluated(loss, weights(weighting, constant))
    expected, expected_gradient_K = oracle.loss(name)
    # verl's means over a row divide by T + 1e-8, which moves its own numbers by up to 2e-9.
    tolerance = 2e-9 if name.startswith("verl") and weighting in {"seq_mean_token_mean", "rollout_mean"} else 1e-9
    assert value == pytest.approx(expected, abs=tolerance)
    assert torch.allclose(gradient_K, expected_gradient_K, atol=tolerance, rtol=0)


def test_clip_fraction_equals_the_reference() -> None:
    recorded = oracle.VECTORS["losses"]["verl_ppo_clip_token-mean"]["metrics"]
    without_dual = ppo(0.2, 0.2, None)(oracle.column("logprobs")).clipped_K
    assert float(without_dual.double().mean()) == pytest.approx(recorded["actor/pg_clipfrac"], abs=1e-8)


@pytest.mark.parametrize(
    ("name", "weights_K"),
    [
        ("token_C2", decoupled("tis_token")),
        ("sequence_C2", decoupled("tis_seq")),
        ("icepop_0.5_2.0", decoupled("icepop", cap=2.0)),
    ],
)
def test_importance_weights_equal_the_reference(name: str, weights_K: Tensor) -> None:
    recorded = oracle.VECTORS["rollout_is"][name]
    assert torch.allclose(weights_K, oracle.flat(recorded["w"]), atol=1e-9, rtol=0)
    if "ess" in recorded:
        # verl divides by the mean + 1e-8.
        shifted = (weights_K.mean() + 1e-8) / weights_K.mean()
        assert effective_sample_share(weights_K) * float(shifted) ** 2 == pytest.approx(recorded["ess"], abs=1e-9)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        # Ratios of two rows: 1.5 and 2, whose product is 3; 0.4 and 1, whose product is 0.4 and geometric mean 0.632.
        ({"weights": "tis_token"}, [1.5, 2.0, 0.4, 1.0]),
        ({"weights": "tis_token", "cap": 1.2}, [1.2, 1.2, 0.4, 1.0]),
        ({"weights": "tis_seq"}, [2.0, 2.0, 0.4, 0.4]),
        ({"weights": "icepop"}, [1.5, 2.0, 0.0, 1.0]),
        ({"weights": "seq_mask", "cap": 2.9}, [0.0, 0.0, 0.4, 0.4]),
        ({"weights": "seq_mask", "cap": 3.1}, [3.0, 3.0, 0.4, 0.4]),
        ({"weights": "mis_geo"}, [0.0] * 4),
        ({"weights": "mis_geo", "floor": 0.6, "cap": 1.7}, [0.0, 0.0, 1.0, 1.0]),
    ],
)
def test_importance_weights_by_hand(document: dict[str, Any], expected: list[float]) -> None:
    old_K = torch.tensor([1.5, 2.0, 0.4, 1.0], dtype=torch.float64).log()
    zeros_K, rows_K = torch.zeros(4, dtype=torch.float64), torch.tensor([0, 0, 1, 1])
    weights_K = importance_weights(DecoupledCorrection.model_validate(document), old_K, zeros_K, rows_K)
    assert weights_K.tolist() == pytest.approx(expected)

    # The objective multiplies with them, and masked tokens stay in the denominators.
    terms = Terms(zeros_K, torch.ones(4, dtype=torch.float64), torch.full((4,), 0.25, dtype=torch.float64), rows_K)
    correction = DecoupledCorrection.model_validate(document)
    result = objective(Reinforce(correction=correction), old_K.clone().requires_grad_(), terms)
    assert result.loss.item() == pytest.approx(-float((old_K * torch.tensor(expected)).sum()) / 4)
    assert result.masked_K.tolist() == [value == 0 for value in expected]


@pytest.mark.parametrize(
    ("name", "dual"),
    [
        ("decoupled_ppo(prox=old,behave=roll,cap2)", None),
        ("trl_dapo_TIS_w", None),
        ("verl_ppo_clip_token-mean_TIS_token_C2", 3.0),
    ],
)
def test_decoupled_loss_equals_the_reference(name: str, dual: float | None) -> None:
    value, gradient_K, _ = evaluated(ppo(0.2, 0.2, dual), weights("token_mean") * decoupled("tis_token"))
    expected, expected_gradient_K = oracle.loss(name)
    assert value == pytest.approx(expected, abs=1e-9)
    assert torch.allclose(gradient_K, expected_gradient_K, atol=1e-9, rtol=0)


def test_k3_equals_the_reference_and_its_penalty_too() -> None:
    logprobs_K = oracle.column("logprobs").requires_grad_()
    estimates_K = losses.kl("k3", logprobs_K, oracle.column("ref_logprobs"))
    assert torch.allclose(estimates_K, oracle.flat(oracle.VECTORS["kl"]["low_var_kl"]), atol=1e-9, rtol=0)

    weights_K = weights("seq_mean_token_mean")
    policy = ppo(0.2, 0.2, None)(logprobs_K)
    total = ((policy.losses_K + 0.04 * estimates_K) * weights_K).sum()
    total.backward()
    expected, expected_gradient_K = oracle.loss("trl_grpo_beta0.04")
    assert float(total.detach()) == pytest.approx(expected, abs=1e-9)
    assert logprobs_K.grad is not None
    assert torch.allclose(logprobs_K.grad, expected_gradient_K, atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("estimator", "name"), [("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl"), ("k3+", "low_var_kl")]
)
def test_kl_estimates_equal_the_reference(estimator: Any, name: str) -> None:
    estimates_K = losses.kl(estimator, oracle.column("logprobs"), oracle.column("ref_logprobs"))
    assert torch.allclose(estimates_K, oracle.flat(oracle.VECTORS["kl"][name]), atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [("k1", 1.0, 1.0), ("k2", 0.5, 1.0), ("k3", math.exp(-1), 1 - math.exp(-1)), ("k3+", math.exp(-1), 1.0)],
)
def test_kl_estimates_by_hand(estimator: Any, value: float, gradient: float) -> None:
    logprob_K = torch.tensor([-0.5], dtype=torch.float64, requires_grad=True)
    estimate_K = losses.kl(estimator, logprob_K, torch.tensor([-1.5], dtype=torch.float64))
    estimate_K.sum().backward()
    assert logprob_K.grad is not None
    assert [estimate_K.item(), logprob_K.grad.item()] == pytest.approx([value, gradient])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 1.0, -1.0, -1.0),
        (1.5, 1.0, -1.28, 0.0),
        (0.5, 1.0, -0.5, -0.5),
        (0.5, -1.0, 0.8, 0.0),
        (2.0, -1.0, 2.0, 2.0),
        (5.0, -1.0, 3.0, 0.0),
    ],
)
def test_ppo_clip_by_hand(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    logprob_K = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    advantages_K = torch.tensor([advantage], dtype=torch.float64)
    result = losses.ppo_clip(
        logprob_K, torch.zeros(1, dtype=torch.float64), advantages_K, clip_low=0.2, clip_high=0.28, dual_clip=3.0
    )
    result.losses_K.sum().backward()
    assert result.losses_K.tolist() == pytest.approx([loss])
    assert logprob_K.grad is not None
    assert logprob_K.grad.tolist() == pytest.approx([gradient])
    assert result.clipped_K.tolist() == [gradient == 0.0]


@pytest.mark.parametrize(
    ("probability", "advantage", "loss", "gradient"),
    [
        (0.5, 1.0, -1.0, -1.0),
        (0.65, 1.0, -1.3, -1.3),
        (0.9, 1.0, 0.0, 0.0),
        (0.9, -1.0, 1.8, 1.8),
        (0.2, -1.0, 0.0, 0.0),
        (0.2, 1.0, -0.4, -0.4),
    ],
)
def test_dppo_tv_by_hand(probability: float, advantage: float, loss: float, gradient: float) -> None:
    logprob_K = torch.tensor([math.log(probability)], dtype=torch.float64, requires_grad=True)
    generator_K = torch.tensor([math.log(0.5)], dtype=torch.float64)
    bounds = {"mask_low": 0.2, "mask_high": 0.2, "drift_coefficient": 0.0}
    result = losses.dppo_tv(logprob_K, generator_K, torch.tensor([advantage], dtype=torch.float64), **bounds)
    result.losses_K.sum().backward()
    assert logprob_K.grad is not None
    assert [result.losses_K.item(), logprob_K.grad.item()] == pytest.approx([loss, gradient])
    assert result.clipped_K.tolist() == [gradient == 0.0]


def test_the_drift_penalty_counts_tokens_without_an_advantage() -> None:
    logprobs_K = torch.tensor([-1.0, -1.0], dtype=torch.float64)
    result = losses.dppo_tv(
        logprobs_K,
        logprobs_K - 3.0,
        torch.tensor([0.0, -1.0], dtype=torch.float64),
        mask_low=0.2,
        mask_high=0.2,
        drift_coefficient=0.5,
    )
    assert result.losses_K.tolist() == pytest.approx([0.5 * 9, math.exp(3) + 0.5 * 9])


def test_without_a_clip_by_hand() -> None:
    logprobs_K = torch.tensor([math.log(0.3)], dtype=torch.float64, requires_grad=True)
    anchor_K, advantages_K = torch.tensor([math.log(0.1)], dtype=torch.float64), torch.tensor([2.0])
    losses.importance_sampling(logprobs_K, anchor_K, advantages_K).losses_K.sum().backward()
    assert logprobs_K.grad is not None
    assert logprobs_K.grad.item() == pytest.approx(-6.0)
    gate = losses.sapo(logprobs_K, logprobs_K.detach(), advantages_K, tau_positive=1.0, tau_negative=1.05).losses_K
    assert gate.item() == pytest.approx(-4.0)


def test_effective_sample_share_by_hand() -> None:
    assert effective_sample_share(torch.tensor([1.0, 3.0])) == pytest.approx(0.8)
    assert effective_sample_share(torch.ones(7)) == pytest.approx(1.0)
    assert effective_sample_share(torch.zeros(0)) == 1.0


@pytest.mark.parametrize(
    ("differences", "loss", "gradient"),
    [
        ([60.0, -64.0], math.exp(-2), math.exp(-2)),
        ([60.0, -42.0], math.exp(9), math.exp(9)),
        ([60.0, 0.0], math.exp(10), 0.0),
    ],
)
def test_gspo_clamps_the_mean_of_a_row_and_no_token(differences: list[float], loss: float, gradient: float) -> None:
    logprobs_K = torch.tensor(differences, dtype=torch.float64, requires_grad=True)
    zeros_K, rows_K = torch.zeros(2, dtype=torch.float64), torch.tensor([0, 0])
    result = losses.gspo(logprobs_K, zeros_K, zeros_K - 1, rows_K, clip_low=1.0, clip_high=0.2)
    result.losses_K.sum().backward()
    assert result.losses_K.tolist() == pytest.approx([loss] * 2)
    assert logprobs_K.grad is not None
    assert logprobs_K.grad.tolist() == pytest.approx([gradient] * 2)


def test_extreme_ratios_stay_finite() -> None:
    logprobs_K = torch.tensor([-1e4, 0.0], requires_grad=True)
    anchor_K = torch.tensor([0.0, -1e4])
    advantages_K = torch.tensor([1.0, -1.0])
    for loss in (
        losses.ppo_clip(logprobs_K, anchor_K, advantages_K, clip_low=0.2, clip_high=0.2, dual_clip=None).losses_K,
        losses.gspo(logprobs_K, anchor_K, advantages_K, torch.arange(2), clip_low=0.2, clip_high=0.2).losses_K,
        losses.cispo(logprobs_K, anchor_K, advantages_K, clip_low=1.0, clip_high=4.0).losses_K,
        losses.sapo(logprobs_K, anchor_K, advantages_K, tau_positive=1.0, tau_negative=1.05).losses_K,
        losses.dppo_tv(
            logprobs_K, anchor_K, advantages_K, mask_low=0.2, mask_high=0.2, drift_coefficient=1e-3
        ).losses_K,
        losses.importance_sampling(logprobs_K, anchor_K, advantages_K).losses_K,
        losses.kl("k3", logprobs_K, anchor_K),
    ):
        assert torch.isfinite(loss).all()


def test_weights_by_hand() -> None:
    rows_K, rollouts_K, groups_K = np.array([0, 0, 1, 2]), np.array([0, 0, 0, 1]), np.array([0, 0, 0, 0])
    shares = {
        "token_mean": [1 / 4] * 4,
        "seq_mean_token_mean": [1 / 6, 1 / 6, 1 / 3, 1 / 3],
        "rollout_mean": [1 / 6, 1 / 6, 1 / 6, 1 / 2],
        "prompt_mean": [1 / 4] * 4,
    }
    for weighting, expected in shares.items():
        assert token_weights(weighting, rows_K, rollouts_K, groups_K).tolist() == pytest.approx(expected)
    constant = token_weights("rollout_sum_const", rows_K, rollouts_K, groups_K, sum_constant=10)
    assert constant.tolist() == pytest.approx([1 / 20] * 4)


def test_splitting_a_row_at_a_fork_changes_no_weight_but_the_row_mean() -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        rollouts_K = np.sort(random.integers(0, 5, 30))
        groups_K = rollouts_K // 2
        whole_K, split_K = rollouts_K, np.cumsum(np.r_[0, (np.diff(rollouts_K) > 0) | (random.random(29) < 0.2)])
        for weighting in ("token_mean", "rollout_mean", "prompt_mean"):
            before = token_weights(weighting, whole_K, rollouts_K, groups_K)
            assert np.array_equal(before, token_weights(weighting, split_K, rollouts_K, groups_K))
            assert before.sum() == pytest.approx(1.0)
