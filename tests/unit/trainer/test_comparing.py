"""Trainer and engine at an older version: its log-probabilities, and the memory that they need."""

import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from leyden.libs.contracts.config import RunConfig
from leyden.services.trainer.model.forward import Policy
from leyden.services.trainer.model.weight_files import WeightFiles
from leyden.services.trainer.ranks.messages import Compare
from leyden.services.trainer.rows.batch import Sample, trained_tokens
from leyden.services.trainer.state import comparing
from leyden.services.trainer.state.assembly import assemble_learner, frozen_policy, make_accelerator, place_policy
from leyden.services.trainer.state.comparing import NotCompared, compare_at, read_older_logprobs
from leyden.services.trainer.state.versions import Export, export_version
from leyden.services.trainer.step.gradients import batch_logprobs, plan_batch
from leyden.services.trainer.step.learner import Learner
from leyden.services.trainer.step.step import optimizer_step
from tests.fakes.forked_trainer import run_forked
from tests.support.builders import run_document
from tests.support.shared import free_port
from tests.unit.trainer import ranked
from tests.unit.trainer.cases import agent_samples
from tests.unit.trainer.ranked import MODELS, start, train

CPU = make_accelerator("cpu", "float32")
WHOLE, LORA = {}, {"lora": {"rank": 4}}


def run_config(**training: Any) -> RunConfig:
    return RunConfig.model_validate(
        run_document(optimizer={"learning_rate": 1e-2}, training={"micro_batch_tokens": 40, **training})
    )


def exhaust(*_: Any, **__: Any) -> torch.Tensor:
    return torch.empty(2**50, dtype=torch.uint8)


def logprobs(learner: Learner, samples: Sequence[Sample]) -> NDArray[np.float64]:
    tokens = trained_tokens(samples)
    return batch_logprobs(learner.policy, plan_batch(samples, tokens, 40), len(tokens), learner.accelerator)


def sampled_by(learner: Learner, version: int) -> list[Sample]:
    """Rows that the learner's policy sampled, as this version."""
    rows = agent_samples(1)
    exact_K, found, begin = logprobs(learner, rows), [], 0
    for row in rows:
        end = begin + int(row.mask.sum())
        own, versions = row.generator_logprobs.copy(), row.policy_versions.copy()
        own[row.mask], versions[row.mask], begin = exact_K[begin:end], version, end
        found.append(replace(row, generator_logprobs=own, policy_versions=versions))
    return found


def older(base: Path, config: RunConfig, folder: Path) -> tuple[Learner, Export, list[Sample]]:
    """A learner after two steps, its first version, and rows that this version sampled."""
    learner = assemble_learner(base, config, CPU)
    optimizer_step(learner, agent_samples(0), config)
    version, rows = export_version(learner, base, folder / "1"), sampled_by(learner, 1)
    optimizer_step(learner, agent_samples(2), config)
    return learner, version, rows


@pytest.mark.parametrize("training", [WHOLE, LORA], ids=["whole", "lora"])
def test_tokens_of_an_older_version_are_compared_with_its_weights(
    tiny_model: Path, tmp_path: Path, training: dict[str, Any]
) -> None:
    config = run_config(**training)
    learner, version, rows = older(tiny_model, config, tmp_path)
    before = {name: tensor.clone() for name, tensor in learner.weights.items()}
    assert (
        np.abs(logprobs(learner, rows) - np.concatenate([row.generator_logprobs[row.mask] for row in rows])).max()
        > 0.01
    )
    found = compare_at(learner, tiny_model, 1, version.path, rows, config)
    assert found["logprob_gap_tokens"] > 0
    assert found["logprob_gap_max"] < 1e-5
    assert all(torch.equal(before[name], tensor) for name, tensor in learner.weights.items())
    assert compare_at(learner, tiny_model, 1, tmp_path / "gone", rows, config) == {}
    for weights in version.path.rglob("*.safetensors"):
        weights.write_bytes(weights.read_bytes()[:-100])
    assert compare_at(learner, tiny_model, 1, version.path, rows, config) == {}
    assert all(torch.equal(before[name], tensor) for name, tensor in learner.weights.items())


