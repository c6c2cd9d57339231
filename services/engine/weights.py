"""Reads a model's weights from safetensors and packs them for this processor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from leyden.services.engine.config import ExpertsConfig, ModelConfig
from leyden.services.engine.errors import WeightsRefused

Products = Literal["float32", "bfloat16"]
LinearProduct = Callable[[Tensor], Tensor]
"""[N, in] -> [N, out]."""

_EMBEDDING = "model.embed_tokens.weight"

# Batch size that the packed layout is tuned for; measured equally fast from 32 to 128.
_PACK_ROWS = 64
# Packed oneDNN products run 2.4 times as fast as torch's default (MKL) at 64 rows on an AVX-512 AMD: 37 ms for all
# layers of SmolLM2-135M where F.linear takes 87.
_PACKED: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch's own


class Linear:
    """y = x Wᵀ + b, float32 in and out; the product itself may be in bfloat16."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, products: Products = "float32") -> None:
        """Packs `weight` [out, in] where packing is available, and refers to the caller's tensor otherwise."""
        self._products = torch.bfloat16 if products == "bfloat16" else torch.float32
        self._bias = None if bias is None else bias.to(self._products).contiguous()
        matrix = weight.to(self._products).contiguous()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(matrix, _PACK_ROWS) if _PACKED else matrix

    def __call__(self, x: Tensor) -> Tensor:
        """[N, in] -> [N, out]."""
        x = x.to(self._products)
        if _PACKED:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        else:
            y = F.linear(x, self._weight, self._bias)
        return y.to(torch.float32)


class Product(NamedTuple):
    """Linear layers computed as one product: the columns of their input, and the name and rows of output of each."""

    columns: int
    parts: tuple[tuple[str, int], ...]


def products_of(config: ModelConfig) -> dict[str, Product]:
    """The products that every decoder layer has, by their fields of `Layer`."""
    return attention_products(config) | (mlp_products(config) if config.experts is None else {})


def attention_products(config: ModelConfig) -> dict[str, Product]:
    hidden, attention = config.hidden_size, "self_attn."
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return {
        "qkv": Product(
            hidden, ((attention + "q_proj", query), (attention + "k_proj", key), (attention + "v_proj", key))
        ),
        "output": Product(query, ((attention + "o_proj", hidden),)),
    }


def mlp_products(config: ModelConfig) -> dict[str, Product]:
    """Those of a layer without experts."""
    hidden, inner, mlp = config.hidden_size, config.intermediate_size, "mlp."
    return {
        "gate_up": Product(hidden, ((mlp + "gate_proj", inner), (mlp + "up_proj", inner))),
        "down": Product(inner, ((mlp + "down_proj", hidden),)),
    }


@dataclass(frozen=True)
class Experts:
    """The experts of a layer, in float32: router [X, E], gate_up [X, 2 · I, E] and down [X, E, I] of X experts."""

    config: ExpertsConfig
    router: Tensor
    gate_up: Tensor
    down: Tensor

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[N, E] -> the sum of each token's experts by their shares, [N, E], and the experts, [N, chosen]."""
        shares, chosen = F.linear(x, self.router).softmax(dim=-1).topk(self.config.chosen, dim=-1)
        if self.config.normalised:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(x)
        for expert in sorted(set(chosen.flatten().tolist())):
            tokens, place = torch.where(chosen == expert)
            gate, up = F.linear(x[tokens], self.gate_up[expert]).chunk(2, dim=-1)
            one = F.linear(F.silu(gate) * up, self.down[expert])
            out.index_add_(0, tokens, one * shares[tokens, place, None])
        return out, chosen


@dataclass(frozen=True)
class Layer:
    """One decoder layer; query, key and value are one linear product, and so are gate and up.

    It has either `experts` or `gate_up` and `down`. `query_norm` and `key_norm` are None where heads are not
    normalised.
    """

    input_norm: Tensor
    qkv: LinearProduct
    output: LinearProduct
    mlp_norm: Tensor
    gate_up: LinearProduct | None = None
    down: LinearProduct | None = None
    experts: Experts | None = None
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None


@dataclass(frozen=True)
class Weights:
    """All weights of a forward pass. Immutable: an update replaces the object."""

    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Linear


def load_weights(folder: Path, config: ModelConfig, products: Products = "float32") -> Weights:
    """Reads the weights in a Hugging Face folder and checks them against `config`.

    The head is always float32, so that log-probabilities are exact. The embedding is memory-mapped: only the rows that
    texts use are in memory.

    Raises:  WeightsRefused: a file is missing or damaged, a tensor is missing, misshapen or not finite
    """
    return _read(Reader(folder, config, products))


