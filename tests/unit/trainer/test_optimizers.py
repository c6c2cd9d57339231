"""Optimisers that need less memory of the device."""

from pathlib import Path
from typing import Any

import pytest
import torch

from leyden.libs.contracts.config import Optimizer, RunConfig
from leyden.services.trainer.ranks.messages import Load
from leyden.services.trainer.rows.progress import Progress
from leyden.services.trainer.state.assembly import assemble_learner, make_accelerator
from leyden.services.trainer.state.checkpoints import checkpoint_state
from leyden.services.trainer.state.resume import restore_learner
from leyden.services.trainer.state.saving import save_checkpoint
from leyden.services.trainer.state.versions import export_version
from leyden.services.trainer.step.learner import Learner
from leyden.services.trainer.step.optimizers import LEAST_VALUES, CompactAdamW, uses_codes
from leyden.services.trainer.step.step import optimizer_step
from tests.support.builders import run_document
from tests.unit.trainer.cases import agent_samples

COMPACT = {"offload": True, "moments": "bfloat16"}
EIGHT = {"moments": "8bit"}
OFFLOADED = {"offload": True, **EIGHT}
CPU = make_accelerator("cpu", "float32")


def config_of(**optimizer: Any) -> RunConfig:
    document = run_document(optimizer={"learning_rate": 1e-3, **optimizer}, algorithm={"type": "ppo_clip"})
    return RunConfig.model_validate(document)


def trained(model: Path, config: RunConfig, steps: int) -> Learner:
    learner = assemble_learner(model, config, CPU)
    for seed in range(steps):
        optimizer_step(learner, agent_samples(seed), config)
    return learner


def resumed(learner: Learner, model: Path, folder: Path, config: RunConfig) -> Learner:
    export = export_version(learner, model, folder / "1")
    progress = Progress("run-a", 1, export.content_sha256)
    save_checkpoint(checkpoint_state(learner), progress, folder / "checkpoint")
    return restore_learner(Load(model, config, (export.path, folder / "checkpoint", progress)), CPU)


def difference(one: Learner, other: Learner) -> float:
    found, wanted = one.model.state_dict(), other.model.state_dict()
    return max(float((found[name] - weight).abs().max()) for name, weight in wanted.items())


@pytest.mark.parametrize(
    ("optimizer", "most"),
    [
        ({"offload": True}, 0.0),
        ({"moments": "bfloat16"}, 1e-4),
        (COMPACT, 1e-4),
        (EIGHT, 2e-4),
        (OFFLOADED, 2e-4),
    ],
)
def test_updates_are_those_of_adamw_after_a_restart_too(
    tiny_model: Path, tmp_path: Path, optimizer: dict[str, Any], most: float
) -> None:
    config, plain = config_of(**optimizer), config_of()
    learner, expected = trained(tiny_model, config, 1), trained(tiny_model, plain, 1)
    assert difference(learner, expected) == 0.0
    again = resumed(learner, tiny_model, tmp_path, config)
    for one, document in ((learner, config), (again, config), (expected, plain)):
        optimizer_step(one, agent_samples(1), document)
    assert difference(learner, again) == 0.0
    assert difference(learner, expected) <= most
    assert difference(learner, assemble_learner(tiny_model, plain, CPU)) > 1e-3


@pytest.mark.parametrize(
    ("before", "after", "most"),
    [({}, COMPACT, 1e-4), (COMPACT, {}, 1e-4), ({}, EIGHT, 2e-4), (OFFLOADED, {}, 2e-4), (COMPACT, EIGHT, 2e-4)],
)
def test_a_run_continues_with_the_other_optimiser(
    tiny_model: Path, tmp_path: Path, before: dict[str, Any], after: dict[str, Any], most: float
) -> None:
    learner = trained(tiny_model, config_of(**before), 1)
    again = resumed(learner, tiny_model, tmp_path, config_of(**after))
    for one, changes in ((learner, before), (again, after)):
        optimizer_step(one, agent_samples(1), config_of(**changes))
    assert difference(learner, again) <= most


