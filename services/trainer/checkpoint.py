"""Weights and optimiser state on disk. A folder appears under its name only when it is whole.

    <root>/<run>/versions/<n>/      a Hugging Face folder: what engines serve, and the weights of the checkpoint
    <root>/<run>/checkpoints/<n>/   optimiser moments, random state, and progress.json: the high-water mark

A version is durable before its step is recorded, a checkpoint only after: engines need not wait for it. A version is
named and announced before it is durable, so that engines can read it while it is brought to the disk. A crash before
the step's transaction leaves a version that no row names, and making the step again replaces it. A crash between the
transaction and the checkpoint loses the optimiser's state of that step alone: `resume` makes it again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from leyden.libs.faults import fault_point
from leyden.services.trainer.files import reserve, safetensors, sha256, write

WEIGHTS_NAME = "model.safetensors"
STATE_NAME = "optimizer.safetensors"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".pth")


Holding = Callable[[], None]
"""Raises where this process may write into the run's folder no longer."""


def alone() -> None:
    """For a folder that has no other writer."""


class CheckpointDamaged(RuntimeError):
    """Files are missing, or are not those that the store recorded; the message says which and what to do."""


@dataclass(frozen=True)
class Export:
    """A version on disk: folder, hash over its weight files, and size of everything."""

    path: Path
    content_sha256: str
    size_bytes: int


@dataclass(frozen=True)
class Progress:
    """The high-water mark: `step` is the last step whose effect is in the files; `content_sha256` its weights."""

    run_id: str
    step: int
    content_sha256: str


def version_folder(root: Path, run_id: str, version: int) -> Path:
    """Where the weights of a version lie."""
    return root / run_id / "versions" / str(version)


def checkpoint_folder(root: Path, run_id: str, step: int) -> Path:
    """Where the optimiser's state after a step lies."""
    return root / run_id / "checkpoints" / str(step)


def export_weights(
    model: PreTrainedModel,
    base: Path,
    folder: Path,
    holding: Holding = alone,
    announce: Callable[[Path], None] = lambda _: None,
) -> Export:
    """Writes a Hugging Face folder: the model's weights, and every other file of the base model as it is.

    Args:   announce: called with the folder when it can be read, before it is durable
    Raises: OSError: it cannot be written, or another folder has its name by now; what `holding` does
    """
    with _scratch(folder, holding) as scratch:
        with contextlib.suppress(FileNotFoundError):
            (_reserved(folder) / WEIGHTS_NAME).rename(scratch / WEIGHTS_NAME)
        # As `save_pretrained` names them.
        weights = revert_weight_conversion(model, remove_tied_weights_from_state_dict(model.state_dict(), model))
        pieces = safetensors(weights)
        write(pieces, scratch / WEIGHTS_NAME)
        fault_point("trainer.weights_written")
        for file in base.iterdir():
            if file.is_file() and file.suffix not in WEIGHT_SUFFIXES and not file.name.endswith(".index.json"):
                shutil.copyfile(file, scratch / file.name)
        size_bytes = sum(file.stat().st_size for file in scratch.iterdir())
        _open_to_all(scratch)
        written = scratch.stat()
        _take_name(scratch, folder, holding, moment="trainer.version_unnamed")
        with ThreadPoolExecutor(1, "hash") as other:
            hashed = other.submit(sha256, pieces)
            announce(folder)
            fault_point("trainer.announced")
            _sync_named(folder, written, holding)
    fault_point("trainer.exported")
    return Export(folder, _content_sha256([(WEIGHTS_NAME, hashed.result())]), size_bytes)


def reserve_export(model: PreTrainedModel, folder: Path) -> None:
    """Has a file at hand for the weights of the next version beside `folder`: its export is quick then."""
    remove_folder(_reserved(folder))
    size_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    reserve(_reserved(folder) / WEIGHTS_NAME, size_bytes)


def release_reserved(folder: Path) -> None:
    """Removes the file at hand for a version that is not made."""
    remove_folder(_reserved(folder))


def _reserved(folder: Path) -> Path:
    return folder.with_name(".next.partial")


def describe(folder: Path) -> Export:
    """A folder's weights by hash and size.

    The hash is SHA-256 over, for each weight file by name, the line `<name> <SHA-256 of its bytes>\\n`.

    Raises: CheckpointDamaged: the folder holds no weights.
    """
    weights = sorted(file for file in folder.glob("*") if file.suffix in WEIGHT_SUFFIXES) if folder.is_dir() else []
    if not weights:
        raise CheckpointDamaged(f"{folder} holds no weights: give the run a model folder, or restore it from a backup")
    size_bytes = sum(file.stat().st_size for file in folder.iterdir())
    return Export(folder, _content_sha256((file.name, _file_sha256(file)) for file in weights), size_bytes)


def _content_sha256(files: Iterable[tuple[str, str]]) -> str:
    lines = "".join(f"{name} {sha256}\n" for name, sha256 in files)
    return hashlib.sha256(lines.encode()).hexdigest()


