from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from leyden.services.engine.config import read_config
from leyden.services.engine.errors import UnsupportedModel, WeightsRefused
from leyden.services.engine.weights import load_weights
from tests.fakes.tiny_engine import new_sequence, run, tiny_scheduler

SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": 3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def qwen() -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False))


def llama3() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LLAMA3, head_dim=16, tie_word_embeddings=True))


@pytest.mark.parametrize("build", [qwen, llama3])
def test_architectures_equal_transformers(build: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build().to(torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.2) if "norm" not in name else None
    model.save_pretrained(tmp_path)
    scheduler = tiny_scheduler(tmp_path)
    sequence = new_sequence(scheduler, list(range(100, 180)))
    run(scheduler, sequence)
    ids = torch.tensor([sequence.token_ids().tolist()])
    with torch.no_grad():
        scored = model(ids).logits[0].log_softmax(-1)
    expected = [float(scored[79 + i, token]) for i, token in enumerate(sequence.output_ids)]
    assert sequence.logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"model_type": "mamba"}, "use one of llama"),
        ({"hidden_act": "gelu"}, "only silu"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "use default, linear or llama3"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_remedy(
    change: dict[str, Any], remedy: str, tiny_model: Path, tmp_path: Path
) -> None:
    raw = json.loads((tiny_model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises(UnsupportedModel, match=remedy):
        read_config(tmp_path)


def test_damaged_weights_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    config = read_config(tiny_model)
    with pytest.raises(WeightsRefused, match=r"no \.safetensors"):
        load_weights(tmp_path, config)
    content = (tiny_model / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(WeightsRefused, match="cannot be read"):
        load_weights(tmp_path, config)


@pytest.mark.parametrize("end", [0, 1, 7, 8, 100, 1000, -1])
def test_weights_cut_anywhere_are_refused(tiny_model: Path, tmp_path: Path, end: int) -> None:
    (tmp_path / "model.safetensors").write_bytes((tiny_model / "model.safetensors").read_bytes()[:end])
    with pytest.raises(WeightsRefused, match="cannot be read"):
        load_weights(tmp_path, read_config(tiny_model))


@pytest.mark.parametrize(
    "content", [b"PK\x03\x04", b"\xff" * 64, b"\x02" + b"\0" * 7 + b"{}", b"\x04" + b"\0" * 7 + b"null", b"\0" * 4096]
)
def test_weights_that_are_garbage_are_refused(tiny_model: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightsRefused):
        load_weights(tmp_path, read_config(tiny_model))


def test_weights_that_are_a_folder_or_have_no_path_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    for folder in (tmp_path, Path("a\0b"), tmp_path / ("x" * 300)):
        with pytest.raises(WeightsRefused):
            load_weights(folder, read_config(tiny_model))


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"model_type": "llama"}',
        b'{"model_type": ["llama"]}',
        b'{"model_type": "llama", "num_attention_heads": "two"}',
        b'{"model_type": "llama", "num_attention_heads": 0, "hidden_size": 8, "vocab_size": 8, "intermediate_size": 8,'
        b' "num_hidden_layers": 1}',
    ],
    ids=lambda content: repr(content[:40]),
)
def test_a_config_that_is_garbage_is_refused_with_the_remedy(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UnsupportedModel, match=r"config\.json|use one of"):
        read_config(tmp_path)
