"""A tiny model that often ends its turn at once: an empty reply is one that an agent can go on with."""

from __future__ import annotations

from pathlib import Path

from tests.support.tiny_model import make_tiny_model


def make_silent_model(folder: Path) -> Path:
    """Writes a tiny random Llama that answers nothing in about half of its replies, and else random bytes.

    The first component of its hidden states is the same everywhere and never changed by a layer; the end of the turn
    has the largest weight for it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    make_tiny_model(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        embeddings = model.get_input_embeddings().weight
        embeddings[:, 0] = 0.1
        embeddings[model.config.eos_token_id, 0] = 1.1
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.model.norm.weight[0] = 20.0
    model.save_pretrained(folder)
    return folder