def save_checkpoint(
    state: Mapping[str, torch.Tensor], progress: Progress, folder: Path, holding: Holding = alone
) -> None:
    """Writes what a resumed trainer needs beside the weights; `state` is what `optimizer_state` gave."""
    with _scratch(folder, holding) as scratch:
        # No pickle: reading a checkpoint runs no code.
        write(safetensors(state), scratch / STATE_NAME)
        fault_point("trainer.state_written")
        (scratch / "progress.json").write_text(json.dumps(asdict(progress), indent=2) + "\n")
        _open_to_all(scratch)
        # Whoever resumes takes a checkpoint that has its name for one that is whole.
        _sync_whole(scratch)
        _take_name(scratch, folder, holding, moment="trainer.checkpoint_unnamed")
        _sync(folder.parent)


def load_checkpoint(optimizer: torch.optim.Optimizer, folder: Path, expected: Progress) -> None:
    """Restores optimiser and random state.

    Raises: CheckpointDamaged: files are missing, or belong to another run, step or weights than `expected`.
    """
    try:
        found = Progress(**json.loads((folder / "progress.json").read_text()))
        state = load_file(folder / STATE_NAME)
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise CheckpointDamaged(f"{folder} cannot be read ({error}): restore it from a backup") from error
    if found != expected:
        raise CheckpointDamaged(f"{folder} holds {found}, but the store recorded {expected}: restore it from a backup")
    try:
        _restore(optimizer, state)
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointDamaged(f"{folder} holds no such state ({error}): restore it from a backup") from error


def _restore(optimizer: torch.optim.Optimizer, state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state.pop("random"))
    moments: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in state.items():
        number, _, name = key.partition(".")
        moments.setdefault(int(number), {})[name] = tensor
    optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """`<parameter number>.<name>` to the optimiser's own tensor, and `random`, which is a copy.

    Rates and betas come from the run's document instead. The tensors change with the optimiser's next update.
    """
    moments = optimizer.state_dict()["state"].items()
    flat = {f"{number}.{name}": tensor for number, named in moments for name, tensor in named.items()}
    return {**flat, "random": torch.get_rng_state()}


def remove_folder(folder: Path) -> None:
    """Removes a version or checkpoint; a folder that is gone is fine."""
    shutil.rmtree(folder, ignore_errors=True)


def clear_scratch(root: Path, run_id: str) -> None:
    """Removes what a killed trainer left half-written. Only the holder of the run's lock may."""
    for scratch in (root / run_id).glob("*/.*.partial"):
        remove_folder(scratch)


@contextmanager
def _scratch(folder: Path, holding: Holding) -> Iterator[Path]:
    """A folder beside `folder` to write into; what has not taken the name by the end is removed.

    Args: holding: asked before anything is written, and where files fail
    """
    holding()
    # Nobody else's: a trainer that lost the run a moment ago may still write into its own.
    scratch = _aside(folder)
    scratch.mkdir(parents=True)
    try:
        yield scratch
    except OSError:
        # Whoever has the run now clears what is half-written.
        holding()
        raise
    finally:
        remove_folder(scratch)


def _aside(folder: Path) -> Path:
    """A new name beside `folder`, of those that `clear_scratch` removes."""
    return folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.partial")


def _take_name(scratch: Path, folder: Path, holding: Holding, *, moment: str) -> None:
    """Names what is written whole.

    Args: holding: asked first; moment: the fault point when nothing has the name
    """
    holding()
    old = _aside(folder)
    # Only a step that was never committed can have left this name; its files are nobody's. They are not removed in
    # place: NFS keeps the folder of a file that an engine of this machine has mapped.
    with contextlib.suppress(FileNotFoundError):
        folder.rename(old)
    fault_point(moment)
    scratch.rename(folder)
    remove_folder(old)


def _open_to_all(folder: Path) -> None:
    for file in folder.iterdir():
        file.chmod(0o644)


def _sync_whole(folder: Path) -> None:
    """Returns once a folder's files, and their names in it, are on the disk; its own name may not be."""
    for path in (*folder.iterdir(), folder):
        _sync(path)


def _sync_named(folder: Path, written: os.stat_result, holding: Holding) -> None:
    """Brings a folder that has taken its name to the disk, the name included; where that fails, removes it.

    Args:   written: the folder, as it was before it took the name
    Raises: OSError: it is not on the disk, or another folder has the name by now; what `holding` does
    """
    try:
        _sync_whole(folder)
        _sync(folder.parent)
        if not os.path.samestat(folder.stat(), written):
            raise OSError(
                f"{folder} is not the folder that was given this name, though no other trainer has the run: where its"
                " file system gives a renamed folder another identity, set TRAINER_FOLDER to a folder on another one"
            )
    except OSError:
        # Another trainer's folder is its own.
        holding()
        if os.path.samestat(folder.stat(), written):
            remove_folder(folder)
        raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
