"""Loads the policy's model and refuses models that token trees would compute wrongly."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar


class UnsupportedModel(ValueError):
    """Token trees do not reproduce a part of the model's computation; the message names it."""


def load_model(folder: Path) -> PreTrainedModel:
    """Loads the causal LM of a local Hugging Face folder in float32 and checks it.

    Raises: UnsupportedModel: sliding-window or other layers that are not plain causal attention, or logits that are not
        the output embedding applied to the last hidden states.
    """
    disable_progress_bar()
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
    )
    check_supported(model)
    return model


def check_supported(model: PreTrainedModel) -> None:
    """Raises UnsupportedModel unless every layer is full causal attention and the head is a plain product."""
    windowed = getattr(model.config, "sliding_window", None) is not None
    kinds = set(getattr(model.config, "layer_types", None) or ["sliding_attention" if windowed else "full_attention"])
    if kinds != {"full_attention"}:
        raise UnsupportedModel(
            f"layers of kinds {sorted(kinds)}: only full attention can be trained over trees; choose another model"
        )
    ids = torch.arange(min(8, model.config.vocab_size), device=model.device)[None]
    with torch.no_grad():
        hidden = model.base_model(input_ids=ids).last_hidden_state
        gap = (model.get_output_embeddings()(hidden) - model(input_ids=ids).logits).abs().max()
    if gap > 1e-4:
        raise UnsupportedModel(
            f"logits differ by {float(gap):.2g} from the head's product (scaling or capping): choose another model"
        )


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Makes parameters whose names match a pattern (fnmatch) untrained; returns their names.

    Freezing the embeddings and the lowest layers together lets the backward pass stop above them. Tied embeddings go by
    their input's name, such as `model.embed_tokens.weight`.

    Raises: ValueError: a pattern that matches nothing, or nothing left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"training.frozen: {pattern!r} matches no parameter; names look like {names[:3]}")
    frozen = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if len(frozen) == len(names):
        raise ValueError("training.frozen matches every parameter: leave something to train")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in set(frozen))
    return frozen
