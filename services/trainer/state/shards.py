"""Tensors of a checkpoint on disk, by torch.distributed.checkpoint: each rank writes and reads its own shards.

The files are safetensors: reading them runs no code. Their headers name each shard's offset, so that any number of
ranks reads what any number has written. The one file of a trainer of one process is read in the same way.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from leyden.libs.contracts.weights import file_sha256
from leyden.libs.faults import fault_point
from leyden.services.trainer.ranks.collectives import Ranks
from leyden.services.trainer.state.folders import in_parts
from leyden.services.trainer.step.optimizers import SCALES

FILE_BYTES = 2**30
"""A rank begins a new file after so many bytes: torch holds two copies of a file in host memory while it writes it."""


def write_shards(state: Mapping[str, Tensor], folder: Path, ranks: Ranks) -> dict[str, str]:
    """Writes this rank's shards and, on rank 0, all that is not sharded. All ranks call it, in the same order.

    Args:    folder: all ranks see it
    Returns: on rank 0, the hashes of all ranks' files by name; the files are complete and on the disk
    Raises:  OSError: a file of any rank cannot be written, or a rank does not see the folder; RankLost
    """
    writer = _ShardWriter(state, folder)
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    with _causes(), ranks.answering():
        save(dict(state), storage_writer=writer, planner=planner, process_group=ranks.background)
    return writer.hashes


def read_shards(folder: Path, like: Callable[[str], Tensor | None]) -> Iterator[dict[str, Tensor]]:
    """All tensors of a folder, in host memory; of those that are sharded here, this rank's shards. No collective.

    They come in parts as `in_parts` makes them, a moment with its scales. Each part is emptied before the next is read:
    host memory holds one at a time.

    Args: like: the parameter whose sharding a tensor of the same shape has
    """
    reader = _ShardReader(folder)
    scales = {name + SCALES for name in reader.saved} & reader.saved.keys()
    for names in in_parts({name: saved for name, saved in reader.saved.items() if name not in scales}):
        names += [name + SCALES for name in names if name + SCALES in scales]
        part = {name: _room(reader.saved[name], like(name)) for name in names}
        with _causes(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(part, storage_reader=reader, no_dist=True)
        yield part
        part.clear()


def _room(saved: Tensor, like: Tensor | None) -> Tensor:
    if like is not None and like.shape == saved.shape:
        return torch.empty_like(like, dtype=saved.dtype, device="cpu", requires_grad=False)
    return torch.empty_like(saved, device="cpu")


class _ShardReader(HuggingFaceStorageReader):
    """torch's reader of safetensors, which reads the headers of all files once.

    `saved` has the shape and type of each complete tensor.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self._metadata = super().read_metadata()
        self.saved = dict[str, Tensor]()
        for name, saved in self._metadata.state_dict_metadata.items():
            assert isinstance(saved, TensorStorageMetadata)
            self.saved[name] = torch.empty(saved.size, dtype=saved.properties.dtype, device="meta")

    def read_metadata(self) -> Metadata:
        return self._metadata


class _Written(NamedTuple):
    """A file of some rank."""

    name: str
    sha256: str


class _ShardWriter(HuggingFaceStorageWriter):
    """torch's writer of safetensors, which knows on rank 0 the files of all ranks and their hashes."""

    def __init__(self, state: Mapping[str, Tensor], folder: Path) -> None:
        super().__init__(str(folder), _file_numbers(state), save_distributed=True)
        # Copying ahead would use the device of this thread, which is not that of the rank.
        self.per_thread_copy_ahead = 0
        self.hashes: dict[str, str] = {}

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        # torch makes a missing folder: this rank's files would then lie where neither rank 0 nor a resumed run looks.
        if not Path(self.path).is_dir():
            raise FileNotFoundError(
                f"{self.path}: rank 0 made this folder, and rank {dist.get_rank()} does not see it:"
                " check the storage that they share, TRAINER_FOLDER"
            )
        return super().prepare_local_plan(plan)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = super().write_data(plan, planner).wait()
        names = {one.storage_data.relative_path for one in results}
        hashes = {name: file_sha256(Path(self.path) / name) for name in names}
        written = Future[list[WriteResult]]()
        written.set_result(
            [
                replace(one, storage_data=_Written(path := one.storage_data.relative_path, hashes[path]))
                for one in results
            ]
        )
        if dist.get_rank() > 0:
            fault_point("trainer.follower_shards_written")
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.hashes = {one.storage_data.name: one.storage_data.sha256 for of_rank in results for one in of_rank}


def _file_numbers(state: Mapping[str, Tensor]) -> dict[str, int]:
    numbers, size = {}, 0
    for name, tensor in state.items():
        numbers[name] = 1 + size // FILE_BYTES
        size += tensor.to_local().nbytes if isinstance(tensor, DTensor) else tensor.nbytes
    return numbers


@contextmanager
def _causes() -> Iterator[None]:
    """Raises the error of the first rank that failed, in place of torch's, which is no `Exception`."""
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error
