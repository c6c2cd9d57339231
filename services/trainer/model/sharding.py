"""Parameters, gradients and optimiser moments divided among a trainer's processes, by torch's FSDP2.

A pass gathers one layer after the other and frees each, and a backward pass leaves this rank's part of a gradient,
summed over all ranks: no rank holds the whole model. All ranks make the same passes, as `rows.passes` orders them.
"""

from __future__ import annotations

import warnings
from functools import cache

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from transformers.modeling_layers import GradientCheckpointingLayer

from leyden.services.trainer.model.forward import Policy

# Keys and values are views, and nothing changes them in place.
warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)


def shard(policy: Policy, device: torch.device, size: int, *, copies: int = 1, bfloat16: bool = False) -> None:
    """Divides the policy's parameters among `size` processes, in place. All ranks call it.

    Args: copies: so many groups of consecutive processes have a copy each, which they divide, and sum gradients over
        all; bfloat16: compute in bfloat16; parameters, summed gradients and moments stay float32
    """
    mesh = _mesh(device.type, size, copies)
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bfloat16 else MixedPrecisionPolicy()
    layers: list[nn.Module] = [one for one in policy.modules() if isinstance(one, GradientCheckpointingLayer)]
    if policy.value_head is not None:
        # Its own group: values stay float32.
        fully_shard(policy.value_head, mesh=mesh)
    for module in layers:
        fully_shard(module, mesh=mesh, mp_policy=precision)
    # Embeddings and head: gathered anew for a backward pass, since weights may change between the two.
    fully_shard(policy, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            # The loss is a sum whose weights contain the denominators of the entire batch.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(enable=True)
    register_fsdp_forward_method(policy, "states")


@cache
def _mesh(kind: str, size: int, copies: int) -> DeviceMesh:
    """One for all models of a trainer: copies have process groups of their own."""
    if copies == 1:
        return init_device_mesh(kind, (size,))
    return init_device_mesh(kind, (copies, size // copies), mesh_dim_names=("copy", "shard"))
