import pytest
import torch
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, MistralConfig, MistralForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from leyden.services.trainer.model import UnsupportedModel, check_supported, freeze
from leyden.services.trainer.products import use_fast_products
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


@pytest.mark.parametrize("bias", [True, False])
def test_fast_products_equal_plain_ones(bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(24, 40, bias=bias)
    fast = nn.Linear(24, 40, bias=bias)
    fast.load_state_dict(plain.state_dict())
    use_fast_products(fast)
    inputs = torch.randn(2, 5, 24)
    results = []
    for layer in (plain, fast):
        x = inputs.clone().requires_grad_()
        layer(x).square().sum().backward()
        results.append([x.grad, *(p.grad for p in layer.parameters())])
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, atol=1e-4, rtol=1e-5)


def test_bfloat16_products_round_what_is_multiplied_and_nothing_else() -> None:
    torch.manual_seed(0)
    layer, head = nn.Linear(24, 40, bias=False), nn.Linear(24, 40, bias=False)
    both = nn.ModuleList([layer, head])
    use_fast_products(both, head=head, bfloat16=True)
    x = torch.randn(5, 24, requires_grad=True)
    rounded = (x.bfloat16() @ layer.weight.bfloat16().t()).float()
    assert torch.equal(layer(x), rounded)
    assert torch.allclose(head(x), x @ head.weight.t(), atol=1e-5)
    layer(x).sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert x.grad.dtype == layer.weight.grad.dtype == torch.float32
    assert torch.allclose(x.grad, layer.weight.sum(0).expand(5, 24), atol=0.05)


@pytest.mark.parametrize("bias", [True, False])
def test_gated_layers_are_computed_alike(bias: bool) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=16, num_attention_heads=2, intermediate_size=24, mlp_bias=bias)
    plain, fast = LlamaMLP(config), LlamaMLP(config)
    fast.load_state_dict(plain.state_dict())
    use_fast_products(fast)
    inputs = torch.randn(2, 5, 16)
    results = []
    for layer in (plain, fast):
        x = inputs.clone().requires_grad_()
        answer = layer(x)
        answer.square().sum().backward()
        results.append([answer, x.grad, *(p.grad for p in layer.parameters())])
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, atol=1e-5, rtol=1e-4)


def test_layers_that_only_look_gated_are_left_alone() -> None:
    config = LlamaConfig(hidden_size=16, num_attention_heads=2, intermediate_size=24, hidden_act="gelu")
    layer = LlamaMLP(config)
    x = torch.randn(3, 16)
    expected = layer(x)
    use_fast_products(layer)
    assert torch.allclose(layer(x), expected, atol=1e-5)


def test_fast_products_leave_other_precisions_alone() -> None:
    layer = nn.Linear(4, 4).double()
    use_fast_products(layer)
    assert layer(torch.ones(1, 4, dtype=torch.float64)).dtype == torch.float64
