"""On-policy distillation: the teacher's judgement of sampled tokens, and a policy that moves to its teacher."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from pydantic import ValidationError

from leyden.libs.contracts.config import Distillation, Optimizer, Reinforce, RunConfig
from leyden.services.trainer.loss.distillation import teacher_advantages
from leyden.services.trainer.loss.objective import Terms, objective
from leyden.services.trainer.model.forward import Policy
from leyden.services.trainer.rows.batch import Sample, trained_tokens, with_advantages
from leyden.services.trainer.step.gradients import batch_logprobs, plan_batch
from leyden.services.trainer.step.learner import Learner, Reference
from leyden.services.trainer.step.optimizers import make_optimizer
from leyden.services.trainer.step.step import optimizer_step
from tests.support.builders import run_document
from tests.unit.trainer.cases import VOCABULARY, agent_samples, sample, tiny_llama

CPU = Accelerator(cpu=True)
TEACHER = {"run": "run-1", "version": 3}


def learner(*, seed: int = 0, rate: float = 1e-2) -> Learner:
    policy = Policy(tiny_llama(seed, dtype=torch.float32))
    return Learner(policy, make_optimizer(policy, Optimizer(learning_rate=rate)), CPU)


def config(distillation: dict[str, Any] | None, **algorithm: Any) -> RunConfig:
    document = {
        "algorithm": {"type": "importance_sampling", "distillation": distillation, **algorithm},
        "training": {"micro_batch_tokens": 64},
        "optimizer": {"learning_rate": 1e-2},
    }
    return RunConfig.model_validate(run_document(**document))


def logprobs(policy: Policy, samples: list[Sample]) -> np.ndarray:
    tokens = trained_tokens(samples)
    return batch_logprobs(policy, plan_batch(samples, tokens, 64), len(tokens), CPU)


def weights(subject: Learner) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in subject.policy.named_parameters()}


def test_advantages_by_hand() -> None:
    old_K, teacher_K, rewards_K = np.log([0.5, 0.1, 1.0]), np.log([0.25, 0.2, 1.0]), np.array([1.0, -1.0, 2.0])
    alone = teacher_advantages(Distillation(**TEACHER), rewards_K, old_K, teacher_K)
    np.testing.assert_allclose(alone, [-np.log(2), np.log(2), 0.0], rtol=1e-15)
    added = Distillation(**TEACHER, coefficient=0.5, rewards="add")
    expected = [1 - np.log(2) / 2, -1 + np.log(2) / 2, 2.0]
    np.testing.assert_allclose(teacher_advantages(added, rewards_K, old_K, teacher_K), expected, rtol=1e-15)


def test_the_mean_gradient_on_the_policys_own_tokens_is_that_of_the_reverse_kl() -> None:
    """Every token is a draw with its own probability, so that sums are expectations."""
    torch.manual_seed(0)
    logits, teacher = torch.randn(7, dtype=torch.float64, requires_grad=True), torch.randn(7, dtype=torch.float64)
    own, other = logits.log_softmax(0), teacher.log_softmax(0)
    (wanted,) = torch.autograd.grad((own.exp() * (own - other)).sum(), logits, retain_graph=True)
    advantages = teacher_advantages(Distillation(**TEACHER), np.zeros(7), own.detach().numpy(), other.numpy())
    terms = Terms(own.detach(), torch.from_numpy(advantages), own.detach().exp(), torch.arange(7))
    (found,) = torch.autograd.grad(objective(Reinforce(), own, terms).loss, logits)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rewards", ["ignore", "add"])
def test_a_step_with_a_teacher_is_the_step_with_its_advantages(rewards: str) -> None:
    taught, by_hand, samples = learner(), learner(), agent_samples(3)
    teacher = Policy(tiny_llama(1, dtype=torch.float32))
    own_K, teacher_K = logprobs(taught.policy, samples), logprobs(teacher, samples)
    judged_K = 0.5 * (teacher_K - own_K) + (trained_tokens(samples).advantages_K if rewards == "add" else 0)
    taught.teacher = Reference(teacher)
    metrics = optimizer_step(taught, samples, config({**TEACHER, "coefficient": 0.5, "rewards": rewards}))
    optimizer_step(by_hand, with_advantages(samples, judged_K), config(None))
    assert metrics["kl_teacher"] == pytest.approx(float((own_K - teacher_K).mean()), rel=1e-6)
    pairs = zip(weights(taught).values(), weights(by_hand).values(), strict=True)
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in pairs)
    assert any(
        not torch.equal(one, other)
        for one, other in zip(weights(taught).values(), weights(learner()).values(), strict=True)
    )


def test_no_step_changes_the_teacher() -> None:
    taught, teacher = learner(), Policy(tiny_llama(1, dtype=torch.float32))
    taught.teacher = Reference(teacher)
    before = copy.deepcopy(teacher.state_dict())
    optimizer_step(taught, agent_samples(0), config(TEACHER))
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())


def test_a_learner_without_its_teacher_does_not_train_on_rewards() -> None:
    alone = learner()
    with pytest.raises(RuntimeError, match="loaded without its teacher"):
        optimizer_step(alone, agent_samples(0), config(TEACHER))
    pairs = zip(weights(alone).values(), weights(learner()).values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def drawn(policy: Policy, count: int, length: int, random: torch.Generator) -> list[Sample]:
    """Rows that the policy samples itself after one prompt token."""
    ids = torch.zeros(count, 1, dtype=torch.long)
    with torch.no_grad():
        for _ in range(length):
            chances = policy.model(input_ids=ids).logits[:, -1].softmax(-1)
            ids = torch.cat([ids, torch.multinomial(chances, 1, generator=random)], 1)
        found = policy.model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    rows = []
    for number in range(count):
        row = sample(f"run.{number}.0", ids[number].tolist(), [0] + [1] * length)
        row.generator_logprobs[1:] = found[number].numpy()
        rows.append(row)
    return rows


def test_a_policy_moves_to_its_teacher_on_its_own_tokens() -> None:
    """The exact reverse KL of the first token, over all of the vocabulary, falls below a quarter in 30 steps."""
    subject, teacher = learner(rate=3e-3), Policy(tiny_llama(1, dtype=torch.float32))
    subject.teacher = Reference(teacher)

    def distance() -> float:
        first = torch.zeros(1, 1, dtype=torch.long)
        with torch.no_grad():
            own, other = (one.model(input_ids=first).logits[0, 0].log_softmax(-1) for one in (subject.policy, teacher))
        assert len(own) == VOCABULARY
        return float((own.exp() * (own - other)).sum())

    random, began, measured = torch.Generator().manual_seed(0), distance(), list[float]()
    for _ in range(30):
        rows = drawn(subject.policy, 32, 3, random)
        measured.append(optimizer_step(subject, rows, config(TEACHER))["kl_teacher"])
    assert distance() < began / 4
    assert np.mean(measured[-5:]) < np.mean(measured[:5]) / 2


@pytest.mark.parametrize(
    ("distillation", "words"),
    [
        ({}, "name one teacher: write run and version, or model"),
        ({"run": "run-1"}, "name one teacher"),
        ({"version": 1}, "name one teacher"),
        ({**TEACHER, "model": "/models/large"}, "name one teacher"),
    ],
)
def test_a_teacher_has_one_name(distillation: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        config(distillation)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        (
            "algorithm.critic",
            {
                "algorithm": {"type": "ppo_clip", "critic": {}, "distillation": TEACHER},
                "credit": {"baseline": {"type": "value"}},
            },
        ),
        ("credit.baseline.whiten", {"credit": {"baseline": {"type": "mean", "whiten": True}}}),
        ("sampling.refill_zero_variance", {"sampling": {"refill_zero_variance": 1}}),
    ],
)
def test_fields_that_cannot_act_beside_a_teacher_are_refused(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=f"{field} cannot act beside the advantages of algorithm.distillation"):
        RunConfig.model_validate(
            run_document(**{"algorithm": {"type": "ppo_clip", "distillation": TEACHER}, **changes})
        )


def test_demonstrations_have_no_teacher() -> None:
    with pytest.raises(ValidationError, match=r"algorithm\.distillation cannot act with"):
        RunConfig.model_validate(run_document(algorithm={"type": "sft", "distillation": TEACHER}))
