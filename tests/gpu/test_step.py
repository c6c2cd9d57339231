"""The trainer on a CUDA device beside the trainer on a CPU: gradients, steps, versions and checkpoints.

`make test` skips these where there is no such device; `make test-gpu` runs them alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from leyden.libs.contracts.config import PpoClip, RunConfig
from leyden.services.trainer.model.forward import Policy
from leyden.services.trainer.ranks.messages import Load
from leyden.services.trainer.rows import tree
from leyden.services.trainer.rows.batch import Sample
from leyden.services.trainer.rows.progress import Progress
from leyden.services.trainer.state.assembly import assemble_learner, make_accelerator
from leyden.services.trainer.state.checkpoints import checkpoint_state
from leyden.services.trainer.state.resume import restore_learner
from leyden.services.trainer.state.saving import save_checkpoint
from leyden.services.trainer.state.versions import export_version
from leyden.services.trainer.step.batch import Batch
from leyden.services.trainer.step.gradients import accumulate_gradients
from leyden.services.trainer.step.learner import Learner
from leyden.services.trainer.step.optimizers import make_optimizer
from leyden.services.trainer.step.step import optimizer_step
from tests.unit.trainer.cases import VOCABULARY, agent_samples, one_call, sample

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCABULARY, "max_position_embeddings": 512,
    "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 12},
    "gemma3_text": {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 12},
}
DOCUMENT: dict[str, Any] = {
    "name": "n",
    "dataset": "d",
    "agent": {"command": ["x"]},
    "optimizer": {"learning_rate": 1e-3},
    "training": {"precision": "float32", "micro_batch_tokens": 128},
}
VALUES = {"credit": {"baseline": {"type": "value"}}}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointing": {"training": {"activation_checkpointing": True}},
    "compiled": {"training": {"compile": True}},
    "lora": {"training": {"lora": {"rank": 4, "alpha": 8}}},
    "shared critic": {"algorithm": {"type": "ppo_clip", "critic": {"trunk": "shared"}}, **VALUES},
    "own critic": {"algorithm": {"type": "ppo_clip", "critic": {"trunk": "own"}}, **VALUES},
    "reference": {"algorithm": {"type": "ppo_clip", "kl_coefficient": 0.1}},
    "entropies": {"algorithm": {"type": "ppo_clip", "entropy_coefficient": 0.1}},
    "mini-batches": {"algorithm": {"type": "gspo", "mini_batches": 2, "clip_low": 0.2, "clip_high": 0.2}},
    "moments in bfloat16": {"optimizer": {"moments": "bfloat16"}},
    "moments in 8 bits": {"optimizer": {"moments": "8bit"}},
    "offload": {"optimizer": {"offload": True}},
}


def accelerator_on(device: str, precision: str = "float32") -> Accelerator:
    """The process's only accelerator: accelerate knows one device and one precision at a time."""
    AcceleratorState._reset_state(reset_partial_state=True)
    found = make_accelerator(device, precision)
    assert found.device.type == ("cpu" if device == "cpu" else "cuda")
    return found


@pytest.fixture(autouse=True)
def short_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "LEAST_PREFIX", 1)


def model_of(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | FAMILIES[family])
    found: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return found.float().eval()


def config_of(variant: str) -> RunConfig:
    document = {name: part.copy() if isinstance(part, dict) else part for name, part in DOCUMENT.items()}
    for name, part in VARIANTS[variant].items():
        document[name] = document.get(name, {}) | part
    return RunConfig.model_validate(document)


def samples_of(seed: int, **sizes: int) -> list[Sample]:
    """Each row is one call with a reward, for the critics."""
    return [one_call(row, reward=number % 2) for number, row in enumerate(agent_samples(seed, **sizes))]


def gradients_of(
    model: PreTrainedModel, accelerator: Accelerator, kernel: Any, samples: Sequence[Sample] | None = None
) -> dict[str, Tensor]:
    config = config_of("plain").model_copy(update={"algorithm": PpoClip()})
    policy = Policy(model.to(accelerator.device), kernel=kernel)
    learner = Learner(policy, make_optimizer(policy, config.optimizer), accelerator)
    accumulate_gradients(learner, Batch(samples or samples_of(3)), config)
    return {name: one.grad.cpu() for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("kernel", ["flex", "dense"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_a_cpu(family: str, kernel: str) -> None:
    expected = gradients_of(model_of(family), accelerator_on("cpu"), "dense")
    found = gradients_of(model_of(family), accelerator_on("auto"), kernel)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()), msg=name)


def test_packs_that_are_shorter_than_a_block_compile() -> None:
    rows = [sample(f"run.0.{number}", [*range(30), number, *range(60)], [0] * 30 + [1] * 61) for number in range(2)]
    expected = gradients_of(model_of("qwen3"), accelerator_on("cpu"), "dense", rows)
    found = gradients_of(model_of("qwen3"), accelerator_on("auto"), "flex", rows)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()), msg=name)


