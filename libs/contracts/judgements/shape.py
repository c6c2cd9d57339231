"""The parameters of a dense model, by name, from its `config.json` alone."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Self

from leyden.libs.contracts.judgements.finding import Judgement

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
NAMES = frozenset({"num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"})
ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})


def model_config(folder: Path) -> dict[str, Any] | None:
    """The `config.json` of a model folder; None where it is missing or damaged, which the trainer reports."""
    try:
        found = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def judge_kind(config: Mapping[str, Any], model: str) -> Judgement | None:
    """None for a dense model with attention in every layer. Args: model: its name in the reason"""
    if experts := next((name for name in EXPERT_COUNTS if (config.get(name) or 0) > 1), None):
        reason = f"{model} is a mixture of experts ({experts}), which no trainer trains"
        return Judgement("model", "cannot", reason, "use a dense one")
    if other := set(config.get("layer_types") or []) - ATTENTION_LAYERS:
        reason = f"{model} has layers of kinds {sorted(other)}"
        return Judgement("model", "cannot", reason, "use a model with attention in every layer")
    return None


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder: hidden states, feed-forward layers, queries, and keys."""

    layers: int
    hidden: int
    inner: int
    queries: int
    keys: int
    parameters: Mapping[str, tuple[int, ...]]
    """Axes by name, [out, in] of matrices; a tied head has no name of its own."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self | None:
        """Reads a `config.json` with Llama's names, which the dense families share; None for one with others."""
        if not config.keys() >= NAMES:
            return None
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        head = config.get("head_dim") or hidden // heads
        keys = (config.get("num_key_value_heads") or heads) * head
        sizes = config["num_hidden_layers"], hidden, config["intermediate_size"], heads * head, keys
        layer = _layer(config, *sizes[1:], head)
        named = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
        for number in range(sizes[0]):
            named |= {f"model.layers.{number}.{name}": axes for name, axes in layer.items()}
        if not config.get("tie_word_embeddings", config.get("model_type") == "gemma3_text"):
            named["lm_head.weight"] = (config["vocab_size"], hidden)
        return cls(*sizes, named)

    @property
    def size(self) -> int:
        """The number of parameters."""
        return _values(self.parameters.values())

    @property
    def layer(self) -> int:
        """The parameters of one layer."""
        return _values(axes for name, axes in self.parameters.items() if name.startswith("model.layers.0."))

    @property
    def outside(self) -> int:
        """The parameters of embeddings, last norm and head."""
        return self.size - self.layers * self.layer

    @property
    def matrices(self) -> int:
        """The parameters of linear layers, a head that is not tied included."""
        return _values(axes for name, axes in self.parameters.items() if len(axes) == 2 and "embed_tokens" not in name)

    @property
    def has_query_norms(self) -> bool:
        """Whether layers normalise queries and keys."""
        return any(name.endswith(".q_norm.weight") for name in self.parameters)

    def trained(self, frozen: Iterable[str]) -> int:
        """The parameters that full training changes. Args: frozen: patterns (fnmatch) of names that are not trained"""
        return _values(self.parameters[name] for name in self._without(frozen))

    def adapters(self, rank: int, targets: str | Collection[str], frozen: Iterable[str]) -> int:
        """The parameters of LoRA adapters beside the layers' matrices. Args: targets: `all-linear`, or last names"""
        chosen = [name.split(".") for name in self._without(frozen) if name.endswith("_proj.weight")]
        beside = [".".join(name) for name in chosen if targets == "all-linear" or name[-2] in targets]
        return sum(rank * sum(self.parameters[name]) for name in beside)

    def _without(self, frozen: Iterable[str]) -> list[str]:
        patterns = list(frozen)
        return [name for name in self.parameters if not any(fnmatchcase(name, pattern) for pattern in patterns)]


def _values(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes))


def _layer(
    config: Mapping[str, Any], hidden: int, inner: int, queries: int, keys: int, head: int
) -> dict[str, tuple[int, ...]]:
    family, biased = config.get("model_type"), bool(config.get("attention_bias"))
    sides = {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
    }
    found: dict[str, tuple[int, ...]] = {f"self_attn.{name}.weight": axes for name, axes in sides.items()}
    with_bias = sides if biased else {"q_proj", "k_proj", "v_proj"} if family == "qwen2" else ()
    found |= {f"self_attn.{name}.bias": sides[name][:1] for name in with_bias}
    products = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    found |= {f"mlp.{name}.weight": axes for name, axes in products.items()}
    if config.get("mlp_bias"):
        found |= {f"mlp.{name}.bias": axes[:1] for name, axes in products.items()}
    norms = ["input_layernorm", "post_attention_layernorm"]
    if family == "gemma3_text":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    found |= {f"{name}.weight": (hidden,) for name in norms}
    if family in {"qwen3", "gemma3_text"}:
        found |= {f"self_attn.{name}.weight": (head,) for name in ("q_norm", "k_norm")}
    return found
