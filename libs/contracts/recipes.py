"""Recipes: settings to begin a run with. A run's document overrides them, and the stored document holds the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from leyden.libs.contracts.overlay import overlay

# Advantages by the mean of the group, clip 0.2/0.28, weight decay 0 and no KL penalty are the document's own defaults.
_DECOUPLED = {"type": "decoupled", "weights": "tis_token", "cap": 2.0}
_ON_A_GPU = {"precision": "bfloat16", "activation_checkpointing": True}

_FULL_8B = (
    "8 × 48 GB with 34 GB of host memory or 4 × 80 GB with 22 GB of host memory or 2 × 141 GB with 18 GB of host"
    " memory; engine 1 × 24 GB"
)


@dataclass(frozen=True)
class Recipe:
    """Settings for a purpose: a part of a run's document."""

    purpose: str
    document: Mapping[str, Any]
    model: str
    """A model that it is sized for."""
    machine: str
    """The smallest machines for that model, as `leyden run check` computes them."""


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "flight-cpu": Recipe(
            "The recorded training of the flight agent: a model of 135M parameters on a CPU.",
            {
                "sampling": {"group_size": 8, "groups_per_step": 6, "max_policy_lag": 0},
                "credit": {
                    "rule": {"type": "discounted", "gamma": 0.95},
                    "air": {"weights": {"memory": 0.3, "search": 0.2}, "failure": 0.0, "null": "nothing"},
                    "baseline": {"type": "mean", "per": "state"},
                },
                "optimizer": {"learning_rate": 1e-5},
                "training": {"precision": "float32", "steps": 7, "micro_batch_tokens": 1024},
            },
            "SmolLM2-135M",
            "6 GB for trainer and engine",
        ),
        "grpo-8b": Recipe(
            "Group advantages for a model of about 8B parameters: mean baseline, two versions of lag, truncated"
            " importance weights.",
            {
                "sampling": {"group_size": 8, "groups_per_step": 16, "max_policy_lag": 2, "temperature": 1.0},
                "algorithm": {"type": "ppo_clip", "correction": _DECOUPLED},
                "training": _ON_A_GPU,
            },
            "Qwen3-8B",
            _FULL_8B,
        ),
        "dapo-8b": Recipe(
            "DAPO for a model of about 8B parameters: clip-higher, token mean, groups without variance are replaced,"
            " long answers are penalised, 16 updates a step.",
            {
                "sampling": {
                    **{"group_size": 16, "groups_per_step": 32, "max_policy_lag": 1, "temperature": 1.0},
                    "refill_zero_variance": 3,
                },
                "credit": {
                    "rule": {"type": "identical"},
                    "baseline": {"type": "mean_std"},
                    "shaping": {"overlong": {"max_tokens": 20480, "buffer_tokens": 4096, "penalty": 1.0}},
                },
                "algorithm": {"type": "ppo_clip", "weighting": "token_mean", "mini_batches": 16, "dual_clip": None},
                "optimizer": {"warmup_steps": 20, "weight_decay": 0.1},
                "training": _ON_A_GPU,
            },
            "Qwen3-8B",
            _FULL_8B,
        ),
        "ppo-critic": Recipe(
            "PPO with a learned value before each token and GAE: for rewards that come late in long rollouts.",
            {
                "sampling": {"group_size": 4, "groups_per_step": 16, "max_policy_lag": 1, "temperature": 1.0},
                "credit": {"baseline": {"type": "value"}},
                "algorithm": {
                    "type": "ppo_clip",
                    **{"clip_high": 0.2, "weighting": "token_mean", "mini_batches": 4},
                    "critic": {"gamma": 1.0, "gae_lambda": 0.95, "value_clip": 0.2, "warmup_steps": 5},
                },
                "training": _ON_A_GPU,
            },
            "Qwen3-8B",
            _FULL_8B,
        ),
        "lora-1gpu": Recipe(
            "Adapters of rank 32 on one GPU: a hundred times the learning rate of full training.",
            {
                "sampling": {"group_size": 8, "groups_per_step": 8, "max_policy_lag": 2, "temperature": 1.0},
                "algorithm": {"type": "ppo_clip", "correction": _DECOUPLED},
                "optimizer": {"learning_rate": 1e-4},
                "training": {**_ON_A_GPU, "lora": {"rank": 32, "alpha": 64.0}},
            },
            "Qwen3-8B",
            "2 × 24 GB with 18 GB of host memory or 1 × 48 GB with 16 GB of host memory; engine 1 × 24 GB",
        ),
        "agent-lightning": Recipe(
            "The values of Agent Lightning's published sketches: temporal discount, tool rewards of either sign, GRPO"
            " with a KL penalty. Add the weights of your tools under credit.air.weights.",
            {
                "sampling": {"group_size": 8, "groups_per_step": 4, "max_policy_lag": 4, "temperature": 1.0},
                "credit": {
                    "rule": {"type": "temporal_discount", "gamma": 0.99},
                    "air": {"failure": -1.0, "null": "failure"},
                    "baseline": {"type": "mean_std"},
                },
                "algorithm": {"type": "ppo_clip", "clip_high": 0.2, "kl_coefficient": 0.04},
                "optimizer": {"learning_rate": 1e-5},
                "training": {"keep_checkpoints": 5},
            },
            "Qwen2.5-3B",
            "4 × 48 GB with 17 GB of host memory or 2 × 80 GB with 9 GB of host memory or 1 × 141 GB with 6 GB of"
            " host memory; engine 1 × 24 GB",
        ),
        "sft": Recipe(
            "Supervised fine-tuning on stored rollouts: a warm start for models that never succeed. Name the runs under"
            " algorithm.runs.",
            {
                "sampling": {"groups_per_step": 16},
                "algorithm": {"type": "sft", "per_task": 4},
                "optimizer": {"learning_rate": 1e-5, "beta2": 0.999, "schedule": "linear"},
                "training": {"steps": 50},
            },
            "Qwen2.5-3B",
            "4 × 48 GB with 17 GB of host memory or 1 × 80 GB with 6 GB of host memory; engine 1 × 24 GB",
        ),
        "online": Recipe(
            "Groups of one, for traffic in which each task comes once: a moving average is the baseline.",
            {
                "sampling": {"group_size": 1, "min_siblings": 1, "groups_per_step": 64, "max_policy_lag": 2},
                "credit": {"baseline": {"type": "ema"}},
                "algorithm": {"type": "ppo_clip", "correction": _DECOUPLED},
            },
            "Qwen2.5-3B",
            "4 × 48 GB with 17 GB of host memory or 1 × 80 GB with 6 GB of host memory; engine 1 × 24 GB",
        ),
    }
)


def expanded(document: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the document laid over its recipe, which it then no longer names. An unknown name stays.

    >>> found = expanded({"recipe": "lora-1gpu", "training": {"lora": {"rank": 8}}})
    >>> found["training"]["lora"], "recipe" in found
    ({'rank': 8, 'alpha': 64.0}, False)
    """
    name = document.get("recipe")
    if not isinstance(name, str) or name not in RECIPES:
        return dict(document)
    return overlay(RECIPES[name].document, {key: value for key, value in document.items() if key != "recipe"})
