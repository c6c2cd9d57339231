"""A few steps of a tiny learner in float64, as one of several processes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from leyden.libs.contracts.config import Lora, RunConfig
from leyden.services.trainer.model.forward import Policy
from leyden.services.trainer.model.held import hold_frozen
from leyden.services.trainer.model.lora import adapter_parameters, add_adapters
from leyden.services.trainer.model.sharding import shard
from leyden.services.trainer.model.tensors import gather, replace_values
from leyden.services.trainer.model.value_model import ValueModel
from leyden.services.trainer.ranks.collectives import ALONE, Ranks, join_ranks
from leyden.services.trainer.ranks.messages import Gather
from leyden.services.trainer.rows import tree
from leyden.services.trainer.rows.batch import Sample
from leyden.services.trainer.rows.progress import Progress
from leyden.services.trainer.state import folders, shards
from leyden.services.trainer.state.canaries import read_logprobs
from leyden.services.trainer.state.checkpoints import checkpoint_state
from leyden.services.trainer.state.folders import LockCheck, no_lock
from leyden.services.trainer.state.reading import read_checkpoint
from leyden.services.trainer.state.saving import save_checkpoint
from leyden.services.trainer.state.shards import write_shards
from leyden.services.trainer.state.versions import export_version, gather_weights, parts_of
from leyden.services.trainer.step import optimizers
from leyden.services.trainer.step.gradients import Interrupted
from leyden.services.trainer.step.learner import BasePolicy, Learner, Reference, copied
from leyden.services.trainer.step.metrics import Metrics
from leyden.services.trainer.step.optimizers import make_optimizer
from leyden.services.trainer.step.step import optimizer_step
from tests.unit.trainer.cases import agent_samples, one_call, sample, tiny_experts, tiny_gpt_oss, tiny_llama, tiny_qwen

SEVERAL = {"mini_batches": 2, "epochs": 2, "correction": {"type": "decoupled"}}
OPTIMIZERS = {"lora": {"offload": True, "moments": "bfloat16"}, "own critic": {"moments": "8bit"}}
CRITIC = {"mini_batches": 2, "critic": {"warmup_steps": 1, "learning_rate": 0.05, "value_clip": 0.02}}
MODELS = {
    "llama": (tiny_llama, {}),
    "qwen": (tiny_qwen, SEVERAL),
    "critic": (tiny_llama, CRITIC),
    "own critic": (
        tiny_llama,
        {**CRITIC, "critic": {**CRITIC["critic"], "trunk": "own", "trunk_learning_rate": 0.02, "max_grad_norm": 0.02}},
    ),
    "lora": (tiny_llama, {"mini_batches": 2}),
    "refreshed lora": (tiny_llama, {"mini_batches": 2}),
    "checkpointing": (tiny_llama, {}),
    "experts": (tiny_experts, {"mini_batches": 2}),
    "gpt-oss": (tiny_gpt_oss, {"mini_batches": 2}),
}
"""Models and how they differ: Qwen makes four updates a step; those with critics two, and only values learn in their
first step; versions of `critic` are in bfloat16; `lora` trains adapters behind a frozen first layer, and its base model
is its reference; that of `refreshed lora` and of `qwen` is the version of every second step, and the base model of
`refreshed lora` is held in bfloat16; `checkpointing` computes layers again in the backward pass; `experts` and
`gpt-oss` have frozen routers, and `experts` replays a recorded choice."""
SMALL = 512, 16
"""Sizes from which these models' parameters take 8-bit moments."""
RESUMED = ("critic", "own critic", "lora", "experts")
STEPS = 3
CANARY = [1, 2, 3, 4, 5], [1, 2, 6], [7, 8]
PROGRESS = Progress("run", 2, "")

Found = tuple[list[Metrics], dict[str, torch.Tensor]]


