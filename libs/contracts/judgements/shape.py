"""The parameters of a model, by name, from its `config.json` alone."""

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
EXPERT_FAMILIES = ("gpt_oss", "qwen3_moe")
"""Mixtures of experts that trainers train: over trees, over ranks, beside adapters, and exported, each is tested."""
ROUTERS = ("*.mlp.gate.weight", "*.mlp.router.*")
"""Patterns (fnmatch) of their routers' names."""
NAMES = frozenset({"num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"})
_LAYERS = "model.layers."
ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})


def model_config(folder: Path) -> dict[str, Any] | None:
    """The `config.json` of a model folder; None where it is missing or damaged, which the trainer reports."""
    try:
        found = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def judge_kind(config: Mapping[str, Any], model: str) -> Judgement | None:
    """None for a model of a kind that trainers compute. Args: model: its name in the reason"""
    if method := quantization(config.get("quantization_config")):
        reason = f"{model} has quantized weights ({method}), which no trainer trains"
        return Judgement("model", "cannot", reason, "use the model's bfloat16 weights")
    if (experts := _expert_count(config)) and config.get("model_type") not in EXPERT_FAMILIES:
        reason = f"{model} is a mixture of experts ({experts}), which no trainer trains"
        return Judgement("model", "cannot", reason, f"use one of {', '.join(EXPERT_FAMILIES)}, or a dense model")
    if other := set(config.get("layer_types") or []) - ATTENTION_LAYERS:
        reason = f"{model} has layers of kinds {sorted(other)}"
        return Judgement("model", "cannot", reason, "use a model with attention in every layer")
    return None


def quantization(settings: object) -> str | None:
    """The method by which weights are quantized; None where they are not. Args: settings: of a `config.json`"""
    return str(settings.get("quant_method", "unknown method")) if isinstance(settings, Mapping) else None


def _expert_count(config: Mapping[str, Any]) -> str | None:
    """The name of the field that makes the model a mixture of experts; None for a dense one."""
    return next((name for name in EXPERT_COUNTS if (config.get(name) or 0) > 1), None)


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder: hidden states, feed-forward layers, queries, and keys.

    inner: of the feed-forward layer that one token passes, its experts together; routed: the experts of a token, 0 for
    a dense model; gate_tensors: those of size `inner` that a backward pass reads.
    """

    layers: int
    hidden: int
    inner: int
    queries: int
    keys: int
    parameters: Mapping[str, tuple[int, ...]]
    """Axes by name, [out, in] of matrices, [experts, out, in] of experts; a tied head has no name of its own."""
    routed: int = 0
    gate_tensors: int = 4

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self | None:
        """Reads a `config.json` with Llama's names, which the families share; None for one with others."""
        mixture = _expert_count(config) is not None
        if not config.keys() >= NAMES or (mixture and config.get("model_type") not in EXPERT_FAMILIES):
            return None
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        head = config.get("head_dim") or hidden // heads
        keys = (config.get("num_key_value_heads") or heads) * head
        routed = config["num_experts_per_tok"] if mixture else 0
        with_experts = [mixture and _has_experts(config, number) for number in range(config["num_hidden_layers"])]
        inner = max(
            routed * _expert_size(config) if mixture else 0,
            0 if all(with_experts) else config["intermediate_size"],
        )
        layers = {
            one: _layer(config, hidden, config["intermediate_size"], heads * head, keys, head, experts=one)
            for one in set(with_experts)
        }
        named = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
        for number, kind in enumerate(with_experts):
            named |= {f"model.layers.{number}.{name}": axes for name, axes in layers[kind].items()}
        if not config.get("tie_word_embeddings", config.get("model_type") == "gemma3_text"):
            named["lm_head.weight"] = (config["vocab_size"], hidden)
        # gpt-oss clamps gate and up, and has the sigmoid as a tensor of its own.
        gate_tensors = 7 if config.get("model_type") == "gpt_oss" else cls.gate_tensors
        return cls(len(with_experts), hidden, inner, heads * head, keys, named, routed, gate_tensors)

    @property
    def size(self) -> int:
        """The number of parameters."""
        return _values(self.parameters.values())

    @property
    def layer(self) -> int:
        """The parameters of the largest layer."""
        sizes = dict.fromkeys(range(self.layers), 0)
        for name, axes in self.parameters.items():
            if name.startswith(_LAYERS):
                sizes[int(name.split(".")[2])] += math.prod(axes)
        return max(sizes.values())

    @property
    def outside(self) -> int:
        """The parameters of embeddings, last norm and head."""
        return _values(axes for name, axes in self.parameters.items() if not name.startswith(_LAYERS))

    @property
    def matrices(self) -> int:
        """The parameters of linear layers and experts, a head that is not tied included, and routers not."""
        others = (*ROUTERS, "*.embed_tokens.*")
        return _values(self.parameters[name] for name in self._without(others) if len(self.parameters[name]) > 1)

    @property
    def has_query_norms(self) -> bool:
        """Whether layers normalise queries and keys."""
        return any(name.endswith(".q_norm.weight") for name in self.parameters)

    @property
    def has_sinks(self) -> bool:
        """Whether the softmax of attention has a learned term for each head."""
        return any(name.endswith(".sinks") for name in self.parameters)

    def trained(self, frozen: Iterable[str]) -> int:
        """The parameters that full training changes. Args: frozen: patterns (fnmatch) of names that are not trained"""
        return _values(self.parameters[name] for name in self._without(frozen))

    def adapters(self, rank: int, targets: str | Collection[str], frozen: Iterable[str]) -> int:
        """The parameters of LoRA adapters beside the layers' matrices, in a mixture those of attention alone.

        Args: targets: `all-linear`, or last names
        """
        without = [*frozen, "*.mlp.*"] if self.routed else frozen
        chosen = [name.split(".") for name in self._without(without) if name.endswith("_proj.weight")]
        beside = [".".join(name) for name in chosen if targets == "all-linear" or name[-2] in targets]
        return sum(rank * sum(self.parameters[name]) for name in beside)

    def _without(self, frozen: Iterable[str]) -> list[str]:
        patterns = list(frozen)
        return [name for name in self.parameters if not any(fnmatchcase(name, pattern) for pattern in patterns)]


