"""Parameters, gradients and optimiser moments divided among a trainer's processes, by torch's FSDP2.

Ranks have different prefixes and packs, so that passes cannot meet in collectives. A step gathers all parameters once,
each rank makes its own passes on them, and one equal pass of all ranks at the end adds the gradients up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from transformers.modeling_layers import GradientCheckpointingLayer

from leyden.services.trainer.model.forward import Outputs, Policy, Reads
from leyden.services.trainer.rows.tree import plan_forest


def shard(policy: Policy, device: torch.device, size: int, *, bfloat16: bool = False) -> None:
    """Divides the policy's parameters among `size` processes, in place. All ranks call it.

    Args: bfloat16: compute in bfloat16; parameters, summed gradients and moments stay float32
    """
    mesh = init_device_mesh(device.type, (size,))
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bfloat16 else MixedPrecisionPolicy()
    layers = [module for module in policy.modules() if isinstance(module, GradientCheckpointingLayer)]
    if policy.value_head is not None:
        # Its own group: values stay float32.
        fully_shard(policy.value_head, mesh=mesh, reshard_after_forward=False)
    for module in (*layers, policy):
        fully_shard(module, mesh=mesh, reshard_after_forward=False, mp_policy=precision)
    for module in _sharded(policy):
        # The loss is a sum whose weights contain the denominators of the entire batch.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(enable=True)
    register_fsdp_forward_method(policy, "prefix")
    # FSDP takes the module that runs first for the root of all others.
    with unsharded(policy), torch.no_grad():
        _equal_pass(policy)


@contextmanager
def unsharded(policy: nn.Module) -> Iterator[None]:
    """Gathers all parameters of a policy. Inside the block passes need no collective, and gradients add up locally.

    All ranks enter it. It does nothing to a policy that is not sharded.
    """
    modules = _sharded(policy)
    for module in modules:
        module.set_requires_gradient_sync(False, recurse=False)
        module.set_reshard_after_backward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.reshard()


def sum_gradients(policy: Policy, *, values_alone: bool = False) -> None:
    """Replaces each gradient by the shard of its sum over all ranks. All ranks call it inside `unsharded`.

    Args: values_alone: the value head alone has gradients
    """
    if not (modules := _sharded(policy)):
        return
    for module in modules:
        module.set_requires_gradient_sync(True, recurse=False)
        module.set_reshard_after_backward(True, recurse=False)
    torch.autograd.backward(_equal_pass(policy, values_alone=values_alone) * 0)


def _sharded(policy: nn.Module) -> list[FSDPModule]:
    return [module for module in policy.modules() if isinstance(module, FSDPModule)]


def _equal_pass(policy: Policy, *, values_alone: bool = False) -> Tensor:
    """The sum of the outputs of a forward pass over one token, the same on all ranks."""
    (pack,) = plan_forest([np.zeros(1, np.int32)], 1).packs
    reads = Reads(np.zeros(1, np.int64), np.zeros(1, np.int64), np.ones(1, np.float32))
    found: Outputs = policy(pack, [], reads, values_alone=values_alone)
    return found.logprobs_K.sum() if found.values_K is None else found.logprobs_K.sum() + found.values_K.sum()
