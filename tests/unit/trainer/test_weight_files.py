"""Processes of one trainer read a model together: each the rows of its shards."""

import ctypes
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from leyden.libs.contracts.config import RunConfig
from leyden.services.trainer.model.load import read_model, read_structure
from leyden.services.trainer.model.weight_files import WeightFiles
from leyden.services.trainer.state.assembly import assemble_learner
from tests.bench.bench_trainer import status
from tests.fakes.forked_trainer import run_forked
from tests.support.shared import free_port
from tests.unit.trainer import ranked
from tests.unit.trainer.cases import tiny_llama, tiny_qwen
from tests.unit.trainer.test_families import FAMILIES, tiny

DOCUMENT = {"name": "n", "dataset": "d", "agent": {"command": ["x"]}, "optimizer": {"learning_rate": 1e-4}}
VALUE = {"credit": {"baseline": {"type": "value"}}}
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "own critic": {"algorithm": {"type": "ppo_clip", "critic": {"trunk": "own"}}, **VALUE},
    "shared critic": {"algorithm": {"type": "ppo_clip", "critic": {"trunk": "shared"}}, **VALUE},
    "reference": {"algorithm": {"type": "ppo_clip", "kl_coefficient": 0.1}},
    "lora": {"training": {"lora": {"rank": 3}}},
    "held": {"training": {"lora": {"rank": 3, "base_dtype": "bfloat16"}}},
}
CASES = [
    *((family, "plain") for family in FAMILIES),
    *((family, change) for family in ("smollm2", "qwen3 moe", "gpt-oss") for change in CHANGES if change != "plain"),
]


def _document(change: str) -> RunConfig:
    return RunConfig.model_validate(DOCUMENT | CHANGES[change])


def _states(folder: Path, change: str, ranks: ranked.Ranks = ranked.ALONE) -> dict[str, Tensor]:
    learner = assemble_learner(folder, _document(change), Accelerator(cpu=True), ranks)
    found = dict(learner.policy.state_dict())
    reference = None if learner.reference is None else learner.reference.policy
    for name, one in (("critic", learner.value_model), ("reference", reference)):
        found |= {} if one is None else one.state_dict(prefix=f"{name}.")
    buffers = {f"buffer.{name}": one.clone() for name, one in learner.policy.named_buffers()}
    return ranked.gather(found, wanted=True) | buffers


def _assemble(rank: int, size: int, port: int, folder: Path, copies: int) -> None:
    ranks = ranked.join(rank, size, port, copies)
    with pytest.MonkeyPatch.context() as patch:
        # Whoever reads a whole model fails.
        patch.setattr("leyden.services.trainer.state.assembly.read_model", None)
        for family, change in _cases(copies):
            torch.save(_states(folder / family, change, ranks), folder / f"{family}.{change}.{rank}.pt")
    ranks.close()


def _cases(copies: int) -> list[tuple[str, str]]:
    return CASES if copies == 1 else [("smollm2", "plain"), ("smollm2", "lora"), ("qwen3 moe", "plain")]


@pytest.mark.parametrize(("size", "copies"), [(3, 1), (4, 2)])
def test_ranks_that_read_their_rows_have_the_weights_of_one_process(tmp_path: Path, size: int, copies: int) -> None:
    for family in FAMILIES:
        # Published weights are bfloat16.
        dtype = torch.bfloat16 if family.startswith(("qwen", "gpt")) else torch.float32
        tiny(family).to(dtype).save_pretrained(tmp_path / family)
    run_forked(_assemble, size, free_port(), tmp_path, copies, processes=size)
    for family, change in _cases(copies):
        alone = _states(tmp_path / family, change)
        if change == "plain":
            read = read_model(tmp_path / family)
            expected = read.state_dict(prefix="model.")
            expected |= {f"buffer.{name}": one for name, one in read.named_buffers(prefix="model")}
            assert alone.keys() == expected.keys()
            assert not [key for key, tensor in expected.items() if not torch.equal(alone[key], tensor)], family
        for rank in range(size):
            found = torch.load(tmp_path / f"{family}.{change}.{rank}.pt")
            assert found.keys() == alone.keys()
            assert not [key for key, tensor in alone.items() if not torch.equal(found[key], tensor)], (family, change)


def test_names_with_and_without_the_prefix_of_the_decoder_are_read(tmp_path: Path) -> None:
    model = tiny_qwen(0).float()
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    files, empty = WeightFiles(tmp_path), read_structure(tmp_path)
    assert files.has(empty)
    for name, parameter in empty.base_model.named_parameters():
        assert torch.equal(files.rows(empty.base_model, name, parameter), model.base_model.state_dict()[name])
    assert torch.equal(read_model(tmp_path).lm_head.weight, files.rows(empty, "lm_head.weight", empty.lm_head.weight))


@pytest.mark.parametrize("size", ["1GB", "10KB"])
def test_other_files_with_the_same_names_are_not_read(tmp_path: Path, size: str) -> None:
    model = tiny_qwen(0).float()
    model.save_pretrained(tmp_path, max_shard_size=size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (size == "10KB")
    others = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    save_file(others, tmp_path / "zzz.safetensors")
    files = WeightFiles(tmp_path)
    for name, parameter in model.named_parameters():
        assert torch.equal(files.rows(model, name, parameter), parameter)


def test_a_folder_of_another_model_is_told(tmp_path: Path) -> None:
    tiny_llama(0).save_pretrained(tmp_path)
    files = WeightFiles(tmp_path)
    with pytest.raises(LookupError, match="belongs to another model"):
        files.rows(tiny_llama(0), "lm_head.bias", torch.empty(3, device="meta"))
    with pytest.raises(ValueError, match="the shape of another model"):
        files.rows(tiny_llama(0), "model.norm.weight", torch.empty(3, device="meta"))


LAYERS, HIDDEN, INNER, VOCABULARY = 8, 512, 2048, 8000
M_MMAP_THRESHOLD = -3


def _read(rank: int, size: int, port: int, folder: Path) -> None:
    """Writes the peak of resident memory while a model is read, above what the process had, in model sizes."""
    ranks = ranked.join(rank, size, port)
    # Freed tensors leave the process at once, and count no longer.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)
    # The first model imports modules, which are no weights.
    assemble_learner(folder / "tiny", _document("plain"), Accelerator(cpu=True), ranks)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    learner = assemble_learner(folder / "model", _document("plain"), Accelerator(cpu=True), ranks)
    size_bytes = 4 * sum(one.numel() for one in learner.policy.parameters())
    (folder / f"{size}.{rank}").write_text(str((status("VmHWM") - before) / size_bytes))
    if size > 1:
        ranks.close()


def test_a_rank_that_reads_a_model_has_little_more_than_its_share_in_memory(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tiny_llama(0).float().save_pretrained(tmp_path / "tiny")
    run_forked(_read, 4, free_port(), tmp_path, processes=4)
    found = max(float((tmp_path / f"4.{rank}").read_text()) for rank in range(4))
    assert found < 1.3 / 4
