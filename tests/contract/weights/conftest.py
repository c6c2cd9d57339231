"""The versions of a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from leyden.libs.contracts.weights import weights_sha256
from leyden.libs.weights import VersionKey


@pytest.fixture
def version(tmp_path: Path) -> Path:
    """A version with an adapter, and with what is no part of it."""
    return make_version(tmp_path / "runs" / "run-a" / "versions" / "1")


def make_version(folder: Path) -> Path:
    (folder / "adapter").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(os.urandom(3 * 2**20 + 5))
    (folder / "adapter" / "adapter_model.safetensors").write_bytes(b"adapter")
    (folder / "config.json").write_text("{}")
    (folder / ".hidden").write_text("hidden")
    return folder


def key_of(folder: Path, version: int = 1) -> VersionKey:
    return VersionKey("run-a", version, weights_sha256(folder))


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()}
