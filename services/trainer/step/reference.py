"""The KL reference: the base model, or the run's own version of every n-th step.

With LoRA neither needs a second model: the base model is the policy without its adapters, and an older version is the
policy with that version's adapters, which are small.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from leyden.services.trainer.model.forward import Policy
from leyden.services.trainer.model.lora import adapter_parameters


@dataclass
class Reference:
    """A policy whose weights do not change within a step.

    every: n, for the version of step floor(step / n) · n; None for weights that never change. adapter: with LoRA and
    `every`, the reference's adapters by parameter name, and `policy` is then the one that is trained. dtype: the type
    to which versions round the weights; None where they do not.
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
        """The policy with the reference's weights; not inside `unsharded`."""
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


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies without gradients."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@torch.no_grad()
def _replace(own: Mapping[str, Tensor], new: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> None:
    """Copies one tensor after the other, rounded to `dtype`."""
    for name, tensor in new.items():
        own[name].copy_(tensor if dtype is None else tensor.to(dtype))