def start(model: str, ranks: Ranks = ALONE, *, bfloat16: bool = False) -> tuple[Learner, RunConfig]:
    make, algorithm = MODELS[model]
    has_critic = "critic" in model
    changes = {
        "optimizer": {"learning_rate": 1e-2, "max_grad_norm": 0.05, **OPTIMIZERS.get(model, {})},
        "algorithm": {"type": "ppo_clip", "kl_coefficient": 0.1, "entropy_coefficient": 0.01, **algorithm},
        "training": {"micro_batch_tokens": 40},
        "credit": {"baseline": {"type": "value" if has_critic else "mean"}},
    }
    config = RunConfig.model_validate({"name": "n", "dataset": "d", "agent": {"command": ["x"]}, **changes})
    own = make(0)
    if "lora" in model:
        torch.manual_seed(0)
        add_adapters(own, Lora(rank=3), ["model.layers.0.*"], Path("base"))
        if model == "refreshed lora":
            hold_frozen(own, own.get_input_embeddings().weight)
    replays = model == "experts"
    policy = Policy(own, values=model == "critic", activation_checkpointing=model == "checkpointing", replays=replays)
    other = Policy(make(1), replays=replays)
    values = ValueModel(make(2)) if model == "own critic" else None
    if ranks.size > 1:
        for one in filter(None, (policy, other, values)):
            shard(one, torch.device("cpu"), ranks.size, copies=ranks.copies, bfloat16=bfloat16)
    references = {
        "lora": Reference(BasePolicy(policy)),
        "refreshed lora": Reference(policy, 2, copied(adapter_parameters(own))),
        "qwen": Reference(other, 2),
    }
    reference = references.get(model, Reference(other))
    optimizer = make_optimizer(policy, config.optimizer, config.algorithm.critic, values)
    dtype = torch.bfloat16 if model == "critic" else None
    learner = Learner(
        policy, optimizer, Accelerator(cpu=True), reference, ranks=ranks, value_model=values, export_dtype=dtype
    )
    return learner, config


def train(learner: Learner, config: RunConfig, until: int = STEPS, *, asked: bool = False) -> Found:
    """Metrics of the steps up to `until`, and weights and canary after them. The second has too few rows for two ranks.

    Args: asked: this rank is asked to stop
    """
    unmoved = [sample("run.9.0", [1, 2, 3], [0, 0, 1], advantage=0.0)]
    batches = [agent_samples(0, groups=4), [sample("run.0.0", [1, 2, 3, 4], [0, 0, 1, 1])], agent_samples(1, groups=3)]
    batches = [[one_call(row, float(number % 3)) for number, row in enumerate(batch)] for batch in batches]
    if learner.policy.routing is not None:
        batches = [[replace(row, experts=recorded_experts(row)) for row in batch] for batch in batches]
    metrics = [
        optimizer_step(learner, batch, config, zero_variance=unmoved, interrupted=lambda: asked)
        for batch in batches[learner.step : until]
    ]
    own = {} if learner.value_model is None else learner.value_model.state_dict(prefix="critic.")
    weights = gather({**learner.policy.state_dict(), **own}, wanted=True)
    canary = torch.from_numpy(read_logprobs(learner, CANARY, config.training.micro_batch_tokens))
    return metrics, {**weights, "canary": canary}


def recorded_experts(row: Sample) -> NDArray[np.uint8]:
    """Two of five experts in each of three layers, or no record, by the tokens up to each one."""
    sums = row.token_ids.cumsum()[:, None]
    first = (sums + np.arange(3)) % 5
    experts = np.stack([first, (first + 1) % 5], axis=-1).reshape(len(sums), 6)
    return np.where(sums % 7 == 0, 255, experts).astype(np.uint8)


