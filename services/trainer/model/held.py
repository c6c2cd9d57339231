"""Weights of frozen layers that lie in memory in bfloat16, while everything is computed as if they did not."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class HeldLinear(nn.Linear):
    """A frozen layer whose weight lies in memory in bfloat16, and multiplies in the type of its inputs, or autocast's.

    Published weights are bfloat16: they lose nothing, and autocast rounds a float32 copy to the same numbers.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        """As `nn.Linear`'s."""
        autocast = torch.is_autocast_enabled(inputs.device.type)
        weight = self.weight if autocast else self.weight.to(inputs.dtype)
        return nn.functional.linear(inputs, weight, self.bias)


def hold_frozen(model: nn.Module, embeddings: Tensor) -> None:
    """Rounds the matrices of frozen linear layers to bfloat16, in place. A head that shares `embeddings` stays."""
    for module in model.modules():
        if type(module) is nn.Linear and not module.weight.requires_grad and module.weight is not embeddings:
            module.__class__ = HeldLinear
            module.weight.data = module.weight.data.bfloat16()
