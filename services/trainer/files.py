"""Tensors to disk without a pause: a safetensors file written from where tensors lie, and hashed there.

Where memory is handed out page by page, as in a virtual machine, most of the time of writing a large file goes into
the pages that hold it until they are on the disk. A file of the right size, read once ahead of time, has them already:
measured 0.13 s against 1.15 s for 512 MiB.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_PIECE_BYTES = 8 * 2**20


def safetensors(tensors: Mapping[str, Tensor]) -> list[memoryview]:
    """The bytes of a safetensors file, piece by piece; they lie where the tensors do, and change with these."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    return [memoryview(_header(ordered)), *(_bytes_of(tensor) for _, tensor in ordered)]


def write(pieces: Iterable[memoryview], file: Path) -> None:
    """Writes a file, on the pages of what has the name already; others see it whole, the disk may not yet."""
    with file.open("r+b" if file.exists() else "xb", buffering=0) as target:
        for piece in pieces:
            while piece:
                piece = piece[target.write(piece) :]
        target.truncate()


def sha256(pieces: Iterable[memoryview]) -> str:
    """The hash of these bytes, as hex digits."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def reserve(file: Path, size_bytes: int) -> None:
    """Makes a file of this size whose pages are in memory, or a smaller one where there is no room."""
    file.parent.mkdir(parents=True, exist_ok=True)
    filling, room, done = file.with_suffix(".filling"), bytearray(_PIECE_BYTES), 0
    with filling.open("w+b", buffering=0) as target:
        with contextlib.suppress(OSError):
            os.posix_fallocate(target.fileno(), 0, size_bytes)
        while done < size_bytes and (count := target.readinto(room)):
            done += count
    # Whoever takes it before finds nothing.
    filling.rename(file)


def _header(ordered: list[tuple[str, Tensor]]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, tensor in ordered:
        end = begin + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    # Tensors begin at a multiple of eight.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().data
