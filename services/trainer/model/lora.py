"""LoRA by peft: adapters beside the linear layers of a frozen base model.

A version's folder holds the merged weights, which any engine serves, and the adapter alone in peft's format:

    adapter/adapter_config.json   adapter/adapter_model.safetensors
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from leyden.libs.contracts.config import Lora
from leyden.libs.contracts.weights import ADAPTER_FOLDER
from leyden.services.trainer.model.experts import FILE_MATRICES, expert_modules
from leyden.services.trainer.model.load import freeze
from leyden.services.trainer.model.tensors import replace_values

ADAPTER_WEIGHTS = "adapter_model.safetensors"
_ADAPTER = "default"
EXPERT_MATRICES = {*FILE_MATRICES, *(name for names in FILE_MATRICES.values() for name in names)}
"""Names of a mixture's matrices in files, and in memory."""
_FILE_PREFIX = "base_model.model."


def add_adapters(model: PreTrainedModel, config: Lora, frozen: Sequence[str], base: Path) -> None:
    """Freezes the model and adds trainable adapters, which change nothing yet: B is zero. A follows torch's seed.

    Args:   frozen: patterns (fnmatch) of parameter names whose layers get no adapter; base: the model's folder
    Raises: ValueError: `target_modules` or `frozen` name no layer, or leave none
    """
    # Importing peft takes a second, which runs without adapters save.
    from peft import LoraConfig, inject_adapter_in_model

    freeze(model, frozen)
    head = model.get_output_embeddings()
    layers = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head
    }
    # A mixture's layers without experts have matrices of the same names: peft reads these as the experts' own.
    of_experts = EXPERT_MATRICES if expert_modules(model) else set()
    kinds = {name.rpartition(".")[2] for name in layers} - of_experts
    wanted = kinds if config.target_modules == "all-linear" else set(config.target_modules)
    if refused := wanted & of_experts:
        raise ValueError(
            f"training.lora.target_modules: {sorted(refused)} are matrices of experts, which get no adapters: write"
            f" some of {sorted(kinds)}, or 'all-linear', or train the weights without lora"
        )
    if unknown := wanted - kinds:
        raise ValueError(
            f"training.lora.target_modules: {sorted(unknown)} are no linear layers of the decoder: write some of"
            f" {sorted(kinds)}, or 'all-linear'"
        )
    chosen = [name for name in layers if name.rpartition(".")[2] in wanted]
    left_out = [name for name in chosen if not layers[name].weight.requires_grad]
    if len(left_out) == len(chosen):
        raise ValueError("training.frozen matches every layer of training.lora.target_modules: leave some to train")
    model.requires_grad_(requires_grad=False)
    with _on_the_host(layers.values()):
        inject_adapter_in_model(
            LoraConfig(
                r=config.rank,
                lora_alpha=config.alpha,
                target_modules=sorted(wanted),
                exclude_modules=left_out or None,
                task_type="CAUSAL_LM",
                base_model_name_or_path=str(base),
            ),
            model,
        )


@contextmanager
def _on_the_host(layers: Iterable[nn.Linear]) -> Iterator[None]:
    """Gives layers without values empty weights meanwhile: peft puts adapters on the device of a layer's weight."""
    lacking = {layer: layer.weight for layer in layers if layer.weight.is_meta}
    for layer, weight in lacking.items():
        layer.weight = nn.Parameter(torch.empty(0, dtype=weight.dtype), requires_grad=False)
    try:
        yield
    finally:
        for layer, weight in lacking.items():
            layer.weight = weight


def has_adapters(model: nn.Module) -> bool:
    """Whether `add_adapters` changed the model."""
    return hasattr(model, "peft_config")


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Computes with the base model alone."""
    adapted = [module for _, module in _adapted_layers(model)]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for module in adapted:
        module.enable_adapters(enabled=False)
    # peft lets disabled adapters train no more. FSDP reads at its first pass which parameters train, and once alone.
    for parameter in trained:
        parameter.requires_grad = True
    try:
        yield
    finally:
        for module in adapted:
            module.enable_adapters(enabled=True)


def merged_state(
    model: PreTrainedModel, state: Mapping[str, Tensor], adapter: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Adds adapters to weights, under the base model's names.

    Args: state, adapter: parts of the model's state, complete tensors; `adapter` is all of its adapters
    """
    merged = {
        name.replace(".base_layer.", "."): _wide(tensor) for name, tensor in state.items() if not of_adapter(name)
    }
    for name, layer in _adapted_layers(model):
        if f"{name}.weight" in merged:
            narrow, wide = (adapter[f"{name}.lora_{part}.{_ADAPTER}.weight"] for part in "AB")
            merged[f"{name}.weight"] = merged[f"{name}.weight"] + wide @ narrow * layer.scaling[_ADAPTER]
    return merged


def _wide(tensor: Tensor) -> Tensor:
    """In float32 at least: `hold_frozen` rounds what lies in memory, and no sum."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def adapter_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The adapters' tensors of a model's state, under the names of peft's files."""
    return {
        _FILE_PREFIX + name.replace(f".{_ADAPTER}.", "."): tensor for name, tensor in state.items() if of_adapter(name)
    }


def adapter_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The adapters' parameters by name, sharded where the model's are."""
    return {name: parameter for name, parameter in model.named_parameters() if of_adapter(name)}


def save_adapter_config(model: PreTrainedModel, folder: Path) -> None:
    """Writes `adapter_config.json`, which peft and engines read."""
    model.peft_config[_ADAPTER].save_pretrained(folder)


def read_adapter(model: PreTrainedModel, weights: Path) -> float:
    """Copies the adapter of a version's folder into the model. Returns the largest change of any weight.

    Raises: OSError, LookupError, ValueError: there is none, or it is another model's
    """
    saved, own, largest = load_file(weights / ADAPTER_FOLDER / ADAPTER_WEIGHTS), adapter_state(model.state_dict()), 0.0
    if saved.keys() != own.keys():
        raise ValueError(f"{weights / ADAPTER_FOLDER} belongs to other layers: training.lora has changed")
    for name, tensor in own.items():
        largest = max(largest, replace_values(tensor, saved[name]))
    return largest


def of_adapter(name: str) -> bool:
    """Whether a tensor of a model's state belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def _adapted_layers(model: nn.Module) -> list[tuple[str, Any]]:
    from peft.tuners.lora import Linear

    return [(name, module) for name, module in model.named_modules() if isinstance(module, Linear)]
