"""Optimisers that need less memory of the device."""

from pathlib import Path
from typing import Any

import pytest
import torch

from leyden.libs.contracts.config import Optimizer, RunConfig
from leyden.services.trainer.checkpoint import Progress, optimizer_state, save_checkpoint
from leyden.services.trainer.learner import (
    export_learner,
    make_accelerator,
    model_of,
    resume_learner,
    start_learner,
)
from leyden.services.trainer.step import Learner, optimizer_step
from tests.builders import run_document
from tests.unit.trainer.cases import agent_samples

COMPACT = {"offload": True, "moments": "bfloat16"}
CPU = make_accelerator("cpu", "float32")


def config_of(**optimizer: Any) -> RunConfig:
    document = run_document(optimizer={"learning_rate": 1e-3, **optimizer}, algorithm={"type": "ppo_clip"})
    return RunConfig.model_validate(document)


def trained(model: Path, config: RunConfig, steps: int) -> Learner:
    learner = start_learner(model, config, CPU)
    for seed in range(steps):
        optimizer_step(learner, agent_samples(seed), config)
    return learner


def resumed(learner: Learner, model: Path, folder: Path, config: RunConfig) -> Learner:
    export = export_learner(learner, model, folder / "1")
    progress = Progress("run-a", 1, export.content_sha256)
    save_checkpoint(optimizer_state(learner.optimizer), progress, folder / "checkpoint")
    return resume_learner(model, export.path, folder / "checkpoint", progress, config, CPU)


def difference(one: Learner, other: Learner) -> float:
    found, wanted = model_of(one).state_dict(), model_of(other).state_dict()
    return max(float((found[name] - weight).abs().max()) for name, weight in wanted.items())


@pytest.mark.parametrize(
    ("optimizer", "most"), [({"offload": True}, 0.0), ({"moments": "bfloat16"}, 1e-4), (COMPACT, 1e-4)]
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
    assert difference(learner, start_learner(tiny_model, plain, CPU)) > 1e-3


@pytest.mark.parametrize(("before", "after"), [({}, COMPACT), (COMPACT, {})])
def test_a_run_continues_with_the_other_optimiser(
    tiny_model: Path, tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    learner = trained(tiny_model, config_of(**before), 1)
    again = resumed(learner, tiny_model, tmp_path, config_of(**after))
    for one, changes in ((learner, before), (again, after)):
        optimizer_step(one, agent_samples(1), config_of(**changes))
    assert difference(learner, again) <= 1e-4


def test_moments_in_bfloat16_take_half_the_space(tiny_model: Path) -> None:
    learner = trained(tiny_model, config_of(**COMPACT), 1)
    names = {name for name, tensor in optimizer_state(learner.optimizer).items() if tensor.dtype == torch.bfloat16}
    assert len(names) == 2 * len(list(learner.policy.model.parameters()))


@pytest.mark.parametrize("betas", [{"beta1": 0.999}, {"beta2": 0.999}])
def test_bfloat16_moments_with_a_long_memory_are_refused(betas: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"a beta1 of at most 0\.95 and a beta2 of at most 0\.99"):
        Optimizer.model_validate({"moments": "bfloat16", **betas})
