import pytest
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM

from leyden.services.trainer.model import UnsupportedModel, check_supported, freeze
from tests.unit.trainer.cases import tiny_llama

SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def test_capped_logits_and_sliding_windows_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="full attention"):
        check_supported(Gemma2ForCausalLM(Gemma2Config(**SIZES)))
    full = Gemma2Config(**SIZES, layer_types=["full_attention"] * 2, final_logit_softcapping=0.01)
    with pytest.raises(UnsupportedModel, match="logits differ"):
        check_supported(Gemma2ForCausalLM(full))
    with pytest.raises(UnsupportedModel, match="full attention"):
        check_supported(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4)))


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
