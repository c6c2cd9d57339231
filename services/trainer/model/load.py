"""Reads the models of Hugging Face folders."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging


def read_model(
    folder: Path, dtype: torch.dtype = torch.float32, config: PreTrainedConfig | None = None
) -> PreTrainedModel:
    """The causal LM of a local Hugging Face folder. It asks nothing of it: `check_family` has."""
    logging.disable_progress_bar()
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        # A policy has its own; the default one multiplies no float64.
        experts_implementation="eager",
        local_files_only=True,
        config=config,
    )
    return model.eval()


def read_structure(folder: Path) -> PreTrainedModel:
    """The model of a folder without its weights: parameters are on the meta device, buffers have their values."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, experts_implementation="eager"
        )
    # Each parameter became one of its own.
    model.tie_weights()
    return model.eval()


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
