"""The arithmetic of `run check` beside transformers: names of parameters, and tensors that a backward pass reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from docs.shapes import PUBLISHED
from leyden.libs.contracts.judgements import Shape
from leyden.libs.contracts.judgements.memory import activation_bytes_a_token
from leyden.services.trainer.model.forward import Policy

TOKENS = 128
MIXTURES = {
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 4, "intermediate_size": 192},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 192},
}


def model_of(config: dict[str, Any]) -> Any:
    sizes = {name: value for name, value in config.items() if name != "model_type"}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **sizes))


@pytest.mark.parametrize(
    "name", ["Qwen3-8B", "Qwen2.5-3B", "Llama-3.1-8B", "Mistral-7B-v0.3", "gemma-3-1b", "gpt-oss-20b"]
)
def test_parameters_are_those_of_transformers(name: str) -> None:
    config = PUBLISHED[name][0]
    with torch.device("meta"):
        model = model_of(config)
    found = Shape.of(config)
    assert found is not None
    assert found.parameters == {name: tuple(one.shape) for name, one in model.named_parameters()}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", *MIXTURES])
def test_activations_are_within_a_tenth_of_the_tensors_that_a_backward_pass_reads(kind: str) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8, "num_key_value_heads": 2}
    config = {"model_type": kind, "num_hidden_layers": 4, "vocab_size": 64, "head_dim": 32, **sizes}
    config |= MIXTURES.get(kind, {})
    model, shape = model_of(config), Shape.of(config)
    if kind in MIXTURES:
        # Attention with sinks, and experts in groups.
        Policy(model)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    read: dict[int, int] = {}

    def seen(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            read[storage.data_ptr()] = storage.nbytes()
        return tensor

    hidden = torch.randn(1, TOKENS, 256, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(seen, lambda tensor: tensor):
        # Held, so that no storage is freed and counted twice.
        kept = model.model(inputs_embeds=hidden, attention_mask=torch.zeros(1, 1, TOKENS, TOKENS), use_cache=False)
    assert kept.last_hidden_state.shape == (1, TOKENS, 256)
    assert shape is not None
    assert 4 * activation_bytes_a_token(shape, 4) * TOKENS == pytest.approx(sum(read.values()), rel=0.1)
