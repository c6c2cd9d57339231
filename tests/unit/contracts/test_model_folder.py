"""Whether engines that were started with one model folder can serve the weights of another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from leyden.libs.contracts.model_folder import serving_mismatch

CONFIG: dict[str, Any] = {"model_type": "qwen2", "hidden_size": 64, "vocab_size": 3, "rope_theta": 1e6, "dtype": "f32"}
VOCABULARY = {"a": 0, "b": 1}


def folder(path: Path, config: dict[str, Any] | None = None, vocabulary: Any = None, **tokenizer: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    words = {"model": {"vocab": vocabulary or VOCABULARY}, "added_tokens": [{"content": "<e>", "id": 2}], **tokenizer}
    (path / "tokenizer.json").write_text(json.dumps(words))
    return path


def mismatch(tmp_path: Path, *args: Any, **tokenizer: Any) -> str | None:
    return serving_mismatch(folder(tmp_path / "served"), folder(tmp_path / "own", *args, **tokenizer))


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        {**CONFIG, "dtype": "bf16", "eos_token_id": 1, "transformers_version": "9"},
        {key: value for key, value in CONFIG.items() if key != "rope_theta"}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ],
)
def test_other_weights_dtypes_and_files_of_another_transformers_fit(tmp_path: Path, config: dict[str, Any]) -> None:
    assert mismatch(tmp_path, config) is None


def test_a_vocabulary_may_be_written_as_a_list_of_scores(tmp_path: Path) -> None:
    assert mismatch(tmp_path, None, [["a", -1.0], ["b", -2.0]]) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_size": 128}, "hidden_size 128, theirs 64"),
        ({"model_type": "llama"}, "model_type"),
        ({"vocab_size": 4}, "vocab_size"),
        ({"rope_theta": 1e4}, "rope"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope"),
    ],
)
def test_another_architecture_is_named(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    assert reason in str(mismatch(tmp_path, {**CONFIG, **change}))


def test_other_tokens_are_named(tmp_path: Path) -> None:
    assert "'a' is 1, theirs 0" in str(mismatch(tmp_path, None, {"a": 1, "b": 0}))


def test_a_further_added_token_is_named(tmp_path: Path) -> None:
    tokens = [{"content": "<e>", "id": 2}, {"content": "<tool>", "id": 3}]
    assert "'<tool>' is 3, theirs none" in str(mismatch(tmp_path, added_tokens=tokens))
