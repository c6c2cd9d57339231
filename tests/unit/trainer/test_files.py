import hashlib
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from leyden.services.trainer.files import reserve, safetensors, sha256, write

TENSORS = {
    "random": torch.arange(5, dtype=torch.uint8),
    "matrix": torch.randn(3, 4),
    "turned": torch.randn(3, 4).T,
    "step": torch.tensor(3.0),
    "none": torch.zeros(0, 2),
    "narrow": torch.randn(2, 2).bfloat16(),
    "long": torch.tensor([2**40]),
}


@pytest.mark.parametrize("reserved_bytes", [None, 0, 100, 100_000])
def test_what_is_written_is_read_whatever_was_there_before(tmp_path: Path, reserved_bytes: int | None) -> None:
    file = tmp_path / "weights.safetensors"
    if reserved_bytes is not None:
        reserve(file, reserved_bytes)
        assert file.stat().st_size == reserved_bytes
    pieces = safetensors(TENSORS)
    write(pieces, file)
    assert sha256(pieces) == hashlib.sha256(file.read_bytes()).hexdigest()
    found = load_file(file)
    assert found.keys() == TENSORS.keys()
    assert all(found[name].dtype == TENSORS[name].dtype and torch.equal(found[name], TENSORS[name]) for name in found)
    assert list(tmp_path.iterdir()) == [file]


def test_without_room_nothing_is_reserved_and_writing_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    file = tmp_path / "weights.safetensors"
    reserve(file, 100_000)
    assert file.stat().st_size == 0
    write(safetensors(TENSORS), file)
    assert load_file(file).keys() == TENSORS.keys()
