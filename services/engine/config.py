"""Reads the parts of a model folder's `config.json` that the forward pass needs."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leyden.services.engine.errors import UnsupportedModel

SUPPORTED_TYPES = ("llama", "qwen2", "mistral", "qwen3_moe")


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding; `scaling` holds the parameters of `kind` (Llama 3's, or a linear factor)."""

    theta: float
    kind: str
    scaling: dict[str, float]

    def frequencies(self, head_dim: int) -> list[float]:
        """Returns [head_dim / 2] angles per position, in radians.

        Source: RoFormer (arXiv 2104.09864), section 3.2.2; Llama 3.1's piecewise scaling of the wavelengths
        """
        plain = [self.theta ** (-2 * index / head_dim) for index in range(head_dim // 2)]
        if self.kind == "default":
            return plain
        if self.kind == "linear":
            return [frequency / self.scaling["factor"] for frequency in plain]
        return [self._llama3(frequency) for frequency in plain]

    def _llama3(self, frequency: float) -> float:
        factor, low, high = (self.scaling[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
        turns = self.scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
        if turns < low:
            return frequency / factor
        if turns > high:
            return frequency
        share = (turns - low) / (high - low)
        return (1 - share) * frequency / factor + share * frequency


@dataclass(frozen=True)
class ExpertsConfig:
    """Experts of a Qwen3-MoE: each token has `chosen` of `count`, of inner size `size`, in all layers but `dense`.

    `normalised`: the shares of the chosen ones add up to 1.
    """

    count: int
    chosen: int
    size: int
    normalised: bool
    dense: frozenset[int]


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a decoder. `end_ids` end a generation; `context_length` bounds prompt and answer together.

    normalises_heads: queries and keys, as in Qwen3; experts: None in a dense decoder.
    """

    model_type: str
    architectures: tuple[str, ...]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope
    tied: bool
    context_length: int
    end_ids: frozenset[int]
    normalises_heads: bool = False
    experts: ExpertsConfig | None = None


def read_config(folder: Path) -> ModelConfig:
    """Reads the configuration of a Hugging Face folder.

    Raises:  UnsupportedModel: no `config.json` or a damaged one, another architecture, an unknown rotary scaling or
        activation
    """
    try:
        return _described(folder)
    except (OSError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        problem = f"config.json or generation_config.json in {folder} is damaged ({type(error).__name__}: {error})"
        raise UnsupportedModel(f"{problem}: export the model again") from error


def _described(folder: Path) -> ModelConfig:
    raw = _read_json(folder / "config.json")
    if not raw:
        raise UnsupportedModel(f"{folder} holds no config.json: give a Hugging Face model folder")
    _require_supported(raw)
    heads = raw["num_attention_heads"]
    return ModelConfig(
        model_type=raw["model_type"],
        architectures=tuple(raw.get("architectures") or ()),
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        layers=raw["num_hidden_layers"],
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope=_read_rope(raw),
        tied=bool(raw.get("tie_word_embeddings", False)),
        context_length=raw.get("max_position_embeddings", 2048),
        end_ids=_end_ids(raw, _read_json(folder / "generation_config.json")),
        normalises_heads=raw["model_type"] == "qwen3_moe",
        experts=_read_experts(raw) if raw["model_type"] == "qwen3_moe" else None,
    )


def _read_experts(raw: dict[str, Any]) -> ExpertsConfig:
    every, named = raw.get("decoder_sparse_step", 1), raw.get("mlp_only_layers") or ()
    return ExpertsConfig(
        # transformers writes the second name.
        count=raw.get("num_experts") or raw["num_local_experts"],
        chosen=raw["num_experts_per_tok"],
        size=raw["moe_intermediate_size"],
        normalised=bool(raw.get("norm_topk_prob", False)),
        dense=frozenset(n for n in range(raw["num_hidden_layers"]) if n in named or (n + 1) % every),
    )


def _require_supported(raw: dict[str, Any]) -> None:
    kind = raw.get("model_type")
    if kind not in SUPPORTED_TYPES:
        raise UnsupportedModel(f"model_type {kind!r} is not served here: use one of {', '.join(SUPPORTED_TYPES)}")
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"activation {raw['hidden_act']!r} is not served here: only silu is")
    if raw.get("sliding_window") and (kind == "mistral" or raw.get("use_sliding_window")):
        raise UnsupportedModel("sliding-window attention is not served here")


def _read_rope(raw: dict[str, Any]) -> Rope:
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise UnsupportedModel(f"rotary scaling {kind!r} is not served here: use default, linear or llama3")
    theta = parameters.get("rope_theta") or raw.get("rope_theta") or 10000.0
    numbers = {name: float(value) for name, value in parameters.items() if isinstance(value, int | float)}
    return Rope(theta=float(theta), kind=kind, scaling=numbers)


def _end_ids(*sources: dict[str, Any]) -> frozenset[int]:
    found: set[int] = set()
    for source in sources:
        ids = source.get("eos_token_id")
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return frozenset(found)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_text())
    return content
