"""Weights and optimiser state on disk. A folder gets its name only once its files are complete and on the disk.

    <root>/<run>/versions/<n>/      a Hugging Face folder: engines serve it, and a resumed trainer reads its weights
    <root>/<run>/checkpoints/<n>/   optimiser moments, random state, and progress.json: the high-water mark and the
                                    hash of each file; the weights in float32, where the version rounds them

The trainer writes a version before it records the step, and the checkpoint only afterwards: engines need not wait for
it. A crash before the step's transaction leaves a version that no row names; the trainer replaces it when it makes the
step again. A crash between the transaction and the checkpoint loses only that step's optimiser state; `resume`
recomputes it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

from leyden.libs.contracts.weights import ADAPTER_FOLDER, WEIGHT_SUFFIXES, file_sha256, weight_files, weights_sha256
from leyden.libs.faults import fault_point
from leyden.services.trainer.model.lora import (
    ADAPTER_WEIGHTS,
    adapter_state,
    has_adapters,
    merged_state,
    of_adapter,
    save_adapter_config,
)
from leyden.services.trainer.model.remedies import raising_host_memory
from leyden.services.trainer.model.tensors import divided_like, replace_values, rounds_to
from leyden.services.trainer.ranks.collectives import ALONE, Ranks
from leyden.services.trainer.rows.progress import Progress
from leyden.services.trainer.state.shards import read_shards, write_shards
from leyden.services.trainer.step.optimizers import SCALES, restore_moment

WEIGHTS_NAME = "model.safetensors"
FILE_BYTES = 2**30
"""The most that is gathered for a version, or written in one file: it lies twice in host memory meanwhile."""
STATE_NAME = "optimizer.safetensors"
ROUNDED = torch.bfloat16
"""The type of versions whose checkpoint has the weights, too."""
VALUES = "value_head."
WEIGHTS = "weights."

LockCheck = Callable[[], None]
"""Raises where this process may no longer write into the run's folder."""


def no_lock() -> None:
    """The lock check of a folder that has no other writer."""


class CheckpointDamaged(RuntimeError):
    """Files are missing or differ from those that the store recorded; the message names them and the remedy."""


@dataclass(frozen=True)
class Export:
    """A version on disk: its folder, the hash over its weight files, and the size of all its files."""

    path: Path
    content_sha256: str
    size_bytes: int


def version_folder(root: Path, run_id: str, version: int) -> Path:
    """The folder of a version's weights."""
    return root / run_id / "versions" / str(version)


def checkpoint_folder(root: Path, run_id: str, step: int) -> Path:
    """The folder of the optimiser's state after a step."""
    return root / run_id / "checkpoints" / str(step)


def export_weights(
    model: PreTrainedModel,
    base: Path,
    folder: Path,
    check_lock: LockCheck = no_lock,
    *,
    parts: Iterable[Mapping[str, torch.Tensor]] | None = None,
    dtype: torch.dtype | None = None,
) -> Export:
    """Writes a Hugging Face folder: the model's weights, and a copy of every other file of the base model.

    LoRA adapters are merged into the weights, and written on their own beside them.

    Args:   parts: complete tensors of the model's state by `parts_of`, each for a file; None for the model's own;
                dtype: the type of the weights, None for the model's own, which adapters have in any case
    Raises: OSError: the folder cannot be written, or another one has its name by the end; whatever `check_lock` raises
    """
    with _named(new_scratch(folder, check_lock), folder, check_lock, moment="trainer.version_unnamed") as scratch:
        adapter, files = dict[str, Tensor](), list[dict[str, int]]()
        for part in parts or [own_weights(model)]:
            adapter |= {name: tensor for name, tensor in part.items() if of_adapter(name)}
            state = merged_state(model, part, adapter) if has_adapters(model) else dict(part)
            if dtype is not None:
                state = {name: tensor.to(dtype) for name, tensor in state.items()}
            if state:
                # The names that `save_pretrained` would give.
                state = revert_weight_conversion(model, state)
                _save(state, scratch / _part_name(len(files)))
                files.append({name: tensor.nbytes for name, tensor in state.items()})
        _name_parts(scratch, files)
        if adapter:
            save_adapter_config(model, scratch / ADAPTER_FOLDER)
            _save(adapter_state(adapter), scratch / ADAPTER_FOLDER / ADAPTER_WEIGHTS)
        fault_point("trainer.weights_written")
        for file in base.iterdir():
            if file.is_file() and file.suffix not in WEIGHT_SUFFIXES and not file.name.endswith(".index.json"):
                shutil.copyfile(file, scratch / file.name)
        export = replace(describe(scratch), path=folder)
    fault_point("trainer.exported")
    return export


def own_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """A model's state without the second names of tied weights. Adapters come first."""
    tied: dict[str, str] = model.all_tied_weights_keys
    own = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    return dict(sorted(own.items(), key=lambda item: not of_adapter(item[0])))


