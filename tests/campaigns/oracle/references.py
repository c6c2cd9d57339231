"""Functions of verl 0.9.1 and TRL 1.16.0, imported without the packages that their arithmetic does not need."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections import defaultdict
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor

MISSING = {"ray", "tensordict", "omegaconf", "hydra", "codetiming", "datasets", "pandas", "pyarrow"}


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Last on the path of finders: replaces a package of `MISSING` only where it is not installed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in MISSING else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = MagicMock(name=spec.name, __path__=[], __spec__=spec, __version__="99.0")
        stub: ModuleType = module
        return stub

    def exec_module(self, module: ModuleType) -> None:
        pass


# transformers asks which packages are installed; it must see the real answer.
import transformers  # noqa: E402, F401

sys.meta_path.append(_Stubs())

from trl.experimental.iw_opd.iw_opd_trainer import IWOPDTrainer  # type: ignore[import-not-found]  # noqa: E402
from trl.rewards.other_rewards import get_soft_overlong_punishment  # type: ignore[import-not-found]  # noqa: E402
from trl.trainer.grpo_trainer import GRPOTrainer  # type: ignore[import-not-found]  # noqa: E402
from trl.trainer.sft_trainer import SFTTrainer  # type: ignore[import-not-found]  # noqa: E402
from verl.trainer.ppo import core_algos, rollout_corr_helper  # type: ignore[import-not-found]  # noqa: E402
from verl.workers.config import ActorConfig  # type: ignore[import-not-found]  # noqa: E402

# Its metrics divide by the weights' mean, which is 0 where a correction drops every token.
rollout_corr_helper.compute_is_metrics = lambda **_: {}


def _exact_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    found: Tensor = (values * mask).sum(axis) / mask.sum(axis)
    return found


# verl's adds 1e-8 to the count, which alone moves whitened advantages by more than 1e-9.
core_algos.verl_F.masked_mean = _exact_mean


def verl_loss(name: str, old: Tensor, logprobs: Tensor, advantages: Tensor, mask: Tensor, **options: Any) -> Tensor:
    """A registered policy loss. Options beside `mode` and `weights` are those of the actor's configuration."""
    mode, weights = options.pop("mode", "token-mean"), options.pop("weights", None)
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **options)
    function = core_algos.get_policy_loss_fn(name)
    found: Tensor = function(old, logprobs, advantages, mask, mode, config, weights)[0]
    return found


def verl_advantages(name: str, rewards: Tensor, mask: Tensor, groups: Any, **options: Any) -> Tensor:
    """An advantage estimator's token advantages, [B, T]."""
    function = getattr(core_algos, f"compute_{name}_outcome_advantage")
    found: Tensor = function(token_level_rewards=rewards, response_mask=mask, index=groups, **options)[0]
    return found


def verl_weights(log_ratio: Tensor, mask: Tensor, level: str, threshold: float | str) -> Tensor:
    """Importance weights of rollout correction."""
    found: Tensor = rollout_corr_helper.compute_rollout_correction_weights(log_ratio, mask, level, threshold)[0]
    return found


def verl_mask(log_ratio: Tensor, mask: Tensor, option: str, threshold: str) -> Tensor:
    """The mask after rejection sampling."""
    found: Tensor = rollout_corr_helper.compute_rollout_rejection_mask(log_ratio, mask, option, threshold)[0]
    return found


def verl_kl(logprobs: Tensor, reference: Tensor, kind: str) -> Tensor:
    """`kl_penalty`, [B, T]."""
    found: Tensor = core_algos.kl_penalty(logprobs, reference, kind)
    return found


def verl_entropy(logits: Tensor, mask: Tensor, mode: str) -> Tensor:
    """The aggregated entropy, of which the actor's loss subtracts `entropy_coeff` times; logits: [B, T, V]."""
    found: Tensor = core_algos.agg_loss(core_algos.verl_F.entropy_from_logits(logits), mask, mode)
    return found


