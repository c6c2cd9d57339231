"""The weights of a folder, read tensor by tensor: of a divided parameter, this process's rows alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain, count, takewhile
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from leyden.services.trainer.model.experts import FILE_MATRICES
from leyden.services.trainer.model.forward import Policy
from leyden.services.trainer.model.tensors import first_row, local_part


class WeightFiles:
    """The tensors of a folder's safetensors files under the names that a model's parameters have.

    Files may have or lack the prefix of the decoder (`model.`), and have experts one by one, as published models do.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._paths = dict[str, Path]()
        for path in _files(folder):
            with safe_open(path, "pt") as file:
                self._paths |= dict.fromkeys(file.keys(), path)

    def has(self, model: PreTrainedModel) -> bool:
        """Whether all weights that the model lacks are here."""
        return all(self._sources(model, name) for name, _ in _missing(model))

    def rows(self, model: PreTrainedModel, name: str, like: Tensor) -> Tensor:
        """The rows of a weight that this process has of `like`, the parameter of this name, in the type of the file.

        Raises: LookupError: the folder lacks it; ValueError: it has another shape
        """
        sources = self._sources(model, name)
        if not sources:
            raise LookupError(f"{self.folder} has no weights {name}: it belongs to another model")
        first, last = first_row(like), first_row(like) + local_part(like).shape[0]
        if len(sources) == 1 and len(sources[0]) == 1:
            rows, found = self._read(sources[0][0], first, last)
        else:
            parts = [torch.cat([self._read(one)[1] for one in names]) for names in sources[first:last]]
            rows, found = len(sources), torch.stack(parts) if parts else torch.empty(local_part(like).shape)
        if (rows, *found.shape[1:]) != like.shape:
            raise ValueError(f"{self.folder}: {name} has the shape of another model")
        return found

    def _read(self, name: str, first: int = 0, last: int | None = None) -> tuple[int, Tensor]:
        """A tensor's number of rows, and some of them."""
        # Opened for each tensor: what was read of a file counts as this process's memory until it is closed.
        with safe_open(self._paths[name], "pt") as file:
            rows = file.get_slice(name)
            return rows.get_shape()[0], rows[first:last]

    def _sources(self, model: PreTrainedModel, name: str) -> list[tuple[str, ...]]:
        """The names in the files: one, or for a tensor of experts those of each; none where the folder lacks some."""
        name, prefix = name.replace(".base_layer.", "."), f"{model.base_model_prefix}."
        for base in (name, prefix + name, name.removeprefix(prefix)):
            if base in self._paths:
                return [(base,)]
            if found := self._experts(base):
                return found
        return []

    def _experts(self, name: str) -> list[tuple[str, ...]]:
        stem, _, kind = name.rpartition(".")
        matrices = FILE_MATRICES.get(kind, ())
        numbered = (tuple(f"{stem}.{number}.{one}.weight" for one in matrices) for number in count())
        return list(takewhile(lambda names: names and self._paths.keys() >= set(names), numbered))


def _files(folder: Path) -> list[Path]:
    """Those that transformers reads: some publishers put the same weights beside them under other names."""
    single, index = folder / SAFE_WEIGHTS_NAME, folder / SAFE_WEIGHTS_INDEX_NAME
    if single.exists() or not index.exists():
        return [single] if single.exists() else []
    return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]


@torch.no_grad()
def place(policy: Policy, files: WeightFiles, device: torch.device) -> None:
    """Moves a policy to its device, divided already or whole, and reads there the weights that it lacks.

    Each process reads its own rows, and waits for no other.
    """
    model, missing = policy.model, missing_names(policy.model)
    if missing:
        _allocate(policy, device)
    policy.to(device)
    for name, parameter in model.named_parameters():
        if name in missing:
            local_part(parameter).copy_(files.rows(model, name, parameter))


def _allocate(policy: Policy, device: torch.device) -> None:
    """Gives what lacks values memory on the device; what has values keeps them."""
    kept = {name: one.detach().clone() for name, one in _tensors(policy) if not one.is_meta}
    policy.to_empty(device=device)
    # Each weight has memory of its own now.
    policy.model.tie_weights()
    for name, one in _tensors(policy):
        if name in kept:
            one.copy_(kept[name])


def _tensors(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    return chain(policy.named_parameters(), policy.named_buffers())


def missing_names(model: PreTrainedModel) -> frozenset[str]:
    """Names of parameters that have no values yet: they are on the meta device."""
    return frozenset(name for name, _ in _missing(model))


def _missing(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    return ((name, one) for name, one in model.named_parameters() if one.is_meta)
