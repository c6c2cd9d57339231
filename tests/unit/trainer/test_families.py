"""Each model family that docs/gpu.md names: trained over trees, exported, and loaded by transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from leyden.libs.contracts.config import PpoClip, RunConfig
from leyden.services.trainer.rows import tree
from leyden.services.trainer.rows.batch import trained_tokens
from leyden.services.trainer.state.assembly import assemble_learner, make_accelerator
from leyden.services.trainer.state.versions import export_version
from leyden.services.trainer.step.gradients import batch_logprobs, plan_batch
from leyden.services.trainer.step.step import optimizer_step
from tests.support.builders import run_document
from tests.unit.trainer.cases import VOCABULARY, agent_samples, in_full_precision
from tests.unit.trainer.test_compute import assert_same, plain_gradients, plain_logprobs, shared_gradients

ALTERNATING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 with windows": ("qwen2", {"use_sliding_window": True, **ALTERNATING}),
    "qwen3": ("qwen3", {"tie_word_embeddings": False}),
    "llama 3": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral with windows": ("mistral", {"sliding_window": 6}),
    "gemma 3": ("gemma3_text", ALTERNATING),
    "smollm2": ("llama", {"tie_word_embeddings": True, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "gpt-oss": (
        "gpt_oss",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "swiglu_limit": 1.0, **ALTERNATING},
    ),
    "qwen3 moe": ("qwen3_moe", {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "qwen3 moe, some layers dense": (
        "qwen3_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "mlp_only_layers": [0],
            "norm_topk_prob": True,
        },
    ),
}
CPU = make_accelerator("cpu", "float32")
CONFIG = RunConfig.model_validate(
    run_document(optimizer={"learning_rate": 1e-2}, training={"micro_batch_tokens": 40}, algorithm={"type": "ppo_clip"})
)


def tiny(name: str) -> PreTrainedModel:
    family, changes = FAMILIES[name]
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3, "max_position_embeddings": 256,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **{**sizes, **changes}), experts_implementation="eager"
    )
    for name, parameter in model.named_parameters():
        # transformers begins with zeros.
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture(autouse=True)
def short_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "LEAST_PREFIX", 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_over_trees_are_those_of_separate_rows(name: str) -> None:
    samples = agent_samples(2)
    model = in_full_precision(tiny(name).double())
    expected = plain_gradients(model, PpoClip(), samples)
    assert len(expected[1]) == len(list(model.parameters()))
    assert_same(shared_gradients(model, PpoClip(), samples), expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_exported_version_computes_what_the_trainer_does(name: str, tmp_path: Path) -> None:
    tiny(name).save_pretrained(tmp_path / "base")
    learner = assemble_learner(tmp_path / "base", CONFIG, CPU)
    optimizer_step(learner, agent_samples(0), CONFIG)
    export = export_version(learner, tmp_path / "base", tmp_path / "1")
    samples = agent_samples(1)
    tokens = trained_tokens(samples)
    own_K = batch_logprobs(learner.policy, plan_batch(samples, tokens, 40), len(tokens), CPU)
    with torch.no_grad():
        base, loaded = (
            np.concatenate([plain_logprobs(model, row) for row in samples])
            for model in (
                AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
                for folder in (tmp_path / "base", export.path)
            )
        )
    assert np.abs(own_K - loaded).max() < 2e-5
    assert np.abs(own_K - base).max() > 1e-2
