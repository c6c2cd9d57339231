"""Parameters, gradients and optimiser moments divided among a trainer's processes, by torch's FSDP2.

Ranks have different trunks and packs, so that passes cannot meet in collectives. A step gathers all parameters once,
each rank makes its own passes on them, and one equal pass of all ranks at the end adds the gradients up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from leyden.services.trainer.model.forward import Outputs, Policy, Reads
from leyden.services.trainer.model.memory_8bit import dequantize, quantize
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
    register_fsdp_forward_method(policy, "trunk")
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


def gather(tensors: Mapping[str, Tensor], *, wanted: bool, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The complete tensors, on the CPU those that were sharded; one at a time on the device. All ranks call it.

    Args: wanted: whether this rank keeps them; the others get an empty dictionary; dtype: None for each tensor's own
    """
    found = {}
    for name, stored in tensors.items():
        tensor = stored if dtype is None else stored.to(dtype)
        complete = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if wanted:
            found[name] = complete.cpu() if isinstance(tensor, DTensor) else complete
    return found


def complete_number(value: Tensor) -> float:
    """A scalar that may be sharded. All ranks call it."""
    return float(value.full_tensor() if isinstance(value, DTensor) else value)


def divided_like(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a tensor that is complete or sharded already, placed as `like` is; no collective."""
    if isinstance(tensor, DTensor) or not isinstance(like, DTensor):
        return tensor.to(like.device)
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def rounds_to(complete: Tensor, rounded: Tensor, dtype: torch.dtype) -> bool:
    """Whether a tensor, complete or sharded, rounds to one that may be sharded, by this rank's values of it."""
    new = divided_like(complete, rounded)
    if isinstance(rounded, DTensor) and isinstance(new, DTensor):
        rounded, new = rounded.to_local(), new.to_local()
    return torch.equal(new.to(dtype), rounded.to(dtype))


def replace_values(own: Tensor, complete: Tensor, dtype: torch.dtype | None = None) -> float:
    """Copies a complete tensor into one that may be sharded. Returns the largest change of a value on this rank.

    Args: dtype: the type to which `complete` was rounded: a value that rounds to the same one stays
    """
    new = divided_like(complete, own)
    if isinstance(own, DTensor) and isinstance(new, DTensor):
        own, new = own.to_local(), new.to_local()
    if dtype is not None:
        new = torch.where(own.to(dtype) == new, own, new)
    difference = (own - new).abs()
    own.copy_(new)
    return float(difference.max()) if difference.numel() else 0.0


def quantize_shards(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """`quantize` of a tensor that may be sharded: its rows are divided, and with them codes and scales."""
    if not isinstance(values, DTensor):
        return quantize(values, signed=signed)
    codes, scales = quantize(values.to_local(), signed=signed)
    return _divided(codes, values), _divided(scales, values)


def dequantize_shards(codes: Tensor, scales: Tensor, dtype: torch.dtype, *, signed: bool) -> Tensor:
    """`dequantize` of tensors that may be sharded."""
    if not (isinstance(codes, DTensor) and isinstance(scales, DTensor)):
        return dequantize(codes, scales, dtype, signed=signed)
    return _divided(dequantize(codes.to_local(), scales.to_local(), dtype, signed=signed), codes)


def _divided(local: Tensor, like: DTensor) -> DTensor:
    """This rank's rows as a part of a tensor whose rows are divided as those of `like`."""
    shape = torch.Size([like.shape[0], *local.shape[1:]])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)


def _sharded(policy: nn.Module) -> list[FSDPModule]:
    return [module for module in policy.modules() if isinstance(module, FSDPModule)]


def _equal_pass(policy: Policy, *, values_alone: bool = False) -> Tensor:
    """The sum of the outputs of a forward pass over one token, the same on all ranks."""
    (pack,) = plan_forest([np.zeros(1, np.int32)], 1).packs
    reads = Reads(np.zeros(1, np.int64), np.zeros(1, np.int64), np.ones(1, np.float32))
    found: Outputs = policy(pack, [], reads, values_alone=values_alone)
    return found.logprobs_K.sum() if found.values_K is None else found.logprobs_K.sum() + found.values_K.sum()
