"""Versions on disk: folders of weights that engines serve."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from prometheus_client import Counter
from torch import Tensor
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

from leyden.libs.contracts.weights import ADAPTER_FOLDER, WEIGHT_SUFFIXES, weight_files, weights_sha256
from leyden.libs.faults import fault_point
from leyden.libs.store import training
from leyden.libs.telemetry import logger
from leyden.services.trainer.model.lora import (
    ADAPTER_WEIGHTS,
    adapter_state,
    has_adapters,
    merged_state,
    of_adapter,
    read_adapter,
    save_adapter_config,
)
from leyden.services.trainer.model.tensors import gather, replace_part
from leyden.services.trainer.model.weight_files import WeightFiles
from leyden.services.trainer.ranks.messages import Gather
from leyden.services.trainer.state.folders import (
    CheckpointDamaged,
    LockCheck,
    in_parts,
    named,
    new_scratch,
    no_lock,
    remove_folder,
    save_tensors,
)
from leyden.services.trainer.step.learner import Learner

log = logger()

VERSIONS_EXPORTED_AGAIN = Counter("trainer_versions_exported_again_total", "Versions whose files were damaged or lost.")
WEIGHTS_NAME = "model.safetensors"


@dataclass(frozen=True)
class Export:
    """A version on disk: its folder, the hash over its weight files, and the size of all its files."""

    path: Path
    content_sha256: str
    size_bytes: int

    def row(self, number: int) -> training.Version:
        """The store's row of this version."""
        return training.Version(number, str(self.path), self.content_sha256, self.size_bytes)


def export_version(learner: Learner, base: Path, folder: Path, check_lock: LockCheck = no_lock) -> Export:
    """Writes a Hugging Face folder: the weights of all ranks, and a copy of every other file of the base model.

    LoRA adapters are merged into the weights, and written on their own beside them. Rank 0 calls it.

    Raises: OSError: the folder cannot be written, or another one has its name by the end; whatever `check_lock` raises
    """
    model = learner.model
    with named(new_scratch(folder, check_lock), folder, check_lock, moment="trainer.version_unnamed") as scratch:
        adapter, files = dict[str, Tensor](), list[dict[str, int]]()
        for part in _gathered(learner):
            adapter |= {name: tensor for name, tensor in part.items() if of_adapter(name)}
            state = merged_state(model, part, adapter) if has_adapters(model) else part
            if learner.export_dtype is not None:
                state = {name: tensor.to(learner.export_dtype) for name, tensor in state.items()}
            if state:
                # The names that `save_pretrained` would give.
                state = revert_weight_conversion(model, state)
                save_tensors(state, scratch / _part_name(len(files)))
                files.append({name: tensor.nbytes for name, tensor in state.items()})
        _name_parts(scratch, files)
        if adapter:
            save_adapter_config(model, scratch / ADAPTER_FOLDER)
            save_tensors(adapter_state(adapter), scratch / ADAPTER_FOLDER / ADAPTER_WEIGHTS)
        fault_point("trainer.weights_written")
        for file in base.iterdir():
            if file.is_file() and file.suffix not in WEIGHT_SUFFIXES and not file.name.endswith(".index.json"):
                shutil.copyfile(file, scratch / file.name)
        export = replace(describe(scratch), path=folder)
    fault_point("trainer.exported")
    return export


def _gathered(learner: Learner) -> Iterator[dict[str, Tensor]]:
    for names in parts_of(learner):
        with learner.ranks.sending(Gather(names)):
            part = gather_weights(learner, names)
        yield part


def parts_of(learner: Learner) -> Iterator[list[str]]:
    """Names of the learner's weights as `in_parts` divides them: on every rank the same."""
    own, converted = learner.weights, getattr(learner.model, "_weight_conversions", None) or ()
    # transformers joins tensors for some of its conversions: they must be in one part. Experts are divided alone.
    joined = any(isinstance(one, WeightConverter) and len(one.target_patterns) > 1 for one in converted)
    return iter([list(own)]) if joined else in_parts(own)


def gather_weights(learner: Learner, names: Sequence[str]) -> dict[str, Tensor]:
    """These weights, complete on rank 0, and nothing on other ranks. All ranks call it.

    They have the type of a version, except adapters and weights that adapters are added to.
    """
    own, dtype = learner.weights, None if has_adapters(learner.model) else learner.export_dtype
    return gather({name: own[name] for name in names}, wanted=learner.ranks.rank == 0, dtype=dtype)


def adopt_weights(learner: Learner, weights: Path) -> float:
    """Copies a version's weights into the learner. Returns the largest change of any weight.

    Weights that round to those of a version in bfloat16 stay as they are.
    """
    if has_adapters(learner.model):
        return read_adapter(learner.model, weights)
    files, largest = WeightFiles(weights), 0.0
    for name, own in learner.weights.items():
        largest = max(largest, replace_part(own, files.rows(learner.model, name, own), learner.export_dtype))
    return largest


def export_again(learner: Learner, base: Path, version: training.Version, check_lock: LockCheck) -> None:
    """Exports a version whose files are damaged or lost; `learner` is the one right after its step.

    Raises: CheckpointDamaged: the learner's weights are not those that the store recorded
    """
    folder = Path(version.path)
    if export_version(learner, base, folder, check_lock).content_sha256 != version.content_sha256:
        remove_folder(folder)
        raise CheckpointDamaged(
            f"{folder} is damaged or lost, and this machine or release writes other weights than those on record:"
            " restore it"
        )
    VERSIONS_EXPORTED_AGAIN.inc()
    log.warning("version exported again", version=version.version, path=version.path)


def _part_name(number: int) -> str:
    return f"{number}.partial"


def _name_parts(folder: Path, files: Sequence[Mapping[str, int]]) -> None:
    """Gives files of weights the names that transformers reads, with an index if there are several.

    Args: files: the size of each tensor in bytes, by its name
    """
    if len(files) == 1:
        (folder / _part_name(0)).rename(folder / WEIGHTS_NAME)
        return
    stem, _, suffix = WEIGHTS_NAME.rpartition(".")
    weights = dict[str, str]()
    for number, sizes in enumerate(files):
        name = f"{stem}-{number + 1:05}-of-{len(files):05}.{suffix}"
        (folder / _part_name(number)).rename(folder / name)
        weights |= dict.fromkeys(sizes, name)
    size = sum(sum(sizes.values()) for sizes in files)
    index = {"metadata": {"total_size": size}, "weight_map": weights}
    (folder / f"{WEIGHTS_NAME}.index.json").write_text(json.dumps(index, indent=2) + "\n")


def copy_version(source: Path, folder: Path, content_sha256: str, check_lock: LockCheck = no_lock) -> None:
    """Copies another run's version to `folder`, which outlives that run.

    Raises: CheckpointDamaged: `source` is gone, or is not what the store recorded; as `export_weights`
    """
    if weights_sha256(source) != content_sha256:
        raise CheckpointDamaged(
            f"{source} is not what the store recorded: restore it, or continue from another version"
        )
    with named(new_scratch(folder, check_lock), folder, check_lock, moment="trainer.version_unnamed") as scratch:
        shutil.copytree(source, scratch, dirs_exist_ok=True)


def describe(folder: Path) -> Export:
    """Hashes and measures a folder of weights.

    Raises: CheckpointDamaged: the folder holds no weights.
    """
    if not weight_files(folder):
        raise CheckpointDamaged(f"{folder} holds no weights: give the run a model folder, or restore it from a backup")
    size_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return Export(folder, weights_sha256(folder), size_bytes)
