"""LoRA: adapters train, the base model stays, and engines get merged weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from leyden.libs.contracts.config import Lora, PpoClip, RunConfig
from leyden.libs.contracts.weights import weights_sha256
from leyden.services.trainer.model.forward import Policy
from leyden.services.trainer.model.load import read_model
from leyden.services.trainer.model.lora import adapter_state, add_adapters
from leyden.services.trainer.ranks.messages import Load
from leyden.services.trainer.rows import tree
from leyden.services.trainer.rows.batch import trained_tokens
from leyden.services.trainer.rows.progress import Progress
from leyden.services.trainer.state.assembly import assemble_learner, make_accelerator
from leyden.services.trainer.state.checkpoints import checkpoint_state
from leyden.services.trainer.state.folders import CheckpointDamaged
from leyden.services.trainer.state.resume import restore_learner
from leyden.services.trainer.state.saving import save_checkpoint
from leyden.services.trainer.state.versions import Export, adopt_weights, export_version
from leyden.services.trainer.step.gradients import batch_logprobs, plan_batch
from leyden.services.trainer.step.learner import Learner
from leyden.services.trainer.step.step import optimizer_step
from tests.unit.trainer.cases import agent_samples, tiny_llama
from tests.unit.trainer.test_compute import assert_same, plain_gradients, shared_gradients

CPU = make_accelerator("cpu", "float32")
IDS = torch.arange(3, 20)[None]


@pytest.fixture(autouse=True)
def short_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "LEAST_PREFIX", 1)


def run_config(lora: dict[str, Any] | None = None, *, kl_coefficient: float = 0.0, **training: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "n",
            "dataset": "d",
            "agent": {"command": ["x"]},
            "optimizer": {"learning_rate": 1e-2},
            "algorithm": {"type": "ppo_clip", "kl_coefficient": kl_coefficient},
            "training": {"lora": {"rank": 4, "alpha": 8.0, **(lora or {})}, "micro_batch_tokens": 40, **training},
        }
    )


def trained(model: Path, config: RunConfig, steps: int = 2) -> Learner:
    learner = assemble_learner(model, config, CPU)
    for seed in range(steps):
        optimizer_step(learner, agent_samples(seed), config)
    return learner


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS).logits
    return found


def exported(learner: Learner, base: Path, folder: Path) -> Export:
    return export_version(learner, base, folder)


def test_adapters_train_and_the_base_model_stays(tiny_model: Path, tmp_path: Path) -> None:
    before = read_model(tiny_model).state_dict()
    learner = trained(tiny_model, run_config())
    after = learner.model.state_dict()
    for name, weight in before.items():
        found = after[name] if name in after else after[name.replace(".weight", ".base_layer.weight")]
        assert torch.equal(found, weight), name
    assert all(tensor.abs().max() > 0 for tensor in adapter_state(learner.model.state_dict()).values())
    moments = {key for key in checkpoint_state(learner) if key.endswith("exp_avg")}
    assert len(moments) == len(adapter_state(learner.model.state_dict()))


# peft reads a property that transformers has renamed.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_the_merged_export_computes_what_the_adapters_do(tiny_model: Path, tmp_path: Path) -> None:
    learner = trained(tiny_model, run_config())
    export = exported(learner, tiny_model, tmp_path / "2")
    wanted = logits(learner.model)
    assert not torch.allclose(wanted, logits(read_model(tiny_model)), atol=1e-3)
    assert torch.allclose(logits(read_model(export.path)), wanted, atol=1e-5)
    assert {name: tensor.shape for name, tensor in load_file(export.path / "model.safetensors").items()} == {
        name: tensor.shape for name, tensor in load_file(tiny_model / "model.safetensors").items()
    }
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    assert torch.allclose(logits(PeftModel.from_pretrained(base, export.path / "adapter")), wanted, atol=1e-5)


def test_the_reference_is_the_base_model(tiny_model: Path) -> None:
    config = run_config(kl_coefficient=0.1)
    learner = trained(tiny_model, config)
    assert learner.reference is not None
    assert learner.model is learner.reference.policy.model
    samples = agent_samples(5)
    plan = plan_batch(samples, trained_tokens(samples), 40)
    size = len(trained_tokens(samples))
    base = batch_logprobs(Policy(read_model(tiny_model)), plan, size, CPU)
    assert np.allclose(batch_logprobs(learner.reference.policy, plan, size, CPU), base, atol=1e-5)
    assert not np.allclose(batch_logprobs(learner.policy, plan, size, CPU), base, atol=1e-2)
    assert optimizer_step(learner, samples, config)["kl_reference"] > 0


def test_token_trees_give_adapters_the_gradients_of_separate_rows() -> None:
    model = tiny_llama()
    add_adapters(model, Lora(rank=4), ["model.layers.0.*"], Path("base"))
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    samples = agent_samples(2)
    wanted = plain_gradients(model, PpoClip(), samples)
    assert len(wanted[1]) == 2 * 2 * 7
    assert_same(shared_gradients(model, PpoClip(), samples), wanted)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_resumed_run_continues_bit_for_bit(tiny_model: Path, tmp_path: Path, checkpointing: bool) -> None:
    config = run_config(activation_checkpointing=checkpointing)
    straight = trained(tiny_model, config, steps=1)
    export = exported(straight, tiny_model, tmp_path / "1")
    progress = Progress("run-a", 1, export.content_sha256)
    save_checkpoint(checkpoint_state(straight), progress, tmp_path / "checkpoint")
    expected = optimizer_step(straight, agent_samples(1), config)["loss"]
    resumed = restore_learner(Load(tiny_model, config, (export.path, tmp_path / "checkpoint", progress)), CPU)
    assert optimizer_step(resumed, agent_samples(1), config)["loss"] == expected
    own, other = (adapter_state(learner.model.state_dict()) for learner in (straight, resumed))
    assert all(torch.equal(own[name], other[name]) for name in own)
    assert exported(resumed, tiny_model, tmp_path / "2").content_sha256 == weights_sha256(
        exported(straight, tiny_model, tmp_path / "3").path
    )


def test_a_damaged_or_other_adapter_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    config = run_config()
    learner = trained(tiny_model, config, steps=1)
    export = exported(learner, tiny_model, tmp_path / "1")
    progress = Progress("run-a", 1, export.content_sha256)
    save_checkpoint(checkpoint_state(learner), progress, tmp_path / "checkpoint")
    with pytest.raises(CheckpointDamaged, match="other layers"):
        restore_learner(
            Load(
                tiny_model, run_config({"target_modules": ["q_proj"]}), (export.path, tmp_path / "checkpoint", progress)
            ),
            CPU,
        )
    with (export.path / "adapter" / "adapter_model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    with pytest.raises(CheckpointDamaged, match="not what the store recorded"):
        restore_learner(Load(tiny_model, config, (export.path, tmp_path / "checkpoint", progress)), CPU)


def test_a_learner_adopts_a_versions_adapter(tiny_model: Path, tmp_path: Path) -> None:
    learner = trained(tiny_model, run_config())
    export = exported(learner, tiny_model, tmp_path / "2")
    other = assemble_learner(tiny_model, run_config(), CPU)
    assert adopt_weights(other, export.path) > 0
    assert torch.equal(logits(other.model), logits(learner.model))
    assert adopt_weights(other, export.path) == 0


def test_chosen_layers_alone_get_adapters(tiny_model: Path) -> None:
    config = run_config({"target_modules": ["q_proj", "v_proj"]}, frozen=["model.layers.0.*"])
    names = set(adapter_state(assemble_learner(tiny_model, config, CPU).model.state_dict()))
    assert names
    assert {name.split(".layers.")[1].split(".")[2] for name in names} == {"q_proj", "v_proj"}
    assert not any(".layers.0." in name for name in names)


@pytest.mark.parametrize(
    ("lora", "frozen", "message"),
    [
        ({"target_modules": ["lm_head"]}, [], "no linear layers of the decoder"),
        ({"target_modules": ["q_proj"]}, ["*.q_proj.weight"], "matches every layer of training.lora"),
        ({}, ["nothing.*"], "matches no parameter"),
    ],
)
def test_layers_that_cannot_be_trained_are_refused(
    tiny_model: Path, lora: dict[str, Any], frozen: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        assemble_learner(tiny_model, run_config(lora, frozen=frozen), CPU)


def rounded_model(model: Path, folder: Path) -> Path:
    """A copy whose weights are numbers of bfloat16, as those that are published."""
    found = read_model(model)
    for parameter in found.parameters():
        parameter.data = parameter.data.bfloat16().float()
    found.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_base_model_held_in_bfloat16_trains_the_same_adapters(
    tiny_model: Path, tmp_path: Path, precision: str
) -> None:
    base = rounded_model(tiny_model, tmp_path / "base")
    wide, held = (
        trained(base, run_config({"base_dtype": dtype}, precision=precision)) for dtype in ("float32", "bfloat16")
    )
    types = {name: tensor.dtype for name, tensor in held.model.named_parameters()}
    assert {dtype for name, dtype in types.items() if ".lora_" in name} == {torch.float32}
    assert {dtype for name, dtype in types.items() if "base_layer.weight" in name} == {torch.bfloat16}
    assert {tensor.dtype for key, tensor in checkpoint_state(held).items() if "exp_avg" in key} == {torch.float32}
    ours, theirs = (adapter_state(learner.model.state_dict()) for learner in (held, wide))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    # The versions have the same bytes: merging adds in float32.
    one, other = exported(held, base, tmp_path / "held"), exported(wide, base, tmp_path / "wide")
    assert one.content_sha256 == other.content_sha256


def test_a_base_model_of_float32_is_rounded_by_at_most_a_digit(tiny_model: Path) -> None:
    wide, held = (trained(tiny_model, run_config({"base_dtype": dtype}), 0) for dtype in ("float32", "bfloat16"))
    for name, weight in wide.model.state_dict().items():
        assert torch.allclose(held.model.state_dict()[name].float(), weight, rtol=2**-8, atol=0), name
    # Half of what implementations in bfloat16 differ by (`training.max_logprob_gap`).
    samples = agent_samples(0)
    tokens = trained_tokens(samples)
    plan = plan_batch(samples, tokens, 40)
    ours, theirs = (batch_logprobs(one.policy, plan, len(tokens), CPU) for one in (held, wide))
    assert 0 < np.abs(ours - theirs).mean() < 0.02


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_the_first_update_reaches_an_engine_by_adapters_and_vanishes_in_a_merge_of_bfloat16(
    tiny_model: Path, tmp_path: Path
) -> None:
    base = rounded_model(tiny_model, tmp_path / "base")
    document = run_config({"base_dtype": "bfloat16"}, export_dtype="bfloat16")
    config = document.model_copy(
        update={"optimizer": document.optimizer.model_copy(update={"learning_rate": 1e-5, "max_grad_norm": 1e9})}
    )
    learner = trained(base, config, steps=1)
    exported(learner, base, tmp_path / "1")
    before, changed = logits(read_model(base)), logits(learner.model)
    # An engine with adapters: the base model in bfloat16, whose numbers these are, and the adapter beside it.
    served = logits(PeftModel.from_pretrained(read_model(base), tmp_path / "1" / "adapter").eval())
    merged = logits(read_model(tmp_path / "1"))
    by_adapters, by_merging = (
        float(torch.cosine_similarity((one - before).flatten(), (changed - before).flatten(), dim=0))
        for one in (served, merged)
    )
    assert by_adapters > 0.99
    assert by_merging < 0.9
