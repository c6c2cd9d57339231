"""Tensors that may be divided among a trainer's processes."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from leyden.services.trainer.model.memory_8bit import dequantize, quantize


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


def product_dtype(tensor: Tensor) -> torch.dtype:
    """The type of matrix products with this tensor: autocast's, where that is on."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


def complete_number(value: Tensor) -> float:
    """A scalar that may be sharded. All ranks call it."""
    return float(value.full_tensor() if isinstance(value, DTensor) else value)


def divided_like(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a tensor that is complete or sharded already, placed as `like` is; no collective."""
    if isinstance(tensor, DTensor) or not isinstance(like, DTensor):
        return tensor.to(like.device)
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def local_part(tensor: Tensor) -> Tensor:
    """The values of a tensor that this process has: its rows of a sharded one, else all."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_row(tensor: Tensor) -> int:
    """The number of the first row that this process has."""
    if not isinstance(tensor, DTensor):
        return 0
    # As `torch.chunk` divides them, and with it FSDP. Copies of a model are the mesh's first axis.
    rows, mesh, axis = tensor.shape[0], tensor.device_mesh, tensor.device_mesh.ndim - 1
    return min(rows, mesh.get_local_rank(axis) * math.ceil(rows / mesh.size(axis)))


def rounds_to(complete: Tensor, rounded: Tensor, dtype: torch.dtype) -> bool:
    """Whether a tensor, complete or sharded, rounds to one that may be sharded, by this rank's values of it."""
    new = local_part(divided_like(complete, rounded))
    return torch.equal(new.to(dtype), local_part(rounded).to(dtype))


def replace_values(own: Tensor, complete: Tensor, dtype: torch.dtype | None = None) -> float:
    """Copies a complete tensor into one that may be sharded. Returns the largest change of a value on this rank.

    Args: dtype: the type to which `complete` was rounded: a value that rounds to the same one stays
    """
    return replace_part(own, local_part(divided_like(complete, own)), dtype)


def replace_part(own: Tensor, new: Tensor, dtype: torch.dtype | None = None) -> float:
    """`replace_values` by this process's rows of the new values."""
    own = local_part(own)
    new = new.to(own.device, own.dtype)
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