def test_moments_in_bfloat16_take_half_the_space(tiny_model: Path) -> None:
    learner = trained(tiny_model, config_of(**COMPACT), 1)
    names = {name for name, tensor in checkpoint_state(learner).items() if tensor.dtype == torch.bfloat16}
    assert len(names) == 2 * len(list(learner.policy.model.parameters()))


def test_moments_in_8_bits_take_a_byte_and_a_scale_for_each_block(tiny_model: Path) -> None:
    learner = trained(tiny_model, config_of(**EIGHT), 1)
    state = checkpoint_state(learner)
    parameters = list(learner.policy.model.parameters())
    for number, parameter in enumerate(parameters):
        moment = state[f"{number}.exp_avg_sq"]
        assert moment.shape == parameter.shape
        if parameter.numel() < LEAST_VALUES:
            assert moment.dtype == torch.float32
        else:
            assert moment.dtype == torch.uint8
            assert state[f"{number}.exp_avg_sq_scales"].numel() == parameter.shape[0]
    assert 0 < sum(parameter.numel() < LEAST_VALUES for parameter in parameters) < len(parameters)


def test_parameters_with_short_rows_retain_float32_moments() -> None:
    shapes = {(64, 64): True, (64, 63): False, (63, 64): False, (8192,): False, (4096, 16): False, (16, 4096): True}
    assert {shape: uses_codes(torch.empty(shape)) for shape in shapes} == shapes


@pytest.mark.parametrize(("beta2", "most"), [(0.95, 0.17), (0.999, 0.21)])
def test_8_bit_updates_under_noise_are_close_to_those_of_float32(beta2: float, most: float) -> None:
    random = torch.Generator().manual_seed(0)
    typical = torch.randn(64, 512, generator=random) * torch.randn(64, 512, generator=random).exp()
    own, expected = (torch.nn.Parameter(torch.zeros(64, 512)) for _ in range(2))
    options: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, beta2), "weight_decay": 0.0, "fused": True}
    eight = CompactAdamW([{"params": [own]}], moments=torch.uint8, offload=False, **options)
    plain = torch.optim.AdamW([expected], **options)
    for _ in range(200):
        gradient = 1e-3 * (typical + 5 * typical.abs() * torch.randn(64, 512, generator=random))
        before = own.detach().clone(), expected.detach().clone()
        for parameter, optimizer in ((own, eight), (expected, plain)):
            parameter.grad = gradient.clone()
            optimizer.step()
    update, wanted = own.detach() - before[0], expected.detach() - before[1]
    assert float((update - wanted).norm() / wanted.norm()) <= most
    assert float((own - expected).detach().norm() / expected.detach().norm()) <= most
    assert float(update.norm() / wanted.norm()) == pytest.approx(1, abs=0.06)


def test_a_small_gradient_that_ends_beside_a_large_one_makes_no_large_update() -> None:
    own = torch.nn.Parameter(torch.zeros(64, 64))
    eight = CompactAdamW([{"params": [own]}], moments=torch.uint8, offload=False, lr=1e-3, weight_decay=0.0)
    for step in range(4):
        # A millionth of the block's largest: the first moment has a code, and the second one is below all of them.
        own.grad = torch.full((64, 64), 1e-4 if step == 0 else 0.0)
        own.grad[:, 0] = 100.0
        before = own.detach().clone()
        eight.step()
        assert float((own.detach() - before).abs().max()) <= 1.01e-3


@pytest.mark.parametrize("betas", [{"beta1": 0.999}, {"beta2": 0.999}])
def test_bfloat16_moments_with_a_long_memory_are_refused(betas: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"a beta1 of at most 0\.95 and a beta2 of at most 0\.99"):
        Optimizer.model_validate({"moments": "bfloat16", **betas})
