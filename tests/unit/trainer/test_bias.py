"""Bias by enumeration: on a toy MDP of three steps and two actions, all eight rollouts stand for the expectation.

A state is the actions so far, and the policy a table of logits. The true gradient of the expected reward comes from
autograd through the probabilities of all rollouts. A token that behaviour μ samples counts as often as μ samples it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from leyden.libs.contracts.config import Algorithm, Reinforce
from leyden.services.trainer.loss import losses
from leyden.services.trainer.loss.objective import Terms, objective
from leyden.services.trainer.rows.batch import to_go

ROLLOUTS = list(itertools.product((0, 1), repeat=3))
REWARDS = torch.tensor([0.3, -1.0, 2.0, 0.5, 1.0, 0.0, -0.4, 1.5], dtype=torch.float64)
STATES = 7


@dataclass
class Toy:
    """Logits [7, 2]; 24 tokens of 8 rollouts, one row each."""

    logits: Tensor

    @classmethod
    def random(cls, seed: int) -> Toy:
        torch.manual_seed(seed)
        return cls(torch.randn(STATES, 2, dtype=torch.float64).requires_grad_())

    def logprobs(self) -> Tensor:
        """One for each token, [8 · 3]."""
        table = self.logits.log_softmax(1)
        found = []
        for rollout in ROLLOUTS:
            state = 0
            for action in rollout:
                found.append(table[state, action])
                state = 2 * state + 1 + action
        return torch.stack(found)

    def chances(self) -> Tensor:
        """One for each rollout, [8]."""
        return self.logprobs().reshape(8, 3).sum(1).exp()

    def gradient(self, value: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(value, self.logits, retain_graph=True)
        return gradient


def expected_gradient(policy: Toy, behaviour: Toy, algorithm: dict[str, object], rewards: Tensor = REWARDS) -> Tensor:
    """The gradient of the loss if rollouts come as often as `behaviour` draws them; a rollout's tokens add up."""
    chances_K = behaviour.chances().detach().repeat_interleave(3)
    rows_K = torch.arange(8).repeat_interleave(3)
    terms = Terms(behaviour.logprobs().detach(), rewards.repeat_interleave(3), chances_K, rows_K)
    parsed: Algorithm = TypeAdapter(Algorithm).validate_python(algorithm)
    return policy.gradient(objective(parsed, policy.logprobs(), terms).loss)


def true_gradient(policy: Toy) -> Tensor:
    return policy.gradient((policy.chances() * REWARDS).sum())


UNBIASED_ON_POLICY = ["ppo_clip", "gspo", "cispo", "sapo", "dppo_tv", "importance_sampling", "reinforce"]


@pytest.mark.parametrize("name", UNBIASED_ON_POLICY)
def test_on_policy_every_loss_has_the_true_gradient(name: str) -> None:
    policy = Toy.random(0)
    assert torch.allclose(expected_gradient(policy, policy, {"type": name}), -true_gradient(policy), atol=1e-12)


@pytest.mark.parametrize("baseline", [0.7, -3.0])
def test_a_constant_baseline_adds_no_bias(baseline: float) -> None:
    policy = Toy.random(1)
    found = expected_gradient(policy, policy, {"type": "reinforce"}, REWARDS - baseline)
    assert torch.allclose(found, -true_gradient(policy), atol=1e-12)


def test_leave_one_out_is_unbiased_and_the_group_mean_shrinks_the_gradient_by_its_size() -> None:
    policy = Toy.random(2)
    chances, scores = policy.chances(), []
    for chance in chances:
        scores.append(torch.autograd.grad(chance.log(), policy.logits, retain_graph=True)[0])
    leave_one_out, mean = torch.zeros_like(policy.logits), torch.zeros_like(policy.logits)
    for one, other in itertools.product(range(8), repeat=2):
        weight = (chances[one] * chances[other]).detach()
        leave_one_out += weight * (REWARDS[one] - REWARDS[other]) * scores[one]
        mean += weight * (REWARDS[one] - (REWARDS[one] + REWARDS[other]) / 2) * scores[one]
    assert torch.allclose(leave_one_out, true_gradient(policy), atol=1e-12)
    assert torch.allclose(mean, true_gradient(policy) / 2, atol=1e-12)


