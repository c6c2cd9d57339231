from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    PreTrainedModel,
)

from leyden.services.trainer.model import families
from leyden.services.trainer.model.families import (
    UnsupportedModel,
    _lowest_layers,
    _ordinary_ids,
    _tree_gap,
    check_arithmetic,
    check_family,
    check_structure,
)
from leyden.services.trainer.model.load import freeze, read_model
from leyden.services.trainer.model.remedies import HOST_OUT_OF_MEMORY
from tests.unit.trainer.cases import tiny_llama

SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
MLA = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "num_key_value_heads": 2, "first_k_dense_replace": 2,
}  # fmt: skip


def tiny(family: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {name: size for name, size in SIZES.items() if (family, name) != ("falcon", "head_dim")}
    config = AutoConfig.for_model(family, **{**sizes, "initializer_range": 0.5, **changes})
    return AutoModelForCausalLM.from_config(config, experts_implementation="eager")


def check(model: PreTrainedModel) -> None:
    check_structure(model)
    check_arithmetic(model.double().eval())


def test_capped_logits_and_untested_windows_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="sliding window"):
        check(Gemma2ForCausalLM(Gemma2Config(**SIZES)))
    full = Gemma2Config(**SIZES, layer_types=["full_attention"] * 2, final_logit_softcapping=0.01)
    with pytest.raises(UnsupportedModel, match="logits differ"):
        check(Gemma2ForCausalLM(full))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("mistral", {"sliding_window": 4}),
        ("phi3", {}),
        ("gemma", {}),
        ("olmo2", {}),
        ("smollm3", {}),
        ("granite", {}),
        ("starcoder2", {}),
        ("gpt_neox", {}),
        ("qwen3_moe", EXPERTS),
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_families_that_trees_compute_right_are_accepted(family: str, changes: dict[str, Any]) -> None:
    check(tiny(family, **changes))


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("nemotron", {}, "nats"),
        ("stablelm", {}, "nats"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic'"),
        ("phi3", {"rope_parameters": LONG_ROPE}, "'longrope'"),
        ("opt", {"ffn_dim": 16, "word_embed_proj_dim": 16}, "cannot compute"),
        ("falcon", {}, "cannot compute"),
        ("biogpt", {}, "cannot compute"),
        ("deepseek_v3", MLA, "cannot compute"),
        ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 8}, "mixture of experts"),
        ("mixtral", {"num_local_experts": 4}, "mixture of experts"),
        ("qwen3_next", {"num_experts": 0, "layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ("qwen3_5_text", {"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ("falcon_h1", {"mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_state": 8}, ""),
    ],
)
def test_families_that_trees_compute_wrong_are_refused_by_name(
    family: str, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedModel, match=f"^{family}: .*{reason}"):
        check(tiny(family, **changes))


def test_a_model_that_amplifies_rounding_is_supported(tmp_path: Path) -> None:
    """As SmolLM2 does for its control tokens: float32 would take the rounding for another computation."""
    model = tiny("llama", vocab_size=64, hidden_size=64)
    with torch.no_grad():
        model.lm_head.weight *= 1e4
        assert _tree_gap(model) > 1e-3
    model.save_pretrained(tmp_path)
    check_family(tmp_path)


def test_want_of_memory_says_nothing_about_a_family(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Any) -> float:
        raise RuntimeError(f"[enforce fail] {HOST_OUT_OF_MEMORY}: you tried to allocate 80000000000 bytes")

    monkeypatch.setattr(families, "_tree_gap", fails)
    with pytest.raises(torch.OutOfMemoryError, match="80000000000"):
        check(tiny("llama"))


def test_the_check_asks_tokens_of_the_middle_of_the_vocabulary() -> None:
    ids = _ordinary_ids(tiny("llama", vocab_size=49152), 12)
    assert (ids.min(), ids.max(), len(set(ids))) == (12288, 34816, 12)


def test_weights_that_a_run_made_are_loaded_without_a_question(tmp_path: Path) -> None:
    tiny("stablelm").save_pretrained(tmp_path)
    assert read_model(tmp_path).dtype is torch.float32
    with pytest.raises(UnsupportedModel, match="nats"):
        check_family(tmp_path)


def test_the_check_reads_the_lowest_layers_up_to_the_first_of_each_kind(tmp_path: Path) -> None:
    kinds = ["sliding_attention"] * 3 + ["full_attention", "sliding_attention", "full_attention"]
    model = tiny("gemma3_text", num_hidden_layers=6, layer_types=kinds, sliding_window=16)
    lowest = _lowest_layers(model.config)
    assert (lowest.num_hidden_layers, lowest.layer_types) == (4, kinds[:4])
    assert _lowest_layers(tiny("llama", num_hidden_layers=6).config).num_hidden_layers == 2
    model.save_pretrained(tmp_path)
    check_family(tmp_path)


def test_experts_above_the_lowest_layers_are_found(tmp_path: Path) -> None:
    sizes = {**EXPERTS, "shared_expert_intermediate_size": 8, "mlp_only_layers": [0, 1, 2]}
    tiny("qwen2_moe", num_hidden_layers=4, **sizes).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="mixture of experts"):
        check_family(tmp_path)


def test_quantized_weights_are_refused_with_the_remedy(tmp_path: Path) -> None:
    model = tiny("gpt_oss", num_local_experts=4)
    model.config.quantization_config = {"quant_method": "mxfp4"}
    model.save_pretrained(tmp_path)
    with pytest.raises(
        UnsupportedModel, match=r"gpt_oss: quantized weights \(mxfp4\): use the model's bfloat16 weights"
    ):
        check_family(tmp_path)


def test_freezing_by_pattern() -> None:
    model = tiny_llama()
    frozen = freeze(model, ["model.embed_tokens.*", "model.layers.[01].*"])
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {
        name for name, _ in model.named_parameters() if name.startswith(("model.layers.2", "model.norm"))
    }
    assert trained.isdisjoint(frozen)


@pytest.mark.parametrize(("pattern", "cause"), [("layers.*", "matches no parameter"), ("*", "every parameter")])
def test_patterns_that_cannot_be_meant_are_refused(pattern: str, cause: str) -> None:
    with pytest.raises(ValueError, match=cause):
        freeze(tiny_llama(), [pattern])