def _values(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes))


def _layer(
    config: Mapping[str, Any], hidden: int, inner: int, queries: int, keys: int, head: int, *, experts: bool
) -> dict[str, tuple[int, ...]]:
    family = config.get("model_type")
    biased = bool(config.get("attention_bias", family == "gpt_oss"))
    sides = {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
    }
    found: dict[str, tuple[int, ...]] = {f"self_attn.{name}.weight": axes for name, axes in sides.items()}
    with_bias = sides if biased else {"q_proj", "k_proj", "v_proj"} if family == "qwen2" else ()
    found |= {f"self_attn.{name}.bias": sides[name][:1] for name in with_bias}
    if family == "gpt_oss":
        found["self_attn.sinks"] = (config["num_attention_heads"],)
    if experts:
        found |= _experts(config, hidden)
    else:
        products = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        found |= {f"mlp.{name}.weight": axes for name, axes in products.items()}
        if config.get("mlp_bias"):
            found |= {f"mlp.{name}.bias": axes[:1] for name, axes in products.items()}
    norms = ["input_layernorm", "post_attention_layernorm"]
    if family == "gemma3_text":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    found |= {f"{name}.weight": (hidden,) for name in norms}
    if family in {"qwen3", "qwen3_moe", "gemma3_text"}:
        found |= {f"self_attn.{name}.weight": (head,) for name in ("q_norm", "k_norm")}
    return found


def _experts(config: Mapping[str, Any], hidden: int) -> dict[str, tuple[int, ...]]:
    """Router and experts of a layer, by their names in memory."""
    # A published config has num_experts; transformers 5 writes num_local_experts.
    count, inner = config[_expert_count(config) or EXPERT_COUNTS[0]], _expert_size(config)
    if config.get("model_type") == "gpt_oss":
        return {
            "mlp.router.weight": (count, hidden),
            "mlp.router.bias": (count,),
            "mlp.experts.gate_up_proj": (count, hidden, 2 * inner),
            "mlp.experts.gate_up_proj_bias": (count, 2 * inner),
            "mlp.experts.down_proj": (count, inner, hidden),
            "mlp.experts.down_proj_bias": (count, hidden),
        }
    return {
        "mlp.gate.weight": (count, hidden),
        "mlp.experts.gate_up_proj": (count, 2 * inner, hidden),
        "mlp.experts.down_proj": (count, hidden, inner),
    }


def _expert_size(config: Mapping[str, Any]) -> int:
    """The inner size of one expert."""
    size: int = config["intermediate_size" if config.get("model_type") == "gpt_oss" else "moe_intermediate_size"]
    return size


def _has_experts(config: Mapping[str, Any], number: int) -> bool:
    """Whether a layer of a mixture, from 0, has experts: every `decoder_sparse_step`-th, except `mlp_only_layers`."""
    listed = number in (config.get("mlp_only_layers") or ())
    return not listed and (number + 1) % (config.get("decoder_sparse_step") or 1) == 0
