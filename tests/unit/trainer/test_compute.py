"""Packed, prefix-shared training against one plain call per row."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel

from leyden.libs.contracts.config import (
    Algorithm,
    Cispo,
    DecoupledCorrection,
    DppoTv,
    Gspo,
    ImportanceSampling,
    PpoClip,
    Reinforce,
    Sapo,
)
from leyden.services.trainer.loss.objective import Terms, objective
from leyden.services.trainer.model.forward import Policy
from leyden.services.trainer.model.load import freeze
from leyden.services.trainer.rows import tree
from leyden.services.trainer.rows.batch import Sample, trained_tokens, weights_of
from leyden.services.trainer.step.batch import Anchors, Batch
from leyden.services.trainer.step.gradients import batch_logprobs, plan_batch
from tests.unit.trainer.cases import agent_samples, gradients_of, sample, tiny_llama, tiny_qwen

CPU = Accelerator(cpu=True)


@pytest.fixture(autouse=True)
def short_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "LEAST_PREFIX", 1)


def plain_outputs(model: PreTrainedModel, row: Sample) -> tuple[Tensor, Tensor]:
    """One call, no sharing: log softmax(logits / T) of every trained token, and the entropy that it was drawn from."""
    logits = model(input_ids=torch.from_numpy(row.token_ids).long()[None]).logits[0]
    positions = np.flatnonzero(row.mask)
    scaled = logits[positions - 1] / torch.from_numpy(row.temperatures[positions])[:, None].to(logits.dtype)
    logprobs = scaled.log_softmax(-1)
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs[range(len(positions)), row.token_ids[positions]], entropies


def plain_logprobs(model: PreTrainedModel, row: Sample) -> Tensor:
    return plain_outputs(model, row)[0]


def plain_gradients(
    model: PreTrainedModel, algorithm: Algorithm, samples: Sequence[Sample], reference: PreTrainedModel | None = None
) -> tuple[float, dict[str, Tensor]]:
    tokens = trained_tokens(samples)
    weights_K = weights_of(tokens, algorithm.weighting, algorithm.sum_constant)
    model.zero_grad()
    total = 0.0
    for number, row in enumerate(samples):
        of_row = tokens.rows_K == number
        terms = Terms(
            torch.from_numpy(tokens.generator_logprobs_K[of_row]).double(),
            torch.from_numpy(tokens.advantages_K[of_row]).double(),
            torch.from_numpy(weights_K[of_row]),
            torch.zeros(int(of_row.sum()), dtype=torch.int64),
            plain_logprobs(reference, row).detach() if reference else None,
        )
        logprobs, entropies = plain_outputs(model, row)
        loss = objective(algorithm, logprobs, terms, entropies).loss
        loss.backward()
        total += loss.item()
    return total, gradients(model)


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def shared_gradients(
    model: PreTrainedModel,
    algorithm: Algorithm,
    samples: Sequence[Sample],
    *,
    max_pack_tokens: int = 40,
    checkpointing: bool = False,
    reference: PreTrainedModel | None = None,
) -> tuple[float, dict[str, Tensor]]:
    tokens = trained_tokens(samples)
    model.zero_grad()
    reference_K = None
    if reference:
        plan = plan_batch(samples, tokens, max_pack_tokens)
        reference_K = batch_logprobs(Policy(reference), plan, len(tokens), CPU)
    policy, batch = (
        Policy(model, activation_checkpointing=checkpointing),
        Batch(samples, anchors=Anchors(reference_K=reference_K)),
    )
    computed = gradients_of(policy, batch, algorithm, max_pack_tokens)
    return computed.loss, gradients(model)


def assert_same(one: tuple[float, dict[str, Tensor]], other: tuple[float, dict[str, Tensor]]) -> None:
    assert one[0] == pytest.approx(other[0], abs=1e-10)
    assert one[1].keys() == other[1].keys()
    for name, gradient in one[1].items():
        assert torch.allclose(gradient, other[1][name], atol=1e-10, rtol=1e-8), name


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("max_pack_tokens", [1, 25, 10_000])
def test_sharing_and_packing_change_neither_loss_nor_gradients(seed: int, max_pack_tokens: int) -> None:
    samples = agent_samples(seed)
    model = tiny_llama(seed)
    expected = plain_gradients(model, PpoClip(), samples)
    assert_same(shared_gradients(model, PpoClip(), samples, max_pack_tokens=max_pack_tokens), expected)


@pytest.mark.parametrize(
    "algorithm",
    [
        PpoClip(weighting="token_mean", correction=DecoupledCorrection()),
        PpoClip(weighting="rollout_sum_const", sum_constant=16),
        Gspo(),
        Gspo(weighting="rollout_mean", clip_low=0.2, clip_high=0.2),
        Cispo(weighting="prompt_mean"),
    ],
)
def test_every_algorithm_is_computed_alike(algorithm: Algorithm) -> None:
    samples = agent_samples(11)
    model = tiny_qwen()
    assert_same(shared_gradients(model, algorithm, samples), plain_gradients(model, algorithm, samples))


@pytest.mark.parametrize("kind", [PpoClip, Gspo, Cispo, Sapo, DppoTv, ImportanceSampling, Reinforce])
def test_an_entropy_bonus_is_computed_over_the_same_trees(kind: type[Algorithm]) -> None:
    algorithm, samples, model = kind(entropy_coefficient=0.3), agent_samples(5), tiny_llama()
    # A row without an advantage has a gradient, too.
    samples[1].advantages[:] = 0
    found = shared_gradients(model, algorithm, samples)
    assert_same(found, plain_gradients(model, algorithm, samples))
    without = plain_gradients(model, kind(), samples)
    tokens = trained_tokens(samples)
    weights_K = torch.from_numpy(weights_of(tokens, algorithm.weighting, None))
    entropies_K = torch.cat([plain_outputs(model, row)[1] for row in samples]).detach()
    assert found[0] == pytest.approx(without[0] - 0.3 * float((weights_K * entropies_K).sum()), abs=1e-10)


def test_checkpointing_changes_nothing() -> None:
    samples = agent_samples(3)
    model = tiny_llama()
    expected = plain_gradients(model, PpoClip(), samples)
    assert_same(shared_gradients(model, PpoClip(), samples, checkpointing=True), expected)


def test_kl_to_the_reference_is_computed_over_the_same_trees() -> None:
    samples = agent_samples(4)
    model, reference = tiny_llama(0), tiny_llama(1)
    algorithm = PpoClip(kl_coefficient=0.1)
    expected = plain_gradients(model, algorithm, samples, reference)
    assert_same(shared_gradients(model, algorithm, samples, reference=reference), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_frozen_layers_get_no_gradient_and_the_others_the_same(tied: bool) -> None:
    samples = agent_samples(5)
    model = tiny_llama(tied=tied)
    freeze(model, ["model.embed_tokens.*", "model.layers.0.*", "model.layers.1.*"])
    expected = plain_gradients(model, PpoClip(), samples)
    assert not any(name.startswith(("model.embed", "model.layers.0", "model.layers.1")) for name in expected[1])
    assert_same(shared_gradients(model, PpoClip(), samples), expected)


def test_frozen_low_layers_build_no_graph() -> None:
    model = tiny_llama()
    freeze(model, ["model.embed_tokens.*", "model.layers.0.*", "model.layers.1.*"])
    samples = agent_samples(5)
    (first, *_) = plan_batch(samples, trained_tokens(samples), 40).forest.prefixes
    prefix = Policy(model).prefix(first, [])
    assert [keys.requires_grad for keys, _ in prefix.leaves.values()] == [False, False, True]


def test_rows_without_advantage_do_not_change_the_result() -> None:
    samples = agent_samples(6)
    samples += [sample("run.9.0", [1, 2, 3, 4], [0, 0, 1, 1], advantage=0.0)]
    model = tiny_llama()
    tokens = trained_tokens(samples)
    plan = plan_batch(samples, tokens, 1000, every_row=False)
    assert len(samples) - 1 not in {int(tokens.rows_K[k]) for of_pack, _ in plan.reads for k in of_pack}
    expected = plain_gradients(model, PpoClip(), samples)
    assert_same(shared_gradients(model, PpoClip(), samples), expected)


def test_a_batch_without_advantage_has_no_gradient() -> None:
    model = tiny_llama()
    loss, found = shared_gradients(model, PpoClip(), [sample("run.0.0", [1, 2, 3], [0, 1, 1], advantage=0.0)])
    assert (loss, found) == (0.0, {})


def test_siblings_that_share_a_prefix_with_opposite_advantages_both_count() -> None:
    samples = [
        sample("run.0.0", [1, 2, 3, 4, 5], [0, 0, 1, 1, 0], advantage=1.0, temperature=0.5),
        sample("run.0.1", [1, 2, 3, 4, 6], [0, 0, 1, 1, 1], advantage=-0.5, temperature=1.5),
    ]
    model = tiny_llama()
    assert plan_batch(samples, trained_tokens(samples), 100).forest.computed_tokens == 4
    assert_same(shared_gradients(model, PpoClip(), samples), plain_gradients(model, PpoClip(), samples))


def test_logprobs_in_float32_equal_a_plain_forward() -> None:
    samples = agent_samples(7)
    tokens = trained_tokens(samples)
    model = tiny_llama(dtype=torch.float32)
    plan = plan_batch(samples, tokens, 30)
    shared_K = batch_logprobs(Policy(model), plan, len(tokens), CPU)
    with torch.no_grad():
        plain_K = torch.cat([plain_logprobs(model, row) for row in samples])
    assert np.abs(shared_K - plain_K.numpy()).max() < 1e-5


def test_tokens_sampled_within_the_prefix_are_read_from_it() -> None:
    samples = [
        sample("run.0.0:0", [1, 2, 3, 4, 5, 6], [0, 1, 1, 0, 1, 1], advantage=1.0),
        sample("run.0.0:1", [1, 2, 3, 4, 7, 8, 9], [0, 0, 0, 0, 1, 1, 1], advantage=0.5),
        sample("run.0.1:0", [1, 2, 3, 4, 7, 9, 9], [0, 1, 1, 0, 1, 1, 1], advantage=-1.0, temperature=0.7),
    ]
    model = tiny_llama()
    for algorithm in (PpoClip(), Gspo()):
        plan = plan_batch(samples, trained_tokens(samples), 2)
        assert [prefix.token_ids_M.tolist() for prefix in plan.forest.prefixes] == [[1, 2, 3, 4], [7]]
        expected = plain_gradients(model, algorithm, samples)
        assert_same(shared_gradients(model, algorithm, samples, max_pack_tokens=2), expected)
