"""Supervised fine-tuning: its loss is the cross-entropy that TRL and transformers compute, and its passes use each
group once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from leyden.libs.contracts.config import DecoupledCorrection, RunConfig, Sft
from leyden.libs.store.training import ReadyGroup
from leyden.services.trainer.model.forward import Policy
from leyden.services.trainer.rows.batch import Sample
from leyden.services.trainer.rows.selection import select_demonstrations
from leyden.services.trainer.step.batch import Batch
from tests.support.builders import run_document
from tests.unit.trainer.cases import agent_samples, gradients_of, sample, tiny_llama

IGNORED = -100


def demonstrations(seed: int = 0) -> list[Sample]:
    """Rows of several lengths without shared beginnings, as TRL's data set would have them."""
    random = np.random.default_rng(seed)
    rows = []
    for number, (prompt, answer) in enumerate(((5, 3), (2, 7), (9, 1), (4, 4))):
        ids = random.integers(0, 61, prompt + answer).tolist()
        mask = [0] * prompt + [1] * answer
        rows.append(sample(f"run.{number}.0", ids, mask, version=-1, logprob=0.0))
    return rows


def padded(samples: list[Sample]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, attention mask and labels of a padded batch, in which prompts and padding have the label -100."""
    length = max(len(one.token_ids) for one in samples)
    ids = torch.zeros(len(samples), length, dtype=torch.long)
    attends, labels = torch.zeros_like(ids), torch.full_like(ids, IGNORED)
    for row, one in enumerate(samples):
        size = len(one.token_ids)
        ids[row, :size] = torch.from_numpy(one.token_ids.astype(np.int64))
        attends[row, :size] = 1
        labels[row, :size] = torch.where(torch.from_numpy(one.mask), ids[row, :size], IGNORED)
    return ids, attends, labels


def trl_loss(model: PreTrainedModel, samples: list[Sample]) -> torch.Tensor:
    """The model's own loss over labels, which TRL's SFTTrainer takes."""
    ids, attends, labels = padded(samples)
    loss: torch.Tensor = model(input_ids=ids, attention_mask=attends, labels=labels).loss
    return loss


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def test_loss_and_gradient_are_those_of_transformers_over_labels() -> None:
    model, rows = tiny_llama(), demonstrations()
    expected = trl_loss(model, rows)
    expected.backward()
    reference = gradients(model)
    computed = gradients_of(Policy(model), Batch(rows), Sft(), pack_tokens=64)
    # transformers computes its loss in float32.
    assert computed.loss == pytest.approx(expected.item(), rel=1e-6)
    own = gradients(model)
    assert own.keys() == reference.keys()
    for name, gradient in own.items():
        torch.testing.assert_close(gradient, reference[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("pack_tokens", [24, 4096])
def test_loss_and_gradient_are_the_cross_entropy_in_float64(pack_tokens: int) -> None:
    """An agent's rows share beginnings and fork."""
    model = tiny_llama()
    for rows in (demonstrations(), [one for seed in range(3) for one in agents_demonstrations(seed)]):
        ids, attends, labels = padded(rows)
        logits = model(input_ids=ids, attention_mask=attends).logits[:, :-1]
        expected = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        expected.backward()
        reference = gradients(model)
        computed = gradients_of(Policy(model), Batch(rows), Sft(), pack_tokens=pack_tokens)
        assert computed.loss == pytest.approx(expected.item(), abs=1e-9)
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(gradient, reference[name], rtol=1e-9, atol=1e-9)


def agents_demonstrations(seed: int) -> list[Sample]:
    rows = agent_samples(seed)
    for one in rows:
        one.advantages[one.mask], one.temperatures[:], one.policy_versions[:] = 1.0, 1.0, -1
    return rows


def ready(name: str, *, is_trainable: bool = True) -> ReadyGroup:
    return ReadyGroup(name, -1 if is_trainable else None, is_trainable)


def test_each_pass_trains_every_group_once_in_an_order_of_its_own() -> None:
    uses: dict[str, int] = {}
    order = []
    for _ in range(6):
        fresh = [ready(name) for name in "abcde" if name not in uses]
        found = select_demonstrations(fresh, uses, seed=3, groups_per_step=5)
        assert found.complete
        assert not set(found.trained) & uses.keys()
        order.append([*found.trained, *found.repeated])
        for name in order[-1]:
            uses[name] = uses.get(name, 0) + 1
    assert all(sorted(one) == list("abcde") for one in order)
    assert len({tuple(one) for one in order}) > 1


def test_steps_across_the_end_of_a_pass_use_no_group_twice_before_all_others() -> None:
    uses: dict[str, int] = {}
    for _ in range(20):
        fresh = [ready(name) for name in "abcde" if name not in uses]
        found = select_demonstrations(fresh, uses, seed=0, groups_per_step=3)
        for name in [*found.trained, *found.repeated]:
            uses[name] = uses.get(name, 0) + 1
        assert max(uses.values()) - min([*uses.values(), *(0 for _ in range(5 - len(uses)))]) <= 1
    assert sum(uses.values()) == 60


def test_groups_without_a_token_are_judged_and_none_make_no_step() -> None:
    found = select_demonstrations([ready("a", is_trainable=False)], {}, seed=0, groups_per_step=2)
    assert (found.trained, found.repeated, found.untrainable) == ([], [], ["a"])
    assert not select_demonstrations([], {}, seed=0, groups_per_step=2).complete


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("algorithm.kl_in", {"algorithm": {"type": "sft", "kl_in": "reward", "kl_coefficient": 0.1}}),
        ("sampling.replay", {"sampling": {"replay": {}}}),
        ("sampling.curriculum", {"sampling": {"curriculum": {}}}),
        ("sampling.refill_zero_variance", {"sampling": {"refill_zero_variance": 1}}),
        ("credit.baseline.whiten", {"credit": {"baseline": {"type": "mean", "whiten": True}}}),
    ],
)
def test_fields_that_cannot_act_are_refused_by_their_path(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=f"{field} cannot act with algorithm.type 'sft'"):
        RunConfig.model_validate(run_document(**{"algorithm": {"type": "sft", "runs": ["run-1"]}, **changes}))


def test_demonstrations_have_no_policy_to_correct_for() -> None:
    with pytest.raises(ValidationError, match="which demonstrations do not know: write 'bypass'"):
        Sft(correction=DecoupledCorrection())


def test_a_policy_of_a_run_is_not_fine_tuned() -> None:
    policies = {"checker": {"pool": "second", "algorithm": {"type": "sft"}}}
    roles = [{"name": "checker", "model": "checker", "policy": "checker"}, {"name": "writer"}]
    with pytest.raises(ValidationError, match="'sft' trains a run's own model"):
        RunConfig.model_validate(run_document(policies=policies, roles=roles))
