"""Several processes of a trainer against one."""

import inspect
import time
import weakref
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.weights import weight_files
from leyden.services.trainer.follower import _follow
from leyden.services.trainer.model.forward import Policy
from leyden.services.trainer.ranks.collectives import RankFailed, Ranks
from leyden.services.trainer.ranks.messages import Load, Step
from leyden.services.trainer.rows import tree
from leyden.services.trainer.rows.tree import share_rows
from leyden.services.trainer.settings import Settings
from leyden.services.trainer.state import resume as resuming
from leyden.services.trainer.state.folders import CheckpointDamaged
from leyden.services.trainer.step.learner import Learner
from leyden.services.trainer.step.step import optimizer_step
from tests.fakes.forked_trainer import run_forked
from tests.support.builders import run_document
from tests.support.long import long_only
from tests.support.shared import free_port
from tests.support.waiting import until
from tests.unit.trainer import ranked
from tests.unit.trainer.cases import agent_samples
from tests.unit.trainer.ranked import MODELS, RESUMED, Found, resume, save, start, train

PER_RANK = ("computed_tokens", "row_tokens", "sharing_ratio")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("size", "copies"), [(2, 1), pytest.param(4, 1, marks=long_only), pytest.param(4, 2, marks=long_only)]
)
def test_weights_and_metrics_of_several_ranks_are_those_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, copies: int
) -> None:
    ranked.as_the_ranks(monkeypatch)
    for model in RESUMED:
        save(model, tmp_path / "one")
    run_forked(ranked.main, size, free_port(), tmp_path, copies, processes=size)
    of_ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(size)]
    expected = {model: train(*start(model)) for model in MODELS}
    # Checkpoints of one process continue at several, and those of several at one.
    for model in RESUMED:
        metrics, weights = expected[model]
        third: Found = (metrics[-1:], weights)
        expected[f"resumed {model}"] = third
        _assert_same(f"{model} resumed at one", resume(model, tmp_path / "several"), third)
        one, several = (_exported(tmp_path / name / model / "version") for name in ("one", "several"))
        _assert_same(f"{model} exported", ([], several), ([], one))
        assert one.keys() == several.keys()
    for name, found in of_ranks[0].items():
        _assert_same(name, found, expected[name])
        for other in of_ranks[1:]:
            assert all(torch.equal(other[name][1][key], weight) for key, weight in found[1].items()), name


def _exported(version: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in weight_files(version) for name, tensor in load_file(file).items()}


def _assert_same(name: str, found: Found, expected: Found) -> None:
    for key, weight in expected[1].items():
        assert torch.allclose(found[1][key], weight, rtol=0, atol=1e-10), (name, key)
    for one, other in zip(found[0], expected[0], strict=True):
        assert one["computed_tokens"] >= other["computed_tokens"]
        assert one["row_tokens"] == other["row_tokens"]
        comparable = {key for key in other if not key.endswith("_seconds") and key not in PER_RANK}
        assert {key: one[key] for key in comparable} == pytest.approx(
            {key: other[key] for key in comparable}, rel=1e-10, abs=1e-10
        )


def _reference_first(rank: int, port: int) -> None:
    ranks = ranked.join(rank, 2, port)
    learner, config = start("lora", ranks, bfloat16=True)
    once = config.algorithm.model_copy(update={"mini_batches": 1})
    before = {name: one.full_tensor() for name, one in learner.weights.items()}
    optimizer_step(learner, agent_samples(0, groups=2), config.model_copy(update={"algorithm": once}))
    assert any(not torch.equal(one.full_tensor(), before[name]) for name, one in learner.weights.items())
    ranks.close()


def test_adapters_train_in_bfloat16_where_the_reference_makes_the_first_pass() -> None:
    run_forked(_reference_first, free_port(), processes=2)


def _write_slowly(rank: int, folder: str) -> None:
    timeout = timedelta(seconds=8)
    # On a busy machine one process may start later than the other by more than that.
    Path(folder, f"began {rank}").touch()
    until(lambda: all(Path(folder, f"began {one}").exists() for one in range(2)), "both ranks")
    dist.init_process_group("gloo", f"file://{folder}/store", timeout=timeout, rank=rank, world_size=2)
    ranks = Ranks(rank, 2, timeout_seconds=timeout.total_seconds())
    began = time.monotonic()

    def is_written(seconds: float) -> bool:
        time.sleep(seconds)
        return time.monotonic() - began > 1.5 * timeout.total_seconds()

    def is_not_written(seconds: float) -> bool:
        raise OSError("no space left")

    # Four updates: the ranks compute gradients together again once the first one is made.
    learner, config = start("qwen", ranks)
    own = {"is_written": is_written} if rank == 0 else {}
    optimizer_step(learner, agent_samples(0, groups=4), config, **own)
    own = {"is_written": is_not_written} if rank == 0 else {}
    with pytest.raises(OSError if rank == 0 else RankFailed, match="no space left"):
        optimizer_step(learner, agent_samples(1, groups=4), config, **own)
    assert learner.step == 1


