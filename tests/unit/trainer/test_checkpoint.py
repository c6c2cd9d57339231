import errno
import gc
import json
import resource
import shutil
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.weights import file_sha256, weight_files
from leyden.libs.store.locks import LockLost
from leyden.services.trainer.model.forward import Policy
from leyden.services.trainer.model.load import read_model
from leyden.services.trainer.ranks.collectives import ALONE
from leyden.services.trainer.ranks.messages import Load
from leyden.services.trainer.rows.progress import Progress
from leyden.services.trainer.state import folders, resume, saving, shards
from leyden.services.trainer.state.assembly import _export_dtype, assemble_learner, make_accelerator
from leyden.services.trainer.state.checkpoints import checkpoint_state
from leyden.services.trainer.state.folders import CheckpointDamaged, LockCheck, clear_scratch, no_lock, remove_folder
from leyden.services.trainer.state.resume import restore_learner
from leyden.services.trainer.state.saving import begin_checkpoint, save_checkpoint
from leyden.services.trainer.state.versions import WEIGHTS_NAME, adopt_weights, describe, export_version
from leyden.services.trainer.step.learner import Learner
from leyden.services.trainer.step.step import optimizer_step
from tests.unit.trainer.cases import agent_samples

CPU = make_accelerator("cpu", "float32")
CONFIG = RunConfig.model_validate(
    {"name": "n", "dataset": "d", "agent": {"command": ["x"]}, "optimizer": {"learning_rate": 1e-3}}
)


def step(learner: Learner, seed: int) -> float:
    return optimizer_step(learner, agent_samples(seed), CONFIG)["loss"]


