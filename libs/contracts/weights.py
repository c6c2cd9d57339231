"""The weight files of a policy version: which they are, and the hash that the trainer records of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".pth")
ADAPTER_FOLDER = "adapter"
"""Subfolder of a version's folder with its LoRA adapter in peft's format."""


def weight_files(folder: Path) -> list[Path]:
    """Returns a folder's weight files by name, its adapter's too; none where there is no folder."""
    found = [*folder.glob("*"), *folder.glob(f"{ADAPTER_FOLDER}/*")]
    return sorted(file for file in found if file.suffix in WEIGHT_SUFFIXES)


def weights_sha256(folder: Path) -> str:
    """The joint hash of a folder's weight files by name. Reads every file.

    Raises: OSError: a file cannot be read
    """
    return joint_sha256((str(file.relative_to(folder)), file_sha256(file)) for file in weight_files(folder))


def joint_sha256(files: Iterable[tuple[str, str]]) -> str:
    """SHA-256 over the line `<name> <SHA-256>\\n` of each file, in their order, in hexadecimal."""
    return hashlib.sha256("".join(f"{name} {sha256}\n" for name, sha256 in files).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """Returns the SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
