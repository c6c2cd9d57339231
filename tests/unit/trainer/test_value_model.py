"""A critic with a model of its own: values, gradients, updates and files, and a policy that it never moves."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from leyden.libs.contracts.config import RunConfig
from leyden.services.trainer.loss.critic import estimate, value_loss
from leyden.services.trainer.model.forward import Policy
from leyden.services.trainer.model.value_model import ValueModel
from leyden.services.trainer.ranks.messages import Load
from leyden.services.trainer.rows import tree
from leyden.services.trainer.rows.batch import Sample, trained_tokens
from leyden.services.trainer.rows.progress import Progress
from leyden.services.trainer.state.assembly import assemble_learner, make_accelerator
from leyden.services.trainer.state.checkpoints import checkpoint_state
from leyden.services.trainer.state.resume import restore_learner
from leyden.services.trainer.state.saving import save_checkpoint
from leyden.services.trainer.state.versions import export_version
from leyden.services.trainer.step.batch import Anchors, Batch
from leyden.services.trainer.step.learner import Learner
from leyden.services.trainer.step.optimizers import make_optimizer
from leyden.services.trainer.step.step import TrainingDiverged, optimizer_step
from tests.support.tiny_model import make_tiny_model
from tests.unit.trainer.cases import gradients_of, tiny_llama, tiny_qwen
from tests.unit.trainer.test_critic import CPU, agent_forest, agent_rows, config, gradients, plain_values


def own(**critic: object) -> RunConfig:
    return config(trunk="own", **critic)


def value_model(
    seed: int = 1, dtype: torch.dtype = torch.float64, *, activation_checkpointing: bool = False
) -> ValueModel:
    found = ValueModel(tiny_qwen(seed, dtype), activation_checkpointing=activation_checkpointing)
    assert found.value_head is not None
    nn.init.normal_(found.value_head.weight, std=0.3)
    return found


def learner_of(document: RunConfig, dtype: torch.dtype = torch.float64) -> Learner:
    policy, values = Policy(tiny_llama(0, dtype)), value_model(dtype=dtype)
    optimizer = make_optimizer(policy, document.optimizer, document.algorithm.critic, values)
    return Learner(policy, optimizer, CPU, value_model=values)


def several_rows() -> list[Sample]:
    ids = [f"run.{group}.{number}" for group in range(4) for number in range(2)]
    return [row for i, one in enumerate(ids) for row in agent_rows(*agent_forest(i, one), one)]


def copied(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def moved(module: nn.Module, before: dict[str, Tensor]) -> set[str]:
    return {name for name, tensor in module.state_dict().items() if not torch.equal(tensor, before[name])}


@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_its_gradients_equal_plain_torch_and_the_policys_are_those_without_a_value_loss(
    monkeypatch: pytest.MonkeyPatch, activation_checkpointing: bool
) -> None:
    monkeypatch.setattr(tree, "LEAST_PREFIX", 1)
    policy, values = Policy(tiny_llama()), value_model(activation_checkpointing=activation_checkpointing)
    algorithm = own(coefficient=0.7, value_clip=0.1).algorithm
    critic, rows = algorithm.critic, several_rows()
    assert critic is not None
    tokens = trained_tokens(rows)
    plain_K = torch.cat([plain_values(values, row) for row in rows])
    old_K = plain_K.detach().numpy() + np.random.default_rng(0).normal(size=len(tokens)) * 0.3
    found = estimate(critic, rows, tokens, old_K)

    def computed(own_model: ValueModel | None) -> float:
        batch = Batch(rows, anchors=Anchors(estimates=found))
        return gradients_of(policy, batch, algorithm, 20, own_model).value_loss

    assert computed(None) == 0.0
    alone = gradients(policy)
    policy.zero_grad()
    loss = computed(values)
    assert all(torch.equal(gradient, alone[name]) for name, gradient in gradients(policy).items())
    tree_gradients = gradients(values)

    values.zero_grad()
    columns = (torch.from_numpy(column) for column in (old_K, found.returns_K, found.weights_K))
    missed = value_loss(plain_K, *columns, critic.value_clip)
    (0.7 * missed).backward()
    assert loss == pytest.approx(missed.item(), abs=1e-10)
    plain = gradients(values)
    assert plain.keys() == tree_gradients.keys() == dict(values.named_parameters()).keys()
    for name, gradient in plain.items():
        assert torch.allclose(tree_gradients[name], gradient, atol=1e-9, rtol=1e-8), name


def test_no_value_loss_moves_the_policy() -> None:
    results = []
    # Values at the start give the advantages; later updates of the step must not see the critic's.
    for critic in ({"coefficient": 1e-3}, {"coefficient": 1e3, "learning_rate": 0.1, "trunk_learning_rate": 0.1}):
        document = own(**critic).model_dump()
        document["algorithm"] |= {"mini_batches": 2, "epochs": 2}
        document = RunConfig.model_validate(document)
        learner = learner_of(document)
        assert learner.value_model is not None
        before = copied(learner.value_model)
        metrics = optimizer_step(learner, several_rows(), document)
        assert moved(learner.value_model, before) == before.keys()
        results.append((copied(learner.policy), copied(learner.value_model), metrics))
    (policy, values, low), (other_policy, other_values, high) = results
    assert all(torch.equal(other_policy[name], weight) for name, weight in policy.items())
    assert {name for name, weight in values.items() if torch.equal(other_values[name], weight)} == {
        "value_head.targets"
    }
    assert high["gradient_norm"] == low["gradient_norm"]
    assert high["loss"] == low["loss"]
    assert high["value_gradient_norm"] > 100 * low["value_gradient_norm"]


def test_warm_up_trains_the_model_of_values_alone() -> None:
    document = own(warmup_steps=1)
    learner, rows = learner_of(document), several_rows()
    assert learner.value_model is not None
    before, values = copied(learner.policy), copied(learner.value_model)
    first = optimizer_step(learner, rows, document)
    assert moved(learner.policy, before) == set()
    assert moved(learner.value_model, values) == values.keys()
    assert first["gradient_norm"] == 0.0
    assert first["entropy"] > 0
    assert optimizer_step(learner, rows, document)["value_loss"] < first["value_loss"]
    assert moved(learner.policy, before) == before.keys()


def test_its_gradient_norm_has_a_bound_of_its_own() -> None:
    document = own(max_grad_norm=0.02, value_clip=None, coefficient=1e3)
    learner = learner_of(document)
    assert learner.value_model is not None
    groups = learner.optimizer.param_groups
    learner.optimizer = torch.optim.SGD([{"params": one["params"], "scale": 1.0} for one in groups], lr=1.0)
    policy, values = copied(learner.policy), copied(learner.value_model)
    metrics = optimizer_step(learner, several_rows(), document)
    assert metrics["value_gradient_norm"] > 1
    # Plain descent at the step's rate, 0.01.
    for module, before, norm in (
        (learner.value_model, values, 0.02),
        (learner.policy, policy, min(1.0, metrics["gradient_norm"])),
    ):
        change = sum(float(((p.detach() - before[name]) ** 2).sum()) for name, p in module.named_parameters()) ** 0.5
        assert change == pytest.approx(0.01 * norm, rel=1e-4)


def test_rates_are_those_of_head_and_model_and_follow_the_schedule() -> None:
    document = own(learning_rate=0.05, trunk_learning_rate=0.02)
    learner = learner_of(document)
    warming = document.model_copy(update={"optimizer": document.optimizer.model_copy(update={"warmup_steps": 2})})
    optimizer_step(learner, several_rows(), warming)
    rates = [group["lr"] for group in learner.optimizer.param_groups]
    assert rates == [0.005, pytest.approx(0.025), pytest.approx(0.01)]


def test_a_value_that_is_not_finite_ends_the_step_with_the_weights_of_before() -> None:
    document = own()
    learner = learner_of(document)
    assert learner.value_model is not None
    assert learner.value_model.value_head is not None
    learner.value_model.value_head.bias.data.fill_(torch.nan)
    before = copied(learner.policy)
    with pytest.raises(TrainingDiverged, match=r"the critic's gradient norm .* or algorithm\.critic\.learning_rate"):
        optimizer_step(learner, several_rows(), document)
    assert moved(learner.policy, before) == set()


@pytest.mark.parametrize("optimizer", [{}, {"moments": "bfloat16", "offload": True}], ids=["plain", "compact"])
@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["weights", "lora"])
def test_it_is_resumed_bit_for_bit_and_never_exported(
    tiny_model: Path, tmp_path: Path, optimizer: dict[str, object], lora: dict[str, int] | None
) -> None:
    make_tiny_model(tmp_path / "other", seed=7)
    document = own(model=str(tmp_path / "other")).model_dump()
    document["optimizer"] |= optimizer
    document["training"]["lora"] = lora
    document = RunConfig.model_validate(document)
    straight = assemble_learner(tiny_model, document, make_accelerator("cpu", "float32"))
    rows = several_rows()
    optimizer_step(straight, rows, document)
    export = export_version(straight, tiny_model, tmp_path / "versions" / "1")
    progress = Progress("run-a", 1, export.content_sha256)
    save_checkpoint(checkpoint_state(straight), progress, tmp_path / "c")
    expected = optimizer_step(straight, rows, document)

    place = make_accelerator("cpu", "float32")
    resumed = restore_learner(Load(tiny_model, document, (export.path, tmp_path / "c", progress)), place)
    assert optimizer_step(resumed, rows, document)["value_loss"] == expected["value_loss"]
    assert straight.value_model is not None
    assert resumed.value_model is not None
    assert moved(resumed.value_model, copied(straight.value_model)) == set()
    assert moved(resumed.policy, copied(straight.policy)) == set()
    assert load_file(export.path / "model.safetensors").keys() == load_file(tiny_model / "model.safetensors").keys()


def test_a_model_with_other_tokens_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "other", vocab_size=500)
    with pytest.raises(ValueError, match=r"algorithm\.critic\.model: the tokens of .* choose a model of the same"):
        assemble_learner(tiny_model, own(model=str(tmp_path / "other")), make_accelerator("cpu", "float32"))