def test_the_base_model_is_compared_behind_the_adapters(tiny_model: Path) -> None:
    config = run_config(**LORA)
    learner = assemble_learner(tiny_model, config, CPU)
    rows = sampled_by(learner, 0)
    optimizer_step(learner, agent_samples(0), config)
    assert compare_at(learner, tiny_model, 0, tiny_model, rows, config)["logprob_gap_max"] < 1e-5


@pytest.mark.parametrize(("training", "compared"), [(WHOLE, False), (LORA, True)], ids=["whole", "lora"])
def test_a_version_needs_memory_for_a_second_model_without_adapters_alone(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, training: dict[str, Any], compared: bool
) -> None:
    config = run_config(**training)
    learner, version, rows = older(tiny_model, config, tmp_path)
    monkeypatch.setattr(WeightFiles, "rows", exhaust)
    assert bool(compare_at(learner, tiny_model, 1, version.path, rows, config)) is compared


def test_versions_in_bfloat16_lie_in_memory_as_such_and_compute_the_same(tiny_model: Path, tmp_path: Path) -> None:
    config = run_config(export_dtype="bfloat16")
    _, version, rows = older(tiny_model, config, tmp_path)
    tokens, found, types = trained_tokens(rows), [], []
    for is_version in (True, False):
        policy = frozen_policy(version.path, config, CPU, replays=False, is_version=is_version)
        place_policy(policy, version.path, config, CPU, ranked.ALONE)
        types.append({one.dtype for name, one in policy.model.named_parameters() if "proj" in name})
        found.append(batch_logprobs(policy, plan_batch(rows, tokens, 40), len(tokens), CPU))
    assert types == [{torch.bfloat16}, {torch.float32}]
    assert np.array_equal(*found)


def models_in_memory() -> int:
    # Not `isinstance`, which asks lazy modules for their class.
    return sum(issubclass(type(one), Policy) for one in gc.get_objects())


def _compare(rank: int, port: int, folder: Path) -> None:
    ranks = ranked.join(rank, 2, port)
    found = {}
    for model in ("llama", "refreshed lora"):
        learner, config = start(model, ranks)
        train(learner, config, until=2)
        message = Compare(folder / "base", folder / model, agent_samples(1))
        found[model] = torch.from_numpy(read_older_logprobs(learner, message, config))
        if model == "llama":
            held = config.model_copy(
                update={"training": config.training.model_copy(update={"export_dtype": "bfloat16"})}
            )
            found["in bfloat16"] = torch.from_numpy(read_older_logprobs(learner, message, held))
    learner, config = start("llama", ranks)
    gc.collect()
    policies = models_in_memory()
    # For the life of this process.
    patches = (comparing, "forward_bytes", lambda *_, **__: 2**60), (WeightFiles, "rows", exhaust)
    for of, name, lack in patches:
        if rank == 1:
            setattr(of, name, lack)
        with pytest.raises(NotCompared, match="allocate"):
            read_older_logprobs(learner, Compare(folder / "base", folder / "llama", agent_samples(1)), config)
        # It is gone at once: the next step has its memory.
        assert models_in_memory() == policies
    torch.save(found, folder / f"{rank}.pt")
    ranks.close()


def test_ranks_read_their_shares_of_an_older_version_and_agree_where_one_has_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranked.as_the_ranks(monkeypatch)
    expected = {}
    (tmp_path / "base").mkdir()
    for model in ("llama", "refreshed lora"):
        learner, config = start(model)
        train(learner, config, until=1)
        MODELS[model][0](0).config.save_pretrained(tmp_path / "base")
        export_version(learner, tmp_path / "base", tmp_path / model)
        expected[model] = logprobs(learner, agent_samples(1))
    run_forked(_compare, free_port(), tmp_path, processes=2)
    for rank in range(2):
        found = {name: one.numpy() for name, one in torch.load(tmp_path / f"{rank}.pt").items()}
        # The version is in float64 here, and rounded weights are other ones.
        assert 1e-4 < np.abs(found.pop("in bfloat16") - expected["llama"]).max() < 0.1
        for model, own in found.items():
            assert np.allclose(own, expected[model], atol=1e-4), (rank, model)
