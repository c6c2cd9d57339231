"""Checkpoints that several processes write and read, each its own shards."""

import errno
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from leyden.libs.store.locks import LockLost
from leyden.services.trainer.ranks.collectives import RankLost
from leyden.services.trainer.state.checkpoints import checkpoint_state
from leyden.services.trainer.state.folders import CheckpointDamaged
from leyden.services.trainer.state.reading import check_checkpoint, read_checkpoint
from leyden.services.trainer.state.shards import _ShardWriter, read_shards
from leyden.services.trainer.step.step import optimizer_step
from tests.fakes.forked_trainer import run_forked
from tests.support.shared import free_port
from tests.unit.trainer import ranked
from tests.unit.trainer.cases import agent_samples
from tests.unit.trainer.ranked import PROGRESS, RESUMED, made, start, train, write


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which two ranks save a checkpoint of each model."""
    folder = tmp_path_factory.mktemp("two")
    run_forked(ranked.save_all, 2, free_port(), folder, processes=2)
    return folder


@pytest.mark.parametrize("model", RESUMED)
def test_a_rank_writes_its_shards_alone_and_rank_0_what_is_not_sharded(of_two: Path, model: str) -> None:
    folder = of_two / model / "checkpoint"
    names = json.loads((folder / "progress.json").read_text())["files"]
    assert {file.name for file in folder.iterdir()} == {"progress.json", *names}
    complete = {name: one.shape for part in read_shards(folder, lambda _: None) for name, one in part.items()}
    assert complete.keys() >= {"0.step", "random"}
    rows = [dict.fromkeys(complete, 0) for _ in range(2)]
    numbers = dict.fromkeys(complete, 0)
    for name in names:
        rank = int(name.split("-")[1]) - 1
        with safe_open(folder / name, "pt") as file:
            for key in file.keys():  # noqa: SIM118  # not a dictionary
                numbers[key] += 1
                shape = file.get_slice(key).get_shape()
                rows[rank][key] = shape[0] if shape else 1
    for key, shape in complete.items():
        if key == "random" or key.endswith(("step", "value_head.targets")):
            assert (rows[1][key], numbers[key]) == (0, 1)
        else:
            first = (shape[0] + 1) // 2
            assert (rows[0][key], rows[1][key]) == (first, shape[0] - first), key
    assert len(names) > 2


@pytest.mark.timeout(300)
def test_four_ranks_continue_what_two_have_written(
    of_two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranked.as_the_ranks(monkeypatch)
    run_forked(ranked.resume_all, 4, free_port(), of_two, tmp_path, processes=4)
    for model in RESUMED:
        expected = train(*start(model))[1]
        for rank in range(4):
            found = torch.load(tmp_path / f"{rank}.pt")[model][1]
            for name, weight in expected.items():
                assert torch.allclose(found[name], weight, rtol=0, atol=1e-10), (model, rank, name)


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.unlink(),
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(file.read_bytes()[:-1]),
        lambda file: file.write_bytes(b"\xff" * 64),
    ],
    ids=["missing", "empty", "cut", "garbage"],
)
@pytest.mark.parametrize("rank", [1, 2])
def test_a_missing_or_damaged_file_of_a_rank_is_named(
    of_two: Path, tmp_path: Path, damage: Callable[[Path], object], rank: int
) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for file in (of_two / "lora" / "checkpoint").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    check_checkpoint(folder, PROGRESS)
    [damaged, *_] = sorted(folder.glob(f"shard-0000{rank}-*"))
    damage(damaged)
    with pytest.raises(CheckpointDamaged, match=f"{damaged} (cannot be read|is not the file) .*: restore it"):
        check_checkpoint(folder, PROGRESS)


def _fail_and_write_again(rank: int, size: int, port: int, folder: Path) -> None:
    ranks = ranked.join(rank, size, port)
    learner, config = start("llama", ranks)
    train(learner, config, until=1)
    state, real = checkpoint_state(learner), _ShardWriter.write_data

    def full_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    def lost() -> None:
        raise LockLost("another trainer may have gone on")

    for failing in range(size):
        _ShardWriter.write_data = full_disk if rank == failing else real  # type: ignore[method-assign, assignment]
        with pytest.raises(OSError, match="no space left") as caught:
            write(state, made(folder / f".{failing}.partial", ranks), folder / "1", ranks)
        assert caught.value.errno == errno.ENOSPC
    _ShardWriter.write_data = real  # type: ignore[method-assign]
    scratch = made(folder / ".2.partial", ranks)
    if rank == 0:
        with pytest.raises(LockLost):
            write(state, scratch, folder / "1", ranks, lost)
    else:
        write(state, scratch, folder / "1", ranks)
    ranks.any(flag=False)
    assert [path.name for path in folder.iterdir()] == []
    ranks.any(flag=False)
    write(state, made(folder / ".3.partial", ranks), folder / "1", ranks)
    ranks.any(flag=False)
    assert [path.name for path in folder.iterdir()] == ["1"]
    check_checkpoint(folder / "1", PROGRESS, ranks)
    read_checkpoint(start("llama", ranks)[0], folder / "1")
    ranks.close()


def test_a_checkpoint_that_one_rank_cannot_write_is_none_and_the_next_is_complete(tmp_path: Path) -> None:
    run_forked(_fail_and_write_again, 2, free_port(), tmp_path, processes=2)


def _write_into_two_storages(rank: int, size: int, port: int, folder: Path) -> None:
    ranks = ranked.join(rank, size, port)
    learner, config = start("llama", ranks)
    train(learner, config, until=1)
    scratch = made(folder / ".1.partial", ranks)
    scratch = scratch if rank == 0 else folder / "another" / ".1.partial"
    with pytest.raises(FileNotFoundError, match=r"rank 1 does not see it: check the storage"):
        write(checkpoint_state(learner), scratch, folder / "1", ranks)
    ranks.any(flag=False)
    assert list(folder.iterdir()) == []
    ranks.close()


def test_no_folder_gets_its_name_if_a_rank_writes_into_another_storage(tmp_path: Path) -> None:
    run_forked(_write_into_two_storages, 2, free_port(), tmp_path, processes=2)


def _die_after_writing(rank: int, size: int, port: int, folder: Path) -> None:
    ranks = ranked.join(rank, size, port)
    learner, config = start("llama", ranks)
    train(learner, config, until=1)
    state, real = checkpoint_state(learner), _ShardWriter.write_data
    scratch = made(folder / ".1.partial", ranks)
    if rank == 0:
        began = time.monotonic()
        with pytest.raises(RankLost):
            write(state, scratch, folder / "1", ranks)
        assert time.monotonic() - began < 30
        assert list(folder.iterdir()) == []
        os._exit(0)

    def die(*arguments: object) -> None:
        real(*arguments)  # type: ignore[arg-type]
        assert list(scratch.glob("shard-00002-*"))
        os._exit(0)

    _ShardWriter.write_data = die  # type: ignore[method-assign, assignment]
    write(state, scratch, folder / "1", ranks)


def test_no_folder_gets_its_name_if_a_rank_dies_after_writing_its_part(tmp_path: Path) -> None:
    run_forked(_die_after_writing, 2, free_port(), tmp_path, processes=2)


def _write_during_a_step(rank: int, size: int, port: int, folder: Path) -> None:
    ranks = ranked.join(rank, size, port)
    learner, config = start("llama", ranks)
    train(learner, config, until=1)
    state, real = checkpoint_state(learner), _ShardWriter.write_data
    moments = [parameter["exp_avg"].to_local() for parameter in learner.optimizer.state.values()]

    def slow(*arguments: object) -> object:
        if rank == 1:
            before = [moment.clone() for moment in moments]
            time.sleep(3)
            assert all(map(torch.equal, before, moments))
        return real(*arguments)  # type: ignore[arg-type]

    _ShardWriter.write_data = slow  # type: ignore[method-assign, assignment]
    thread = threading.Thread(target=write, args=(state, made(folder / ".1.partial", ranks), folder / "1", ranks))
    thread.start()

    def is_written(seconds: float) -> bool:
        thread.join(seconds)
        return not thread.is_alive()

    before = [moment.clone() for moment in moments]
    own = {"is_written": is_written} if rank == 0 else {}
    optimizer_step(learner, agent_samples(1, groups=4), config, **own)
    assert not all(map(torch.equal, before, moments))
    thread.join()
    # The file holds the moments of before.
    saved = {name: tensor for part in read_shards(folder / "1", state.get) for name, tensor in part.items()}
    found = [tensor.to_local() for name, tensor in saved.items() if name.endswith(".exp_avg")]  # type: ignore[attr-defined]
    assert sum(float(moment.sum()) for moment in found) == pytest.approx(sum(float(moment.sum()) for moment in before))
    ranks.close()


def test_no_rank_updates_its_moments_while_another_one_writes(tmp_path: Path) -> None:
    run_forked(_write_during_a_step, 2, free_port(), tmp_path, processes=2)


def _read_a_flipped_bit(rank: int, size: int, port: int, folder: Path) -> None:
    ranks = ranked.join(rank, size, port)
    learner, config = start("llama", ranks)
    train(learner, config, until=1)
    write(checkpoint_state(learner), made(folder / ".1.partial", ranks), folder / "1", ranks)
    ranks.any(flag=False)
    for file in sorted((folder / "1").glob("shard-*")):
        content = file.read_bytes()
        if rank == 0:
            file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        ranks.any(flag=False)
        with (
            pytest.raises(CheckpointDamaged, match=f"{file.name} is not the file"),
            ranks.agreeing_on(CheckpointDamaged),
        ):
            check_checkpoint(folder / "1", PROGRESS, ranks)
        if rank == 0:
            file.write_bytes(content)
        ranks.any(flag=False)
    ranks.close()


def test_a_flipped_bit_in_any_ranks_file_is_damage_on_all_ranks(tmp_path: Path) -> None:
    run_forked(_read_a_flipped_bit, 2, free_port(), tmp_path, processes=2)