def verl_gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """Whitened advantages and value targets, [B, T]; TRL's PPO has the same recursion, without observations."""
    found: tuple[Tensor, Tensor] = core_algos.compute_gae_advantage_return(rewards, values, mask, gamma, gae_lambda)
    return found


def verl_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float) -> Tensor:
    """The clipped value loss, a mean over tokens."""
    found: Tensor = core_algos.compute_value_loss(values, returns, old_values, mask, clip)[0]
    return found


def trl_overlong(lengths: Sequence[int], max_tokens: int, buffer_tokens: int) -> list[float]:
    """DAPO's penalty for each length, which verl's reward manager does not bound above `max_tokens`."""
    found: list[float] = get_soft_overlong_punishment(max_tokens, buffer_tokens)([[0] * n for n in lengths])
    return found


def trl_sft_loss(logprobs: Tensor, mask: Tensor) -> Tensor:
    """`SFTTrainer.compute_loss` on made-up log-probabilities: its own head computes them in float32."""
    nothing = torch.zeros_like(mask)
    found = SimpleNamespace(log_probs=logprobs * mask, label_mask=mask, entropy=nothing, is_top1=nothing)
    trainer = SimpleNamespace(
        aux_loss_enabled=False,
        compute_loss_func=None,
        label_smoother=None,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(parallelism_config=None, gather_for_metrics=_same),
        args=SimpleNamespace(loss_type="nll", average_tokens_across_devices=False),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )
    loss: Tensor = SFTTrainer.compute_loss(trainer, lambda **_: found, {"attention_mask": mask})
    return loss


def trl_distillation_loss(logprobs: Tensor, rollout: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """`IWOPDTrainer._compute_iw_opd_loss` without its weights of positions, on made-up log-probabilities."""
    trainer = SimpleNamespace(
        temperature=1.0,
        iw_opd_gamma=0.0,
        iw_opd_epsilon=1e-8,
        model=SimpleNamespace(training=True),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    # Two tokens with the chances p and 1 - p, of which the first was sampled.
    logits = torch.stack([logprobs, torch.log1p(-logprobs.exp())], dim=-1)
    tokens = torch.zeros_like(mask, dtype=torch.long)
    labels = torch.where(mask.bool(), tokens, -100)
    loss: Tensor = IWOPDTrainer._compute_iw_opd_loss(trainer, logits, tokens, labels, teacher, rollout)
    return loss


def trl_loss(
    old: Tensor, logprobs: Tensor, advantages: Tensor, mask: Tensor, *, level: str = "token", **options: Any
) -> Tensor:
    """`GRPOTrainer._compute_loss` on made-up log-probabilities. options: `loss_type`, `low`, `high`, `beta` with
    `reference`, `weights` of its importance correction."""
    weights = options.get("weights")
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=options.get("beta", 0.0),
        loss_type=options["loss_type"],
        epsilon_low=options.get("low", 0.2),
        epsilon_high=options.get("high", 0.2),
        use_vllm=weights is not None,
        vllm_importance_sampling_correction=weights is not None,
        current_gradient_accumulation_steps=1,
        max_completion_length=logprobs.shape[1],
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        model=SimpleNamespace(training=True),
        # The metrics behind the loss gather tensors of all processes.
        accelerator=SimpleNamespace(num_processes=1, gather=_same, gather_for_metrics=_same, reduce=_same),
        args=SimpleNamespace(
            delta=None,
            use_bias_correction_kl=False,
            sapo_temperature_pos=1.0,
            # 17/16: TRL rounds to float32, which has no 1.05.
            sapo_temperature_neg=1.0625,
            steps_per_generation=1,
        ),
    )
    ids = torch.zeros_like(mask, dtype=torch.long)
    inputs = {
        **{"prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": mask},
        **{"advantages": advantages, "old_per_token_logps": old, "num_items_in_batch": mask.sum()},
        **{"ref_per_token_logps": options.get("reference"), "importance_sampling_ratio": weights},
    }
    found: Tensor = GRPOTrainer._compute_loss(trainer, None, inputs)
    return found


def _same(value: Any, **_: Any) -> Any:
    return value
