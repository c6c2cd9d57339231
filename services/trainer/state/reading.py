"""Reads a checkpoint into a learner, and refuses what is not what was written."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.optim import Optimizer

from leyden.libs.contracts.weights import file_sha256
from leyden.services.trainer.model.remedies import raising_host_memory
from leyden.services.trainer.model.tensors import divided_like, replace_values, rounds_to
from leyden.services.trainer.model.value_head import TARGETS
from leyden.services.trainer.ranks.collectives import ALONE, Ranks
from leyden.services.trainer.rows.progress import Progress
from leyden.services.trainer.state.checkpoints import (
    MANIFEST_NAME,
    RANDOM,
    ROUNDED,
    critic_weights,
    master_weights,
)
from leyden.services.trainer.state.folders import CheckpointDamaged
from leyden.services.trainer.state.shards import read_shards
from leyden.services.trainer.step.learner import Learner
from leyden.services.trainer.step.optimizers import SCALES, restore_moment


def check_checkpoint(folder: Path, expected: Progress, ranks: Ranks = ALONE) -> None:
    """Passes a checkpoint whose files are all there, and whose files of this rank's share have the recorded hashes.

    It reads bytes alone, so that no learner is built beside a damaged file.

    Raises: CheckpointDamaged: files are missing, differ from those that were written, or have no hash; or they belong
                to another run, step or weights than `expected`
    """
    hashes = _read_manifest(folder, expected)
    if unknown := sorted({file.name for file in folder.glob("*.safetensors")} - hashes.keys()):
        raise CheckpointDamaged(f"{folder} holds {unknown}, which the trainer did not write: restore it from a backup")
    for number, (name, sha256) in enumerate(sorted(hashes.items())):
        file = folder / name
        try:
            damaged = number % ranks.size == ranks.rank and sha256 != file_sha256(file)
        except OSError as error:
            raise CheckpointDamaged(f"{file} cannot be read ({error}): restore it from a backup") from error
        if damaged:
            raise CheckpointDamaged(f"{file} is not the file that was written, by its hash: restore it from a backup")


def read_checkpoint(learner: Learner, folder: Path, *, has_version: bool = True) -> None:
    """Restores optimiser and random state, and a critic's own weights; of what is sharded, this rank's shards.

    A checkpoint that has weights, too, has what the version rounded, and they are restored.

    Args:   has_version: the learner has the weights of the step's version; else the checkpoint must have all of them
    Raises: CheckpointDamaged: the files, which `check_checkpoint` has passed, hold another learner's state;
                torch.OutOfMemoryError
    """
    try:
        with raising_host_memory():
            _restore(learner, folder, has_version=has_version)
    except torch.OutOfMemoryError:
        raise
    except (LookupError, OSError, RuntimeError, TypeError, ValueError, SafetensorError) as error:
        raise CheckpointDamaged(f"{folder} holds no such state ({error}): restore it from a backup") from error


def _read_manifest(folder: Path, expected: Progress) -> dict[str, str]:
    """The hash of each file of a checkpoint by its name."""
    file = folder / MANIFEST_NAME
    try:
        document = dict(json.loads(file.read_text()))
        hashes = document.pop("files", None)
        found = Progress(**document)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointDamaged(f"{file} cannot be read ({error}): restore it from a backup") from error
    if found != expected:
        raise CheckpointDamaged(f"{folder} holds {found}, but the store recorded {expected}: restore it from a backup")
    if not isinstance(hashes, dict) or not all(hashes.values()):
        raise CheckpointDamaged(
            f"{file} has no hashes, as an older release wrote it, so that damage would be trained: restore it from a"
            " backup that has them, or continue the run as a new one, whose optimiser begins anew (`leyden run resume`)"
        )
    return hashes


def _restore(learner: Learner, folder: Path, *, has_version: bool) -> None:
    optimizer = learner.optimizer
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own, master = critic_weights(learner), master_weights(learner)
    named = {**own, **master}
    numbered = {str(number): parameter for number, parameter in enumerate(parameters)}
    found = set[str]()
    for state in read_shards(folder, lambda key: named.get(key, numbered.get(key.partition(".")[0]))):
        found |= state.keys()
        # No local variable has a tensor: it would stay in host memory beside the next ones.
        for key in state:
            number, _, name = key.partition(".")
            if key == RANDOM:
                torch.set_rng_state(state[key])
            elif key in named:
                _restore_weights(named[key], key, state[key], rounded=has_version and key in master)
            elif not key.endswith(SCALES):
                _restore_moment(optimizer, parameters[int(number)], name, state[key], state.get(key + SCALES))
    # A version that rounds no weights has them all.
    wanted = own if has_version and found.isdisjoint(master) else named
    for key in {RANDOM, *wanted} - found:
        if key not in own or not key.endswith(TARGETS):
            raise KeyError(key)
        # An older release's outputs were values themselves.
        replace_values(own[key], torch.tensor([0.0, 1.0, 1.0]))


def _restore_weights(own: Tensor, key: str, saved: Tensor, *, rounded: bool) -> None:
    if rounded and not rounds_to(saved, own, ROUNDED):
        raise ValueError(f"{key} does not round to the weights of the version")
    replace_values(own, saved)


def _restore_moment(optimizer: Optimizer, like: Tensor, name: str, saved: Tensor, scales: Tensor | None) -> None:
    scales = None if scales is None else divided_like(scales, like)
    restore_moment(optimizer, like, name, saved.to(like.device), scales)