def save(model: str, folder: Path, ranks: Ranks = ALONE) -> None:
    """Trains two steps, and writes weights and checkpoint."""
    folder = folder / model
    learner, config = start(model, ranks)
    train(learner, config, until=2)
    weights = gather_weights(learner, list(learner.weights))
    state, scratch = checkpoint_state(learner), made(folder / ".checkpoint.partial", ranks)
    with nothing_gathered():
        write(state, scratch, folder / "checkpoint", ranks)
    if ranks.rank == 0:
        torch.save(weights, folder / "weights.pt")
        export_version(learner, folder / "checkpoint", folder / "version")
    else:
        for _ in parts_of(learner):
            message = ranks.receive()
            assert isinstance(message, Gather)
            assert gather_weights(learner, message.names) == {}
    # Rank 0 has written its files.
    ranks.any(flag=False)


def made(scratch: Path, ranks: Ranks) -> Path:
    """The folder, which rank 0 has made."""
    if ranks.rank == 0:
        scratch.mkdir(parents=True)
    ranks.any(flag=False)
    return scratch


def write(
    state: dict[str, torch.Tensor], scratch: Path, folder: Path, ranks: Ranks, check_lock: LockCheck = no_lock
) -> None:
    """This rank's part of a checkpoint."""
    if ranks.rank == 0:
        save_checkpoint(state, PROGRESS, folder, check_lock, ranks, scratch)
    else:
        write_shards(state, scratch, ranks)


@contextmanager
def nothing_gathered() -> Iterator[None]:
    """Refuses complete tensors of sharded ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DTensor, "full_tensor", None)
        patch.setattr(DTensor, "redistribute", None)
        yield


def resume(model: str, folder: Path, ranks: Ranks = ALONE) -> Found:
    """The third step, from what `save` has written."""
    folder = folder / model
    learner, config = start(model, ranks)
    weights = torch.load(folder / "weights.pt")
    for name, own in learner.weights.items():
        replace_values(own, weights[name])
    learner.step = 2
    with nothing_gathered():
        own = learner.weights if learner.export_dtype else None
        read_checkpoint(learner, folder / "checkpoint")
    return train(learner, config)


def as_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives one process the sizes of `join`."""
    monkeypatch.setattr(tree, "LEAST_PREFIX", 1)
    for name, least in zip(("LEAST_VALUES", "LEAST_ROW"), SMALL, strict=True):
        monkeypatch.setattr(optimizers, name, least)


def join(rank: int, size: int, port: int, copies: int = 1) -> Ranks:
    """Makes this process one of `size`, with the variables that `torchrun` sets."""
    torch.set_num_threads(1)
    tree.LEAST_PREFIX, shards.FILE_BYTES, folders.FILE_BYTES = 1, 4000, 4000
    optimizers.LEAST_VALUES, optimizers.LEAST_ROW = SMALL
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"})
    # A rank that dies is noticed at once; on a busy machine one may be behind the others by minutes.
    return join_ranks(size, on_cpu=True, timeout_seconds=240, copies=copies)


def save_all(rank: int, size: int, port: int, folder: Path) -> None:
    ranks = join(rank, size, port)
    for model in RESUMED:
        save(model, folder, ranks)
    ranks.close()


def resume_all(rank: int, size: int, port: int, folder: Path, found: Path) -> None:
    ranks = join(rank, size, port)
    torch.save({model: resume(model, folder, ranks) for model in RESUMED}, found / f"{rank}.pt")
    ranks.close()


def main(rank: int, size: int, port: int, folder: Path, copies: int = 1) -> None:
    """One process of `size`; writes what it found to `folder`."""
    ranks = join(rank, size, port, copies)
    found = {model: train(*start(model, ranks)) for model in MODELS}
    for model in RESUMED:
        found[f"resumed {model}"] = resume(model, folder / "one", ranks)
        save(model, folder / "several", ranks)
        again = resume(model, folder / "several", ranks)[1]
        assert all(torch.equal(again[name], weight) for name, weight in found[model][1].items()), model
    torch.save(found, folder / f"{ranks.rank}.pt")
    with pytest.raises(Interrupted):
        train(*start("llama", ranks), asked=ranks.rank == 1)
    ranks.close()