def _read(reader: Reader) -> Weights:
    config = reader.config
    table = (config.vocab_size, config.hidden_size)
    embedding = reader.tensor(_EMBEDDING, *table)
    return Weights(
        # A fresh mapping has no pages in memory; the reader's mapping, which was read completely, is released.
        embedding=_read_tensors(reader.folder)[_EMBEDDING],
        layers=tuple(reader.layer(index) for index in range(config.layers)),
        norm=reader.vector("model.norm.weight", config.hidden_size),
        head=Linear(embedding if config.tied else reader.tensor("lm_head.weight", *table)),
    )


class Reader:
    """Reads and checks the tensors in the safetensors files of a folder."""

    def __init__(self, folder: Path, config: ModelConfig, products: Products = "float32") -> None:
        self.folder, self.config, self._products = folder, config, products
        self.tensors = _read_tensors(folder)
        self.unread = set(self.tensors)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Returns a tensor in float32. Raises: WeightsRefused: it is missing, misshapen or not finite."""
        tensor = self.tensors.get(name)
        self.unread.discard(name)
        if tensor is None:
            raise WeightsRefused(f"{self.folder} lacks the tensor {name}: export every weight of the model")
        if tuple(tensor.shape) != shape:
            raise WeightsRefused(f"{name} in {self.folder} has shape {list(tensor.shape)}, not {list(shape)}")
        tensor = tensor.to(torch.float32)
        # Why: checking the minimum and the maximum suffices; `isfinite` of every value costs thirty times as much.
        if tensor.numel() and not bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all()):
            raise WeightsRefused(f"{name} in {self.folder} holds a value that is not finite")
        return tensor

    def vector(self, name: str, size: int) -> Tensor:
        """Returns a copy of a vector: a view would keep the file mapped."""
        return self.tensor(name, size).clone()

    def layer(self, index: int) -> Layer:
        config, prefix = self.config, f"model.layers.{index}."
        hidden, experts, attention = config.hidden_size, config.experts, attention_products(config)
        mlp = mlp_products(config) if experts is None or index in experts.dense else None
        return Layer(
            input_norm=self.vector(prefix + "input_layernorm.weight", hidden),
            qkv=self._linear(prefix, attention["qkv"]),
            output=self._linear(prefix, attention["output"]),
            mlp_norm=self.vector(prefix + "post_attention_layernorm.weight", hidden),
            gate_up=None if mlp is None else self._linear(prefix, mlp["gate_up"]),
            down=None if mlp is None else self._linear(prefix, mlp["down"]),
            experts=self._experts(prefix + "mlp.", experts) if experts is not None and mlp is None else None,
            query_norm=self._head_norm(prefix + "self_attn.q_norm.weight"),
            key_norm=self._head_norm(prefix + "self_attn.k_norm.weight"),
        )

    def _head_norm(self, name: str) -> Tensor | None:
        return self.vector(name, self.config.head_dim) if self.config.normalises_heads else None

    def _experts(self, prefix: str, config: ExpertsConfig) -> Experts:
        hidden, size = self.config.hidden_size, config.size

        def read(expert: int, name: str, *shape: int) -> Tensor:
            return self.tensor(f"{prefix}experts.{expert}.{name}_proj.weight", *shape)

        gate_up = [torch.cat([read(one, name, size, hidden) for name in ("gate", "up")]) for one in range(config.count)]
        down = [read(one, "down", hidden, size) for one in range(config.count)]
        router = self.tensor(prefix + "gate.weight", config.count, hidden).clone()
        return Experts(config, router, torch.stack(gate_up), torch.stack(down))

    def _linear(self, prefix: str, product: Product) -> Linear:
        parts = [(prefix + name, rows) for name, rows in product.parts]
        weights = [self.tensor(f"{name}.weight", rows, product.columns) for name, rows in parts]
        biases = [bias for name, rows in parts if (bias := self._bias(name, rows)) is not None]
        return Linear(torch.cat(weights), torch.cat(biases) if biases else None, self._products)

    def _bias(self, name: str, rows: int) -> Tensor | None:
        return self.vector(f"{name}.bias", rows) if f"{name}.bias" in self.tensors else None


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    try:
        files = sorted(folder.glob("*.safetensors"))
    except (OSError, ValueError) as error:
        raise WeightsRefused(f"{str(folder)!r:.200} is no folder: {error}") from error
    if not files:
        raise WeightsRefused(f"{folder} holds no .safetensors file, or is not a folder that this engine can see")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors.update(load_file(file))
        except (SafetensorError, OSError) as error:
            raise WeightsRefused(f"{file} cannot be read: {error}") from error
    return tensors
