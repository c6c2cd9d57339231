"""LoRA adapters in peft's format beside the model's weights: each token of a batch may have one of its own."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from leyden.services.engine.config import ModelConfig
from leyden.services.engine.errors import WeightsRefused
from leyden.services.engine.weights import Layer, LinearProduct, Product, Reader, Weights, products_of

_serials = itertools.count(1)


@dataclass(frozen=True, eq=False)
class Adapter:
    """By layer and field of `Layer`, what a product adds: the transposes of A [in, R] and of B, scaled, [R, out].

    `serial` differs for every adapter that is loaded, also of the same name.
    """

    folder: Path
    layers: tuple[dict[str, tuple[Tensor, Tensor]], ...]
    serial: int = field(default_factory=lambda: next(_serials))


def load_adapter(folder: Path, config: ModelConfig) -> Adapter:
    """Reads a folder of peft's `save_pretrained`.

    Raises: WeightsRefused: a file is missing or damaged, or a tensor does not fit the model
    """
    try:
        settings = json.loads((folder / "adapter_config.json").read_text())
        rank, scale = int(settings["r"]), settings["lora_alpha"] / settings["r"]
    except (OSError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise WeightsRefused(f"{folder} holds no adapter of peft: {type(error).__name__}: {error}") from error
    if settings.get("use_dora") or settings.get("use_rslora"):
        raise WeightsRefused(f"{folder} is an adapter of DoRA or rsLoRA: train a plain one")
    reader = Reader(folder, config)
    layers = tuple(
        {
            name: _delta(reader, f"base_model.model.model.layers.{index}.", product, rank, scale)
            for name, product in products_of(config).items()
        }
        for index in range(config.layers)
    )
    if reader.unread:
        raise WeightsRefused(f"{folder} adapts what this engine does not: {sorted(reader.unread)[0]}")
    return Adapter(folder, layers)


def adapt(weights: Weights, adapters: Sequence[Adapter | None]) -> Weights:
    """Returns weights for one batch, whose tokens have these adapters, one for each."""
    tokens: dict[Adapter, list[int]] = {}
    for index, adapter in enumerate(adapters):
        if adapter is not None:
            tokens.setdefault(adapter, []).append(index)
    if not tokens:
        return weights
    groups = [(adapter, torch.tensor(indices)) for adapter, indices in tokens.items()]
    layers = (_adapt_layer(number, layer, groups) for number, layer in enumerate(weights.layers))
    return replace(weights, layers=tuple(layers))


def _adapt_layer(number: int, layer: Layer, groups: Sequence[tuple[Adapter, Tensor]]) -> Layer:
    def adapted(name: str, product: LinearProduct) -> LinearProduct:
        deltas = [(indices, *adapter.layers[number][name]) for adapter, indices in groups]

        def compute(x: Tensor) -> Tensor:
            y = product(x)
            for indices, narrow, wide in deltas:
                y.index_add_(0, indices, x[indices] @ narrow @ wide)
            return y

        return compute

    def of_mlp(name: str, product: LinearProduct | None) -> LinearProduct | None:
        # Adapters of a model with experts stand beside attention alone.
        if product is None or name not in groups[0][0].layers[number]:
            return product
        return adapted(name, product)

    return replace(
        layer,
        qkv=adapted("qkv", layer.qkv),
        output=adapted("output", layer.output),
        gate_up=of_mlp("gate_up", layer.gate_up),
        down=of_mlp("down", layer.down),
    )


def _delta(reader: Reader, prefix: str, product: Product, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """The parts of a product side by side; a part without an adapter adds nothing."""

    def read(name: str, *shape: int) -> Tensor:
        return reader.tensor(name, *shape) if name in reader.tensors else torch.zeros(shape)

    narrow = [read(f"{prefix}{name}.lora_A.weight", rank, product.columns) for name, _ in product.parts]
    wide = [read(f"{prefix}{name}.lora_B.weight", rows, rank) for name, rows in product.parts]
    joined: Tensor = torch.block_diag(*wide)  # type: ignore[no-untyped-call]  # torch's own
    return torch.cat(narrow).T.contiguous(), joined.mul_(scale).T.contiguous()
