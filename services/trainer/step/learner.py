"""A step changes the learner: the policy, its optimiser, and with them its KL reference.

The reference is version 0, or the run's own version of every n-th step. With LoRA neither needs a second model: the
base model is the policy without its adapters, and another version is the policy with that version's adapters, which are
small.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from leyden.services.trainer.model.forward import Outputs, Policy, Prefix, Reads
from leyden.services.trainer.model.lora import adapter_parameters, of_adapter, without_adapters
from leyden.services.trainer.model.value_head import ValueHead
from leyden.services.trainer.ranks.collectives import ALONE, Ranks
from leyden.services.trainer.rows.tree import Pack


@dataclass
class Reference:
    """A policy whose weights do not change within a step.

    every: n, for the version of step floor(step / n) · n; None for weights that never change. adapter: with LoRA,
    unless it is the base model, the reference's adapters by parameter name, and `policy` is then the one that is
    trained. dtype: the type to which versions round the weights; None where they do not.
    """

    policy: Policy
    every: int | None = None
    adapter: dict[str, Tensor] | None = None
    dtype: torch.dtype | None = None

    @torch.no_grad()
    def refresh(self, policy: Policy, step: int) -> None:
        """Copies the trained weights, those after `step`, if they are the reference of the steps that follow.

        Version 0 is not copied: the reference begins with it, and the trained weights may be those that it rounds.
        """
        if self.every is None or step == 0 or step % self.every:
            return
        if self.adapter is not None:
            self.adapter = copied(adapter_parameters(self.policy.model))
        else:
            _replace(self.policy.model.state_dict(), policy.model.state_dict(), self.dtype)

    @contextmanager
    def weights(self) -> Iterator[Policy]:
        """The policy with the reference's weights."""
        if self.adapter is None:
            yield self.policy
            return
        own = adapter_parameters(self.policy.model)
        trained = copied(own)
        _replace(own, self.adapter)
        try:
            yield self.policy
        finally:
            _replace(own, trained)


class BasePolicy(Policy):
    """The base model behind a policy's adapters, as the KL reference: it shares the policy's weights."""

    def __init__(self, policy: Policy) -> None:
        nn.Module.__init__(self)
        self.policy, self.model, self.kernel, self.value_head = policy, policy.model, policy.kernel, None
        self.routing = policy.routing

    def prefix(self, pack: Pack, path: Sequence[Prefix]) -> Prefix:
        """`Policy.prefix` of the base model."""
        with without_adapters(self.model):
            return self.policy.prefix(pack, path)

    def forward(
        self, pack: Pack, path: Sequence[Prefix], reads: Reads, *, values_alone: bool = False, entropies: bool = False
    ) -> Outputs:
        """`Policy.forward` of the base model, without values."""
        with without_adapters(self.model):
            return Outputs(self.policy(pack, path, reads).logprobs_K)


@dataclass
class Learner:
    """The policy's weights and the optimiser's moments, which every step changes; `step` counts the steps made.

    value_model: the critic, where it is a model of its own. export_dtype: the type to which versions round the weights;
    None where they do not. teacher: of distillation, whose weights no step changes unless they are the policy's own.
    """

    policy: Policy
    optimizer: torch.optim.Optimizer
    accelerator: Accelerator
    reference: Reference | None = None
    step: int = 0
    ranks: Ranks = ALONE
    value_model: Policy | None = None
    export_dtype: torch.dtype | None = None
    teacher: Reference | None = None

    @property
    def model(self) -> PreTrainedModel:
        """The policy's model."""
        model: PreTrainedModel = self.accelerator.unwrap_model(self.policy).model
        return model

    @property
    def weights(self) -> dict[str, Tensor]:
        """The model's state without the second names of tied weights. Adapters come first."""
        tied: dict[str, str] = self.model.all_tied_weights_keys
        own = {name: tensor for name, tensor in self.model.state_dict().items() if name not in tied}
        return dict(sorted(own.items(), key=lambda item: not of_adapter(item[0])))

    @property
    def values(self) -> nn.Module | None:
        """The weights of the critic alone, which checkpoints hold and versions do not; None without a critic."""
        return self.policy.value_head if self.value_model is None else self.value_model

    @property
    def value_head(self) -> ValueHead | None:
        """The critic's head; None without a critic."""
        return (self.policy if self.value_model is None else self.value_model).value_head


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies without gradients."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@torch.no_grad()
def _replace(own: Mapping[str, Tensor], new: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> None:
    """Copies one tensor after the other, rounded to `dtype`."""
    for name, tensor in new.items():
        own[name].copy_(tensor if dtype is None else tensor.to(dtype))