def test_a_resumed_run_continues_bit_for_bit(tiny_model: Path, tmp_path: Path) -> None:
    straight = assemble_learner(tiny_model, CONFIG, CPU)
    step(straight, 0)
    export = export_version(straight, tiny_model, tmp_path / "versions" / "1")
    progress = Progress("run-a", 1, export.content_sha256)
    save_checkpoint(checkpoint_state(straight), progress, tmp_path / "checkpoints" / "1")
    expected_loss = step(straight, 1)

    resumed = restore_learner(
        Load(tiny_model, CONFIG, (export.path, tmp_path / "checkpoints" / "1", progress)),
        make_accelerator("cpu", "float32"),
    )
    assert resumed.step == 1
    assert step(resumed, 1) == expected_loss
    pairs = zip(straight.policy.state_dict().values(), resumed.policy.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_run_whose_versions_round_the_weights_continues_bit_for_bit(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig.model_validate(
        {**CONFIG.model_dump(exclude_unset=True), "training": {"export_dtype": "bfloat16"}}
    )
    straight = assemble_learner(tiny_model, config, CPU)
    optimizer_step(straight, agent_samples(0), config)
    export = export_version(straight, tiny_model, tmp_path / "1")
    version = load_file(export.path / WEIGHTS_NAME)
    weights = straight.policy.model.state_dict()
    assert all(torch.equal(tensor, weights[name].bfloat16()) for name, tensor in version.items())
    assert any(not torch.equal(tensor.float(), weights[name]) for name, tensor in version.items())
    # Two steps whose weights round to the same: the version changes nothing, and another version all that differs.
    before = {name: tensor.clone() for name, tensor in weights.items()}
    assert adopt_weights(straight, export.path) == 0
    assert adopt_weights(straight, tiny_model) > 0
    adopt_weights(straight, export.path)
    assert all(torch.equal(tensor.bfloat16(), before[name].bfloat16()) for name, tensor in weights.items())
    for name, tensor in weights.items():
        tensor.copy_(before[name])

    progress = Progress("run-a", 1, export.content_sha256)
    state, _ = begin_checkpoint(straight, tmp_path / "c")
    monkeypatch.setattr(folders, "FILE_BYTES", 300_000)
    save_checkpoint(state, progress, tmp_path / "c")
    assert len(weight_files(tmp_path / "c")) > 3
    expected_loss = optimizer_step(straight, agent_samples(1), config)["loss"]
    # A document may change the type: the weights are still those of the checkpoint.
    for dtype in ("bfloat16", "float32"):
        changed = config.model_copy(update={"training": config.training.model_copy(update={"export_dtype": dtype})})
        resumed = restore_learner(Load(tiny_model, changed, (export.path, tmp_path / "c", progress)), CPU)
        assert optimizer_step(resumed, agent_samples(1), changed)["loss"] == expected_loss
        pairs = zip(straight.policy.state_dict().values(), resumed.policy.state_dict().values(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_a_checkpoint_that_lacks_one_of_its_weights_is_damaged(tiny_model: Path, tmp_path: Path) -> None:
    config = RunConfig.model_validate(
        {**CONFIG.model_dump(exclude_unset=True), "training": {"export_dtype": "bfloat16"}}
    )
    learner = assemble_learner(tiny_model, config, CPU)
    export = export_version(learner, tiny_model, tmp_path / "1")
    state, _ = begin_checkpoint(learner, tmp_path / "c")
    del state["weights.model.norm.weight"]
    progress = Progress("run-a", 1, export.content_sha256)
    save_checkpoint(state, progress, tmp_path / "c")
    with pytest.raises(CheckpointDamaged, match=r"weights\.model\.norm\.weight"):
        restore_learner(Load(tiny_model, config, (export.path, tmp_path / "c", progress)), CPU)


def test_an_export_is_a_complete_hugging_face_folder(tiny_model: Path, tmp_path: Path) -> None:
    learner = assemble_learner(tiny_model, CONFIG, CPU)
    export = export_version(learner, tiny_model, tmp_path / "1")
    assert {file.name for file in tiny_model.iterdir() if file.suffix != ".safetensors"} <= {
        file.name for file in export.path.iterdir()
    }
    assert export.size_bytes == sum(file.stat().st_size for file in export.path.iterdir())
    again = assemble_learner(export.path, CONFIG, CPU)
    pairs = zip(learner.policy.state_dict().values(), again.policy.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert [entry.name for entry in tmp_path.iterdir()] == ["1"]


def test_a_large_version_has_files_of_bounded_size_and_an_index(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = assemble_learner(tiny_model, CONFIG, CPU)
    single = load_file(export_version(learner, tiny_model, tmp_path / "1").path / WEIGHTS_NAME)
    monkeypatch.setattr(folders, "FILE_BYTES", 100_000)
    version = export_version(learner, tiny_model, tmp_path / "2").path
    files = weight_files(version)
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    parts = [load_file(file) for file in files]
    assert len(parts) > 3
    assert all(sum(tensor.nbytes for tensor in part.values()) <= 100_000 or len(part) == 1 for part in parts)
    found = {name: tensor for part in parts for name, tensor in part.items()}
    assert found.keys() == single.keys()
    assert all(torch.equal(tensor, single[name]) for name, tensor in found.items())
    index = json.loads((version / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in single.values())
    assert {name: tensor.shape for name, tensor in read_model(version).state_dict().items()} == {
        name: tensor.shape for name, tensor in learner.policy.model.state_dict().items()
    }
    assert adopt_weights(learner, version) == 0


@pytest.mark.parametrize(
    ("training", "device", "dtype"),
    [
        ({"precision": "bfloat16"}, "cuda", torch.bfloat16),
        ({"precision": "bfloat16"}, "cpu", None),
        ({}, "cuda", torch.bfloat16),
        ({}, "cpu", None),
        ({"precision": "float32"}, "cuda", None),
        ({"precision": "bfloat16", "export_dtype": "float32"}, "cuda", None),
        ({"export_dtype": "bfloat16"}, "cpu", torch.bfloat16),
    ],
)
def test_versions_have_the_precision_of_a_gpu_unless_the_document_names_a_type(
    training: dict[str, str], device: str, dtype: torch.dtype | None
) -> None:
    config = RunConfig.model_validate({**CONFIG.model_dump(exclude_unset=True), "training": training})
    assert _export_dtype(config, torch.device(device)) == dtype


def test_the_hash_covers_only_the_weights(tiny_model: Path, tmp_path: Path) -> None:
    learner = assemble_learner(tiny_model, CONFIG, CPU)
    one = export_version(learner, tiny_model, tmp_path / "1")
    two = export_version(learner, tiny_model, tmp_path / "2")
    (two.path / "config.json").write_text((two.path / "config.json").read_text() + "\n")
    assert describe(two.path).content_sha256 == one.content_sha256
    step(learner, 0)
    assert export_version(learner, tiny_model, tmp_path / "2").content_sha256 != one.content_sha256


def test_a_failed_write_preserves_the_old_folder(tiny_model: Path, tmp_path: Path) -> None:
    learner = assemble_learner(tiny_model, CONFIG, CPU)
    old = export_version(learner, tiny_model, tmp_path / "1")
    with pytest.raises(FileNotFoundError):
        export_version(learner, tmp_path / "missing", tmp_path / "1")
    assert describe(tmp_path / "1").content_sha256 == old.content_sha256
    assert [entry.name for entry in tmp_path.iterdir()] == ["1"]


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files and folders brought to the disk, in order."""
    names: list[str] = []

    def sync(path: Path) -> None:
        names.append(path.name)

    monkeypatch.setattr(folders, "_sync", sync)
    return names


def write_checkpoint(folder: Path, check_lock: LockCheck = no_lock) -> None:
    save_checkpoint({"random": torch.get_rng_state()}, Progress("run-a", 1, "hash"), folder, check_lock)


@pytest.mark.parametrize("kind", ["version", "checkpoint"])
def test_a_folder_has_its_name_only_once_it_is_durable(
    tiny_model: Path, tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folder, at_the_name = tmp_path / "parent" / "1", []

    def fault_point(point: str) -> None:
        if point == f"trainer.{kind}_unnamed":
            at_the_name.extend(synced)

    monkeypatch.setattr(folders, "fault_point", fault_point)
    if kind == "version":
        export_version(assemble_learner(tiny_model, CONFIG, CPU), tiny_model, folder)
    else:
        write_checkpoint(folder)
    assert sorted(at_the_name[:-1]) == sorted(file.name for file in folder.iterdir())
    assert at_the_name[-1].startswith(".1.")
    assert synced == [*at_the_name, "parent"]


def test_a_file_that_cannot_be_written_is_an_error_of_the_system(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="too large") as caught:
            write_checkpoint(tmp_path / "checkpoints" / "1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.parametrize("lost_at", ["the beginning", "the end"])
def test_a_trainer_that_lost_the_run_does_not_remove_its_successors_folder(
    tiny_model: Path, tmp_path: Path, lost_at: str
) -> None:
    learner = assemble_learner(tiny_model, CONFIG, CPU)
    old = export_version(learner, tiny_model, tmp_path / "1")
    step(learner, 0)
    answers = iter([] if lost_at == "the beginning" else [None])
    scratches: list[str] = []

    def check_lock() -> None:
        scratches.extend(entry.name for entry in tmp_path.iterdir() if entry.name != "1")
        if next(answers, "lost") == "lost":
            raise LockLost("another trainer may have gone on")

    with pytest.raises(LockLost):
        export_version(learner, tiny_model, tmp_path / "1", check_lock)
    assert describe(tmp_path / "1").content_sha256 == old.content_sha256
    assert len(scratches) == (0 if lost_at == "the beginning" else 1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["1"]


def test_a_step_is_repeated_even_if_the_first_files_cannot_be_removed(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = assemble_learner(tiny_model, CONFIG, CPU)
    folder = tmp_path / "run-a" / "versions" / "1"
    export_version(learner, tiny_model, folder)
    step(learner, 0)
    with monkeypatch.context() as patch:
        # NFS refuses while an engine has them mapped.
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        assert export_version(learner, tiny_model, folder) == describe(folder)
    clear_scratch(tmp_path, "run-a")
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.parametrize("is_lost", [True, False])
@pytest.mark.parametrize("by", ["replaced", "removed"])
def test_a_version_replaced_by_another_trainer_is_an_error(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str, is_lost: bool
) -> None:
    learner = assemble_learner(tiny_model, CONFIG, CPU)
    folder, others = tmp_path / "versions" / "1", tmp_path / "others"
    others.mkdir()
    (others / "model.safetensors").write_bytes(b"of another trainer")
    another_came: list[Path] = []

    def sync(path: Path) -> None:
        if path == folder.parent:
            another_came.append(folder)
            remove_folder(folder)
            if by == "replaced":
                others.rename(folder)

    def check_lock() -> None:
        if another_came and is_lost:
            raise LockLost("another trainer may have gone on")

    monkeypatch.setattr(folders, "_sync", sync)
    with pytest.raises(LockLost if is_lost else OSError, match="go" if is_lost else str(folder)):
        export_version(learner, tiny_model, folder, check_lock)
    assert [file.name for file in folder.parent.glob("*/*")] == (["model.safetensors"] if by == "replaced" else [])


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_version_that_cannot_be_brought_to_the_disk_gets_no_name(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    learner = assemble_learner(tiny_model, CONFIG, CPU)
    tried: list[Path] = []

    def sync(path: Path) -> None:
        tried.append(path)
        raise OSError(errno.ENOSPC, "no room on the disk")

    def check_lock() -> None:
        if tried and is_lost:
            raise LockLost("another trainer may have gone on")

    monkeypatch.setattr(folders, "_sync", sync)
    folder = tmp_path / "versions" / "1"
    with pytest.raises(LockLost if is_lost else OSError, match="go" if is_lost else "no room"):
        export_version(learner, tiny_model, folder, check_lock)
    assert list(folder.parent.iterdir()) == []


@pytest.mark.parametrize("is_lost", [True, False])
def test_files_that_the_next_trainer_cleared_report_the_lost_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    cleared: list[str] = []

    def clear(moment: str) -> None:
        clear_scratch(tmp_path, "run-a")
        cleared.append(moment)

    def check_lock() -> None:
        if cleared and is_lost:
            raise LockLost("another trainer may have gone on")

    monkeypatch.setattr(saving, "fault_point", clear)
    folder = tmp_path / "run-a" / "checkpoints" / "1"
    with pytest.raises(LockLost if is_lost else FileNotFoundError):
        write_checkpoint(folder, check_lock)
    assert cleared == ["trainer.state_written"]
    assert list(folder.parent.iterdir()) == []


@pytest.mark.parametrize("damage", ["weights", "state", "progress"])
def test_damage_is_an_error_and_never_trained(tiny_model: Path, tmp_path: Path, damage: str) -> None:
    learner = assemble_learner(tiny_model, CONFIG, CPU)
    step(learner, 0)
    export = export_version(learner, tiny_model, tmp_path / "v")
    expected = Progress("run-a", 1, export.content_sha256)
    save_checkpoint(checkpoint_state(learner), expected, tmp_path / "c")
    if damage == "weights":
        file = tmp_path / "v" / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-4] + b"abcd")
    elif damage == "state":
        (tmp_path / "c" / "optimizer.safetensors").write_bytes(b"PK")
    else:
        expected = Progress("run-a", 2, export.content_sha256)
    with pytest.raises(CheckpointDamaged, match="restore it"):
        restore_learner(Load(tiny_model, CONFIG, (export.path, tmp_path / "c", expected)), CPU)


def test_a_folder_without_weights_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointDamaged, match="holds no weights"):
        describe(tmp_path / "nothing")


def test_a_folder_loses_its_name_before_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "1")
    removed: list[str] = []
    monkeypatch.setattr(shutil, "rmtree", lambda folder, **_: removed.append(folder.name))
    remove_folder(tmp_path / "1")
    assert [entry.name for entry in tmp_path.iterdir()] == removed
    assert removed[0].startswith(".1.")


Damage = Callable[[Path], object]


def cut(name: str, end: int) -> Damage:
    return lambda root: (root / name).write_bytes((root / name).read_bytes()[:end])


def written(name: str, content: bytes) -> Damage:
    return lambda root: (root / name).write_bytes(content)


def without_random(root: Path) -> None:
    file = root / "c" / "optimizer.safetensors"
    state = load_file(file)
    del state["random"]
    save_file(state, file)


def other_names(root: Path) -> None:
    file = root / "c" / "optimizer.safetensors"
    save_file({"random": torch.get_rng_state(), "first.exp_avg": torch.ones(2)}, file)


def short_random(root: Path) -> None:
    file = root / "c" / "optimizer.safetensors"
    save_file({**load_file(file), "random": torch.zeros(3, dtype=torch.uint8)}, file)


@pytest.mark.parametrize(
    "damage",
    [
        *(cut("v/model.safetensors", end) for end in (0, 8, 1000, -1)),
        *(cut("c/optimizer.safetensors", end) for end in (0, 7, 8, 1000, -1)),
        *(cut("c/progress.json", end) for end in (0, 1, -3)),
        *(written("c/progress.json", content) for content in (b"null", b"[]", b"{}", b"\xff", b'{"run_id": 1}')),
        *(written("c/optimizer.safetensors", content) for content in (b"\xff" * 64, b"\x02" + b"\0" * 7 + b"{}")),
        *(written("v/config.json", content) for content in (b"", b"{", b"[]", b'{"model_type": "none"}')),
        lambda root: (root / "v" / "config.json").unlink(),
        lambda root: (root / "c" / "progress.json").unlink(),
        lambda root: (root / "c" / "optimizer.safetensors").unlink(),
        without_random,
        other_names,
        short_random,
    ],
)
def test_truncated_files_and_garbage_are_errors_and_never_trained(
    tiny_model: Path, tmp_path: Path, damage: Damage
) -> None:
    learner = assemble_learner(tiny_model, CONFIG, CPU)
    step(learner, 0)
    export = export_version(learner, tiny_model, tmp_path / "v")
    expected = Progress("run-a", 1, export.content_sha256)
    save_checkpoint(checkpoint_state(learner), expected, tmp_path / "c")
    damage(tmp_path)
    with pytest.raises(CheckpointDamaged, match="restore it"):
        restore_learner(Load(tiny_model, CONFIG, (export.path, tmp_path / "c", expected)), CPU)


def test_the_learner_of_a_damaged_checkpoint_leaves_the_memory(tiny_model: Path, tmp_path: Path) -> None:
    learner = assemble_learner(tiny_model, CONFIG, CPU)
    step(learner, 0)
    export = export_version(learner, tiny_model, tmp_path / "v")
    expected = Progress("run-a", 1, export.content_sha256)
    save_checkpoint(checkpoint_state(learner), expected, tmp_path / "c")
    flipped(tmp_path / "c" / "optimizer.safetensors", -1)
    accelerator, before = make_accelerator("cpu", "float32"), policies_in_memory()
    with pytest.raises(CheckpointDamaged):
        restore_learner(Load(tiny_model, CONFIG, (export.path, tmp_path / "c", expected)), accelerator, ALONE)
    assert policies_in_memory() == before


def policies_in_memory() -> int:
    gc.collect()
    return sum(isinstance(one, Policy) for one in gc.get_objects())


def flipped(file: Path, place: int) -> None:
    """Flips the lowest bit of a byte."""
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


@dataclass(frozen=True)
class Saved:
    """A step on the disk, whose version rounds the weights: moments and weights are in several files."""

    load: Load
    files: list[Path]

    def refused(self, monkeypatch: pytest.MonkeyPatch) -> str:
        """The reason of the damage, found before a learner is built."""
        with monkeypatch.context() as patch:
            patch.setattr(resume, "assemble_learner", None)
            # It collects all garbage of the test process, for seconds.
            patch.setattr(CPU, "free_memory", lambda: None)
            with pytest.raises(CheckpointDamaged) as caught:
                restore_learner(self.load, CPU)
        return str(caught.value)


@pytest.fixture
def saved(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Saved:
    monkeypatch.setattr(folders, "FILE_BYTES", 2**14)
    bfloat16 = {"training": {"export_dtype": "bfloat16"}}
    config = RunConfig.model_validate({**CONFIG.model_dump(exclude_unset=True), **bfloat16})
    learner = assemble_learner(tiny_model, config, CPU)
    step(learner, 0)
    export = export_version(learner, tiny_model, tmp_path / "v")
    expected, folder = Progress("run-a", 1, export.content_sha256), tmp_path / "c"
    save_checkpoint(begin_checkpoint(learner, folder)[0], expected, folder)
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2
    return Saved(Load(tiny_model, config, (export.path, folder, expected)), files)


def test_a_flipped_bit_in_any_file_is_found_before_a_learner_is_built(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    restore_learner(saved.load, CPU)
    for file in saved.files:
        whole = file.read_bytes()
        # In the length of the header, in the header, between, and in the last number.
        for place in (0, 20, len(whole) // 2, -1):
            flipped(file, place)
            assert f"{file} is not the file that was written" in saved.refused(monkeypatch)
            file.write_bytes(whole)
    restore_learner(saved.load, CPU)


@pytest.mark.parametrize("optimizer", [{}, {"moments": "8bit"}])
def test_a_checkpoint_is_read_in_parts_of_which_one_is_in_memory(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: dict[str, str]
) -> None:
    document = CONFIG.model_dump(exclude_unset=True)
    document["optimizer"] |= optimizer
    config = RunConfig.model_validate({**document, "training": {"export_dtype": "bfloat16"}})
    learner = assemble_learner(tiny_model, config, CPU)
    step(learner, 0)
    state = {name: tensor.clone() for name, tensor in checkpoint_state(learner).items()}
    export = export_version(learner, tiny_model, tmp_path / "v")
    progress = Progress("run-a", 1, export.content_sha256)
    save_checkpoint(state, progress, tmp_path / "c")

    monkeypatch.setattr(folders, "FILE_BYTES", 2**15)
    sizes, held, real = list[int](), list[weakref.ref[torch.Tensor]](), shards.load

    def load(part: dict[str, torch.Tensor], **options: Any) -> None:
        assert all(tensor() is None for tensor in held)
        held[:] = map(weakref.ref, part.values())
        sizes.append(sum(tensor.nbytes for tensor in part.values()))
        real(part, **options)

    with monkeypatch.context() as patch:
        patch.setattr(shards, "load", load)
        for part in shards.read_shards(tmp_path / "c", lambda _: None):
            assert part
    assert len(sizes) > 5
    assert max(sizes) <= max(1.1 * 2**15, *(tensor.nbytes for tensor in state.values()))
    restored = checkpoint_state(restore_learner(Load(tiny_model, config, (export.path, tmp_path / "c", progress)), CPU))
    assert restored.keys() == state.keys()
    assert any(name.endswith("_scales") for name in state) is bool(optimizer)
    assert all(torch.equal(restored[name], tensor) for name, tensor in state.items())


def test_a_file_without_a_hash_is_refused_with_the_remedy(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved.files[0].parent
    manifest = json.loads((folder / "progress.json").read_text())
    names = sorted(manifest["files"])
    for files in (names, {**manifest["files"], names[0]: None}, {}, None):
        (folder / "progress.json").write_text(json.dumps({**manifest, "files": files}))
        assert "has no hashes" in (reason := saved.refused(monkeypatch)) or "did not write" in reason
        assert "backup" in reason
    # One that the manifest does not name would be read beside the others.
    (folder / "progress.json").write_text(json.dumps(manifest))
    (folder / "other.safetensors").write_bytes(saved.files[0].read_bytes())
    assert "holds ['other.safetensors'], which the trainer did not write" in saved.refused(monkeypatch)


def test_weights_that_do_not_round_to_those_of_the_version_are_never_trained(tiny_model: Path, tmp_path: Path) -> None:
    """The trainer wrote such weights, by their hash."""
    config = RunConfig.model_validate(
        {**CONFIG.model_dump(exclude_unset=True), "training": {"export_dtype": "bfloat16"}}
    )
    learner = assemble_learner(tiny_model, config, CPU)
    step(learner, 0)
    export = export_version(learner, tiny_model, tmp_path / "v")
    expected, file = Progress("run-a", 1, export.content_sha256), tmp_path / "c" / "optimizer.safetensors"
    save_checkpoint(begin_checkpoint(learner, tmp_path / "c")[0], expected, tmp_path / "c")
    restore_learner(Load(tiny_model, config, (export.path, tmp_path / "c", expected)), CPU)
    state = load_file(file)
    state["weights.model.norm.weight"][3] *= 1.01
    save_file(state, file)
    manifest = tmp_path / "c" / "progress.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "files": {file.name: file_sha256(file)}}))
    with pytest.raises(CheckpointDamaged, match=r"weights.model.norm.weight does not round to the weights of the"):
        restore_learner(Load(tiny_model, config, (export.path, tmp_path / "c", expected)), CPU)