def test_ranks_wait_for_a_checkpoint_that_takes_longer_than_their_timeout(tmp_path: Path) -> None:
    run_forked(_write_slowly, str(tmp_path), processes=2)


def _disagree(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", f"file://{folder}/store", timeout=timedelta(seconds=60), rank=rank, world_size=2)
    ranks = Ranks(rank, 2)

    def broken_on_one(error: Exception) -> None:
        with ranks.agreeing_on(CheckpointDamaged):
            if rank == 1:
                raise error

    for raised, elsewhere in ((OSError, RankFailed), (CheckpointDamaged, CheckpointDamaged)):
        with pytest.raises(raised if rank == 1 else elsewhere, match="broken"):
            broken_on_one(raised("broken"))


def test_an_error_of_one_rank_is_an_error_of_all(tmp_path: Path) -> None:
    run_forked(_disagree, str(tmp_path), processes=2)


def _exhaust(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", f"file://{folder}/store", timeout=timedelta(seconds=60), rank=rank, world_size=2)
    ranks = Ranks(rank, 2)
    # Rank 0 loads on, into the collectives that shard a model.
    load = partial(ranks.add, torch.ones(1000)) if rank == 0 else partial(torch.empty, 2**50)
    with pytest.raises(RuntimeError) as raised, ranks.agreeing_on(CheckpointDamaged):
        load()
    Path(folder, str(rank)).write_text(f"{raised.type.__name__} {raised.value}")


def test_a_rank_that_runs_out_of_memory_ends_at_once_with_its_own_error(tmp_path: Path) -> None:
    run_forked(_exhaust, str(tmp_path), processes=2)
    assert (tmp_path / "0").read_text().startswith("RankLost")
    assert "can't allocate memory" in (tmp_path / "1").read_text()


def test_the_controller_knows_the_end_of_a_rank_that_lost_another_one() -> None:
    # Every rank of the other tests would import the client of Kubernetes for 0.6 s.
    from leyden.services.controller.trainers.kubernetes import RANK_LOST

    assert RANK_LOST in inspect.getsource(Ranks)


def test_shares_are_stretches_of_the_sorted_rows_with_about_as_many_nodes() -> None:
    rows = [one.token_ids for one in agent_samples(0, groups=6, siblings=4)]
    shares = [share_rows(rows, rank, 3) for rank in range(3)]
    assert sorted(row for share in shares for row in share) == list(range(len(rows)))
    in_order = [rows[row].astype(">u4").tobytes() for share in shares for row in share]
    assert in_order == sorted(in_order)
    nodes = [tree.plan_forest([rows[row] for row in share], 10_000).computed_tokens for share in shares]
    assert max(nodes) <= 1.25 * np.mean(nodes)


def test_a_rank_may_have_no_row() -> None:
    rows = [np.array([1, 2, 3], np.int32)] * 2
    assert sorted(row for rank in range(4) for row in share_rows(rows, rank, 4)) == [0, 1]
    assert [share_rows([], rank, 2) for rank in range(2)] == [[], []]


class _Messages(Ranks):
    """Rank 0's messages, to a trainer of one process."""

    def __init__(self, *messages: object) -> None:
        super().__init__()
        self._messages = iter(messages)

    def receive(self) -> object:
        return next(self._messages, None)

    def close(self) -> None:
        """There is no process group."""


def test_the_learner_of_a_follower_leaves_the_memory_before_the_next_one_loads(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, policies, met = resuming.assemble_learner, list[weakref.ref[Policy]](), list[bool]()

    def assemble(*arguments: Any, **options: Any) -> Learner:
        met.extend(policy() is not None for policy in policies)
        learner = real(*arguments, **options)
        # As accelerate does for autocast.
        learner.policy._original_forward = learner.policy.forward
        policies.append(weakref.ref(learner.policy))
        return learner

    monkeypatch.setattr(resuming, "assemble_learner", assemble)
    load = Load(tiny_model, RunConfig.model_validate(run_document()))
    step = Step(agent_samples(0), [])
    settings = Settings(run_id="run-a", device="cpu")
    _follow(settings, _Messages(load, step, load), lambda: False)
    assert met == [False]