def decoupled(weights: str, cap: float) -> dict[str, object]:
    return {"type": "reinforce", "correction": {"type": "decoupled", "weights": weights, "cap": cap}}


@pytest.mark.parametrize("weights", ["tis_seq", "seq_mask"])
def test_the_ratio_of_a_row_is_unbiased_off_policy(weights: str) -> None:
    policy, behaviour = Toy.random(3), Toy.random(4)
    found = expected_gradient(policy, behaviour, decoupled(weights, 1e6))
    assert torch.allclose(found, -true_gradient(policy), atol=1e-12)
    # A cap that acts trades bias for variance.
    capped = expected_gradient(policy, behaviour, decoupled(weights, 1.1))
    assert not torch.allclose(capped, -true_gradient(policy), atol=1e-2)


@pytest.mark.parametrize(
    "algorithm",
    [{"type": "importance_sampling"}, {"type": "reinforce"}, decoupled("tis_token", 1e6)],
    ids=["importance_sampling", "reinforce", "tis_token"],
)
def test_token_ratios_are_biased_off_policy_but_for_one_step(algorithm: dict[str, object]) -> None:
    policy, behaviour = Toy.random(3), Toy.random(4)
    found = expected_gradient(policy, behaviour, algorithm)
    assert not torch.allclose(found, -true_gradient(policy), atol=1e-2)
    # The ratio of a last token is its row's if both policies differ in the last step alone.
    last = Toy(policy.logits.detach().clone().requires_grad_())
    with torch.no_grad():
        last.logits[3:] = behaviour.logits[3:]
    found = expected_gradient(policy, last, algorithm)
    agrees = torch.allclose(found[3:], -true_gradient(policy)[3:], atol=1e-12)
    assert agrees == (algorithm != {"type": "reinforce"})


def kl_gradient(policy: Toy, reference: Toy) -> Tensor:
    """The gradient of KL(π ‖ reference) over complete rollouts."""
    differences = (policy.logprobs() - reference.logprobs().detach()).reshape(8, 3).sum(1)
    return policy.gradient((policy.chances() * differences).sum())


def test_kl_in_the_reward_has_the_gradient_of_the_kl() -> None:
    policy, reference = Toy.random(5), Toy.random(6)
    rows_K = np.repeat(np.arange(8), 3)
    estimates_K = losses.kl("k1", policy.logprobs().detach(), reference.logprobs().detach())
    penalties_K = torch.from_numpy(to_go(0.3 * estimates_K.numpy(), rows_K))
    terms = Terms(
        policy.logprobs().detach(),
        REWARDS.repeat_interleave(3) - penalties_K,
        policy.chances().detach().repeat_interleave(3),
        torch.from_numpy(rows_K),
    )
    found = policy.gradient(objective(Reinforce(), policy.logprobs(), terms).loss)
    assert torch.allclose(found, 0.3 * kl_gradient(policy, reference) - true_gradient(policy), atol=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3+"])
def test_in_the_loss_k2_and_k3_plus_have_the_gradient_of_each_tokens_kl(estimator: Any) -> None:
    policy, reference = Toy.random(5), Toy.random(6)
    log_table, log_reference = policy.logits.log_softmax(1), reference.logits.detach().log_softmax(1)
    exact = (log_table.exp() * (log_table - log_reference)).sum(1)
    chances = log_table.detach().exp()
    estimates = losses.kl(estimator, log_table.flatten(), log_reference.flatten()).reshape(STATES, 2)
    found = policy.gradient((chances * estimates).sum())
    wanted = policy.gradient(exact.sum())
    assert torch.allclose(found, wanted, atol=1e-12) == (estimator in {"k2", "k3+"})
    assert (found.abs().max() < 1e-12) == (estimator == "k1")
