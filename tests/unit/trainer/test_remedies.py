"""Errors for want of memory: which settings they name, in steps and where a learner is loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch

from leyden.libs.contracts.config import RunConfig
from leyden.services.trainer.model.forward import Policy
from leyden.services.trainer.model.remedies import HostOutOfMemory, naming_settings
from leyden.services.trainer.model.weight_files import WeightFiles
from leyden.services.trainer.ranks.collectives import ALONE
from leyden.services.trainer.ranks.messages import Load
from leyden.services.trainer.rows.progress import Progress
from leyden.services.trainer.state import reading
from leyden.services.trainer.state.assembly import assemble_learner, make_accelerator
from leyden.services.trainer.state.checkpoints import checkpoint_state
from leyden.services.trainer.state.resume import restore_learner
from leyden.services.trainer.state.saving import save_checkpoint
from leyden.services.trainer.state.versions import describe
from leyden.services.trainer.step.step import optimizer_step
from tests.support.builders import run_document
from tests.unit.trainer.cases import agent_samples

CPU = make_accelerator("cpu", "float32")
OWN_CRITIC = {"algorithm": {"type": "ppo_clip", "critic": {"trunk": "own"}}, "credit": {"baseline": {"type": "value"}}}


def run_config(**changes: object) -> RunConfig:
    return RunConfig.model_validate(run_document(**changes))


def exhaust(*_: Any, **__: Any) -> torch.Tensor:
    return torch.empty(2**50, dtype=torch.uint8)


def test_an_accelerators_error_names_the_settings_that_are_not_set_yet() -> None:
    saving = {"micro_batch_tokens": 512, "activation_checkpointing": True}
    config = run_config(training=saving, optimizer={"moments": "8bit"}, **OWN_CRITIC)
    with pytest.raises(torch.OutOfMemoryError) as raised, naming_settings(config, "the step"):
        raise torch.OutOfMemoryError("Tried to allocate 3 GiB\nframe #0")
    assert str(raised.value) == (
        "the step needs too much memory: lower training.micro_batch_tokens (512), or set optimizer.offload,"
        " or train adapters with training.lora, or write algorithm.critic.trunk shared, or divide the model among more"
        " GPUs (trainer.gpusPerNode, or torchrun in CONTROLLER_TRAINER_COMMAND), or choose a smaller model;"
        " Tried to allocate 3 GiB"
    )


def test_a_learner_that_does_not_fit_names_the_settings_of_its_models() -> None:
    config = run_config(algorithm={"type": "ppo_clip", "kl_coefficient": 0.1})
    with pytest.raises(torch.OutOfMemoryError) as raised, naming_settings(config, "the learner"):
        raise torch.OutOfMemoryError("Tried to allocate 3 GiB")
    assert str(raised.value) == (
        "the learner needs too much memory: train adapters with training.lora, or write algorithm.kl_coefficient 0,"
        " or divide the model among more GPUs (trainer.gpusPerNode, or torchrun in CONTROLLER_TRAINER_COMMAND),"
        " or choose a smaller model; Tried to allocate 3 GiB"
    )


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_other_errors_stay_as_they_are(error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^broken$"), naming_settings(run_config(), "the step"):
        raise error("broken")


def test_every_rank_names_the_settings_where_a_step_exhausts_the_host(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = assemble_learner(tiny_model, run_config(), CPU)
    monkeypatch.setattr(Policy, "forward", exhaust)
    with pytest.raises(HostOutOfMemory, match=r"the step .* training.micro_batch_tokens \(4096\).*machine") as raised:
        optimizer_step(subject, agent_samples(0), run_config())
    assert "can't allocate memory: you tried to allocate 1125899906842624 bytes" in str(raised.value)
    assert "offload" not in str(raised.value)


def test_numpys_error_is_one_for_want_of_memory_too() -> None:
    with pytest.raises(HostOutOfMemory, match=r"micro_batch_tokens.*Unable"), naming_settings(run_config(), "the step"):
        raise MemoryError("Unable to allocate 1 PiB")


def test_a_model_that_cannot_be_loaded_names_the_settings(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeightFiles, "rows", exhaust)
    with pytest.raises(HostOutOfMemory, match=r"the learner .* training.lora.*smaller model.*can't allocate"):
        restore_learner(Load(tiny_model, run_config()), CPU, ALONE)


def test_a_checkpoint_for_which_there_is_no_memory_is_not_damaged(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = Progress("run-a", 1, describe(tiny_model).content_sha256)
    state = checkpoint_state(assemble_learner(tiny_model, run_config(), CPU))
    save_checkpoint(state, progress, tmp_path / "checkpoint")
    monkeypatch.setattr(reading, "read_shards", exhaust)
    load = Load(tiny_model, run_config(), (tiny_model, tmp_path / "checkpoint", progress))
    with pytest.raises(HostOutOfMemory, match=r"the learner .* training.lora"):
        restore_learner(load, CPU, ALONE)
