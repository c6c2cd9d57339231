"""Tensors in 8 bits a value: each block of a row has a scale, and each value is a code of a table.

Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization (arXiv 2110.02861). Three rules differ.
No block crosses the end of a row, because FSDP2 divides rows among ranks. The signed table is symmetric and contains
-1, so a tensor that is read and stored again has the same codes and scales. Without a sign only 0 has the code 0.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

BLOCK = 256
"""Values of a block; a row's last block may have fewer."""
SMALLEST_SCALE = 2.0**-100
"""Products of codes and scales stay normal floats, which no device flushes to 0."""
PART_VALUES = 2**24
"""Rows are converted in parts of about so many values: a conversion takes 12 bytes a value beside its result."""


def quantize(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """The nearest code of each value, uint8 in the shape of `values`, and the scales, float32 [rows, blocks of a row].

    A scale is the largest magnitude of its block. Without a sign a value above 0 is at least the smallest code above 0.

    Args: values: at least two axes, finite, on one device; signed: False for values that are never negative
    """
    rows = values.flatten(1)
    parts = [_quantize(part, signed=signed) for part in torch.split(rows, _part_rows(rows))]
    return torch.cat([codes for codes, _ in parts]).reshape(values.shape), torch.cat([scales for _, scales in parts])


def _quantize(rows: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    blocks = -(-rows.shape[1] // BLOCK)
    padded = nn.functional.pad(rows, (0, blocks * BLOCK - rows.shape[1])).reshape(len(rows), blocks, BLOCK)
    scales = padded.abs().amax(2).clamp(min=SMALLEST_SCALE).float()
    shares = padded / scales[..., None].to(rows.dtype)
    codes = torch.bucketize(shares, _boundaries(signed).to(shares), out_int32=True).to(torch.uint8)
    if not signed:
        codes = torch.maximum(codes, (padded > 0).to(torch.uint8))
    return codes.flatten(1)[:, : rows.shape[1]], scales


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype, *, signed: bool) -> Tensor:
    """The values of `quantize`'s codes."""
    rows, table = codes.flatten(1), code_values(signed).to(codes.device, dtype)
    found, size = torch.empty(rows.shape, dtype=dtype, device=codes.device), _part_rows(rows)
    for into, part, own in zip(*(torch.split(one, size) for one in (found, rows, scales)), strict=True):
        torch.mul(table[part.int()], own.to(dtype).repeat_interleave(BLOCK, dim=1)[:, : part.shape[1]], out=into)
    return found.reshape(codes.shape)


def _part_rows(rows: Tensor) -> int:
    return max(1, PART_VALUES // rows.shape[1])


@cache
def code_values(signed: bool) -> Tensor:
    """The value of each code, ascending, float32: 127 magnitudes of both signs and 0, or 0 and 255 magnitudes.

    Seven decades have magnitudes: the highest has 64 of a sign, or 128 without one, and each lower one half as many.
    """
    magnitudes = []
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (0 if signed else 1)) + 1, dtype=torch.float64)
        magnitudes.append((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6))
    found = torch.cat(magnitudes)
    one, zero = found.new_ones(1), found.new_zeros(1)
    if signed:
        found = torch.cat([found[:-1], one])
        return torch.cat([-found.flip(0), zero, found]).float()
    return torch.cat([zero, found, one]).float()


@cache
def _boundaries(signed: bool) -> Tensor:
    """Halfway between neighbouring codes."""
    values = code_values(signed).double()
    return (values[:-1] + values[1:]) / 2