def parts_of(model: PreTrainedModel) -> Iterator[list[str]]:
    """Names of the model's weights in parts of at most `FILE_BYTES`, or of one tensor."""
    # transformers joins tensors for some of its conversions: they must be in one part.
    joins = any(isinstance(one, WeightConverter) for one in getattr(model, "_weight_conversions", None) or ())
    own = own_weights(model)
    return iter([list(own)]) if joins else _parts(own)


def _parts(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    names, size = list[str](), 0
    for name, tensor in tensors.items():
        # This counts the shards of all ranks, so that every rank gets the same parts.
        own = tensor.numel() * tensor.element_size()
        if names and size + own > FILE_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += own
    yield names


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
    with _named(new_scratch(folder, check_lock), folder, check_lock, moment="trainer.version_unnamed") as scratch:
        shutil.copytree(source, scratch, dirs_exist_ok=True)


def describe(folder: Path) -> Export:
    """Hashes and measures a folder of weights.

    Raises: CheckpointDamaged: the folder holds no weights.
    """
    if not weight_files(folder):
        raise CheckpointDamaged(f"{folder} holds no weights: give the run a model folder, or restore it from a backup")
    size_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return Export(folder, weights_sha256(folder), size_bytes)


def save_checkpoint(
    state: Mapping[str, torch.Tensor],
    progress: Progress,
    folder: Path,
    check_lock: LockCheck = no_lock,
    ranks: Ranks = ALONE,
    scratch: Path | None = None,
) -> None:
    """Writes what a resumed trainer needs beside the weights, in files of `FILE_BYTES`, or in those of all ranks.

    Args:   state, scratch: see `begin_checkpoint`
    Raises: OSError: a file of any rank cannot be written; RankLost; whatever `check_lock` raises
    """
    scratch = scratch or new_scratch(folder, check_lock)
    with _named(scratch, folder, check_lock, moment="trainer.checkpoint_unnamed"):
        # No pickle: reading a checkpoint runs no code.
        files = write_shards(state, scratch, ranks) if ranks.size > 1 else _write_parts(state, scratch)
        fault_point("trainer.state_written")
        document = {**asdict(progress), "files": files}
        (scratch / "progress.json").write_text(json.dumps(document, indent=2) + "\n")


def _write_parts(state: Mapping[str, torch.Tensor], folder: Path) -> dict[str, str]:
    """Returns the hash of each file by its name."""
    files = dict[str, str]()
    for names in _parts(state):
        file = folder / (f"{len(files)}-{STATE_NAME}" if files else STATE_NAME)
        _save({name: state[name] for name in names}, file)
        files[file.name] = file_sha256(file)
    return files


def load_checkpoint(
    optimizer: torch.optim.Optimizer,
    folder: Path,
    expected: Progress,
    values: nn.Module | None = None,
    weights: Mapping[str, Tensor] | None = None,
    ranks: Ranks = ALONE,
) -> None:
    """Restores optimiser and random state, and a critic's own weights; of what is sharded, this rank's shards.

    Args:   weights: the policy's, as the version of the step has them. A checkpoint that has them, too, has what the
                version rounded, and they are restored; ranks: each hashes its share of the files
    Raises: CheckpointDamaged: files are missing, or differ from those that were written, or belong to another run, step
                or weights than `expected`; torch.OutOfMemoryError
    """
    _check_files(folder, _read_manifest(folder, expected), ranks)
    try:
        with raising_host_memory():
            _restore(optimizer, folder, values, weights or {})
    except torch.OutOfMemoryError:
        raise
    except (LookupError, OSError, RuntimeError, TypeError, ValueError, SafetensorError) as error:
        raise CheckpointDamaged(f"{folder} holds no such state ({error}): restore it from a backup") from error


def _read_manifest(folder: Path, expected: Progress) -> dict[str, str | None]:
    """The hash of each file of a checkpoint by its name; None where a release wrote it that knew no hashes."""
    file = folder / "progress.json"
    try:
        document = dict(json.loads(file.read_text()))
        files = document.pop("files", [STATE_NAME])
        hashes = dict(files) if isinstance(files, dict) else dict.fromkeys(map(str, files))
        found = Progress(**document)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointDamaged(f"{file} cannot be read ({error}): restore it from a backup") from error
    if found != expected:
        raise CheckpointDamaged(f"{folder} holds {found}, but the store recorded {expected}: restore it from a backup")
    return hashes


def _check_files(folder: Path, hashes: Mapping[str, str | None], ranks: Ranks) -> None:
    """Raises CheckpointDamaged unless all files are there and this rank's share of them has the recorded hashes."""
    for number, (name, sha256) in enumerate(sorted(hashes.items())):
        file = folder / name
        try:
            # torch would leave out what a missing file held.
            safe_open(file, "pt")
            damaged = number % ranks.size == ranks.rank and sha256 is not None and sha256 != file_sha256(file)
        except (OSError, SafetensorError) as error:
            raise CheckpointDamaged(f"{file} cannot be read ({error}): restore it from a backup") from error
        if damaged:
            raise CheckpointDamaged(f"{file} is not the file that was written, by its hash: restore it from a backup")


def _restore(
    optimizer: torch.optim.Optimizer, folder: Path, values: nn.Module | None, weights: Mapping[str, Tensor]
) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own: dict[str, Tensor] = {} if values is None else values.state_dict(prefix=VALUES)
    master = {WEIGHTS + name: tensor for name, tensor in weights.items()}
    named = {**own, **master}
    numbered = {str(number): parameter for number, parameter in enumerate(parameters)}
    state = read_shards(folder, lambda key: named.get(key, numbered.get(key.partition(".")[0])))
    torch.set_rng_state(state.pop("random"))
    # A version that rounds no weights has them all.
    for key, tensor in (own if master.keys().isdisjoint(state) else named).items():
        if key in master and not rounds_to(state[key], tensor, ROUNDED):
            raise ValueError(f"{key} does not round to the weights of the version")
        replace_values(tensor, state.pop(key))
    for key, tensor in state.items():
        number, _, name = key.partition(".")
        if not name.endswith(SCALES):
            like, scales = parameters[int(number)], state.get(key + SCALES)
            scales = None if scales is None else divided_like(scales, like)
            restore_moment(optimizer, like, name, tensor.to(like.device), scales)


def optimizer_state(
    optimizer: torch.optim.Optimizer, values: nn.Module | None = None, weights: Mapping[str, Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Maps `<parameter number>.<name>` to the optimiser's own tensor, and `random` to a copy of the random state.

    A critic's value head, or its model, which no version exports, is in it as `value_head.<name>`, and weights that a
    version rounds as `weights.<name>`.

    The optimiser's next update changes the tensors in place. Rates and betas are not state: they come from the run's
    document.
    """
    moments = optimizer.state_dict()["state"].items()
    flat = {f"{number}.{name}": tensor for number, named in moments for name, tensor in named.items()}
    own = values.state_dict(prefix=VALUES) if values is not None else {}
    master = {WEIGHTS + name: tensor for name, tensor in (weights or {}).items()}
    return {**flat, **own, **master, "random": torch.get_rng_state()}


def remove_folder(folder: Path) -> None:
    """Removes a version or checkpoint; a missing folder is fine. Nobody meets the folder half removed."""
    with contextlib.suppress(OSError):
        folder = folder.rename(_scratch_name(folder))
    shutil.rmtree(folder, ignore_errors=True)


def clear_scratch(root: Path, run_id: str) -> None:
    """Removes the unfinished folders of a killed trainer. Only the holder of the run's lock may call it."""
    for scratch in (root / run_id).glob("*/.*.partial"):
        remove_folder(scratch)


def new_scratch(folder: Path, check_lock: LockCheck = no_lock) -> Path:
    """Makes a folder of another name for the files that `folder` will have. Raises: whatever `check_lock` raises"""
    check_lock()
    # The random name is this process's own: a trainer that has just lost the run may still write into its scratch.
    scratch = _scratch_name(folder)
    scratch.mkdir(parents=True)
    return scratch


@contextmanager
def _named(scratch: Path, folder: Path, check_lock: LockCheck, *, moment: str) -> Iterator[Path]:
    """Yields `scratch`; after the block, brings the files of `scratch` to the disk and renames it to `folder`.

    Args:   check_lock: called before the rename, and after an OSError; moment: the fault point at which no folder has
                the name
    Raises: OSError: files cannot be written, or another folder has the name by the end; whatever `check_lock` raises
    """
    try:
        yield scratch
        for file in scratch.rglob("*"):
            if file.is_file():
                file.chmod(0o644)  # save_file gives its files to their owner alone.
            _sync(file)
        _sync(scratch)
        written = scratch.stat()
        check_lock()
        _rename(scratch, folder, moment=moment)
        _sync(folder.parent)
        if not os.path.samestat(folder.stat(), written):
            raise OSError(
                f"{folder} is not the folder that was given this name, though no other trainer has the run: where its"
                " file system gives a renamed folder another identity, set TRAINER_FOLDER to a folder on another one"
            )
    except OSError:
        # A trainer that lost the run meets files that the next one cleared: LockLost is then the cause to report.
        check_lock()
        raise
    finally:
        remove_folder(scratch)


def _rename(scratch: Path, folder: Path, *, moment: str) -> None:
    """Renames `scratch` to `folder` and removes the folder that had the name: it belongs to a step never committed."""
    old = _scratch_name(folder)
    # Removed under another name: NFS retains the folder of a file that an engine on this machine has mapped.
    with contextlib.suppress(FileNotFoundError):
        folder.rename(old)
    fault_point(moment)
    scratch.rename(folder)
    remove_folder(old)


def _scratch_name(folder: Path) -> Path:
    """A new name beside `folder` that `clear_scratch` recognises."""
    return folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.partial")


def _save(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    """Writes a safetensors file. Raises: OSError: the disk is full, the folder is gone, …"""
    try:
        save_file(dict(tensors), file, metadata={"format": "pt"})
    except SafetensorError as error:
        # The library reports the system's errors in its message alone.
        if number := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(number[1]), str(error)) from error
        raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