def steps(folder: Path, config: RunConfig, accelerator: Accelerator) -> tuple[list[dict[str, Any]], Tensor]:
    """Metrics of two steps, and by how much they changed the trained weights."""
    learner = assemble_learner(folder, config, accelerator)
    before = {name: one.detach().cpu().clone() for name, one in learner.model.named_parameters()}
    metrics = [dict(optimizer_step(learner, samples_of(seed), config)) for seed in range(2)]
    after = {name: one.detach().cpu() for name, one in learner.model.named_parameters()}
    return metrics, torch.cat([(after[name] - before[name]).flatten().double() for name in before])


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_steps_change_the_weights_as_on_a_cpu(variant: str, tmp_path: Path) -> None:
    model_of("qwen3").save_pretrained(tmp_path)
    config = config_of(variant)
    expected, change = steps(tmp_path, config, accelerator_on("cpu"))
    found, on_device = steps(tmp_path, config, accelerator_on("auto"))
    for one, other in zip(found, expected, strict=True):
        for name in ("loss", "gradient_norm", "kl_to_generator", "value_loss", "entropy"):
            if isinstance(other.get(name), float):
                assert one[name] == pytest.approx(other[name], rel=1e-2, abs=1e-5), name
    cosine = torch.nn.functional.cosine_similarity(change, on_device, dim=0)
    assert cosine > (0.98 if "8 bits" in variant else 0.999), float(cosine)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gpt_oss"])
def test_by_default_a_step_is_near_that_of_float32(family: str, tmp_path: Path) -> None:
    model_of(family).save_pretrained(tmp_path)
    narrow = config_of("plain")
    narrow = narrow.model_copy(update={"training": narrow.training.model_copy(update={"precision": None})})
    _, change = steps(tmp_path, config_of("plain"), accelerator_on("cpu"))
    metrics, on_device = steps(tmp_path, narrow, accelerator_on("auto", "bfloat16"))
    assert metrics[0]["gradient_norm"] > 0
    cosine = torch.nn.functional.cosine_similarity(change, on_device, dim=0)
    assert cosine > 0.8, float(cosine)


@pytest.mark.parametrize("variant", ["plain", "lora", "own critic", "moments in 8 bits", "offload"])
def test_a_checkpoint_restores_weights_and_moments_bit_for_bit(variant: str, tmp_path: Path) -> None:
    model_of("qwen3").save_pretrained(tmp_path / "base")
    config, accelerator = config_of(variant), accelerator_on("auto")
    learner = assemble_learner(tmp_path / "base", config, accelerator)
    optimizer_step(learner, samples_of(0), config)
    export = export_version(learner, tmp_path / "base", tmp_path / "1")
    progress = Progress("run-a", 1, export.content_sha256)
    state = checkpoint_state(learner)
    save_checkpoint(state, progress, tmp_path / "c")
    restored = restore_learner(Load(tmp_path / "base", config, (export.path, tmp_path / "c", progress)), accelerator)
    again = checkpoint_state(restored)
    assert again.keys() == state.keys()
    assert [name for name in state if not torch.equal(again[name].cpu(), state[name].cpu())] == []
    weights = zip(learner.policy.state_dict().items(), restored.policy.state_dict().values(), strict=True)
    assert [name for (name, one), other in weights if not torch.equal(one, other)] == []
    optimizer_step(restored, samples_of(1), config)


def test_running_out_of_memory_names_settings(tmp_path: Path) -> None:
    model_of("qwen3").save_pretrained(tmp_path)
    config, accelerator = config_of("plain"), accelerator_on("auto")
    learner = assemble_learner(tmp_path, config, accelerator)
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 1) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="micro_batch_tokens"):
            optimizer_step(learner, samples_of(0, groups=40, siblings=8, turns=20), config)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
