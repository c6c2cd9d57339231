"""The value head's running scale: values stay while it moves, and rewards of any size train the same policy."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from leyden.libs.contracts.config import RunConfig
from leyden.services.trainer.model.forward import Policy
from leyden.services.trainer.model.value_head import WINDOW, ValueHead
from leyden.services.trainer.model.value_model import ValueModel
from leyden.services.trainer.rows.batch import Sample
from leyden.services.trainer.step.learner import Learner
from leyden.services.trainer.step.metrics import Metrics
from leyden.services.trainer.step.optimizers import make_optimizer
from leyden.services.trainer.step.step import optimizer_step
from tests.unit.trainer.cases import tiny_llama, tiny_qwen
from tests.unit.trainer.test_critic import CPU, agent_forest, agent_rows, config

INPUTS = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(5, 4)


def head() -> ValueHead:
    return ValueHead(4, torch.float64, torch.device("cpu"))


def values(of: ValueHead) -> Tensor:
    mean, deviation = of.scale
    return (mean + deviation * of(INPUTS)).detach()


def test_values_stay_while_the_scale_follows_the_targets() -> None:
    own, random = head(), np.random.default_rng(0)
    first = random.normal(50, 20, 8)
    assert own.scale == (0, 1)
    assert own.scale_for(first) == (first.mean(), first.std())
    own.follow(first)
    # Outputs of 0 are the first targets' mean.
    assert values(own).flatten().tolist() == pytest.approx([first.mean()] * 5)
    torch.nn.init.normal_(own.weight)
    before, seen = values(own), [first]
    for _ in range(WINDOW - 1):
        seen.append(random.normal(-30, 5, 8))
        own.follow(seen[-1])
        assert torch.allclose(values(own), before, rtol=1e-12)
    every = np.concatenate(seen)
    assert own.scale == pytest.approx((every.mean(), every.std()))
    assert own.scale_for(first) == own.scale
    for _ in range(20 * WINDOW):
        own.follow(first)
    assert own.scale == pytest.approx((first.mean(), first.std()), rel=1e-6)


@pytest.mark.parametrize(("targets", "deviation"), [([0.0, 0.0], 1.0), ([7.0, 7.0], 7e-3), ([], 1.0)])
def test_targets_without_a_spread_divide_by_no_rounding(targets: list[float], deviation: float) -> None:
    own = head()
    own.follow(np.array(targets))
    assert own.scale[1] == pytest.approx(deviation)


def of_size(size: float, document: RunConfig, *, steps: int = 3) -> tuple[dict[str, Tensor], list[Metrics]]:
    """The policy's weights after some steps in which every reward is multiplied, and the steps' metrics."""
    critic = document.algorithm.critic
    assert critic is not None
    own = critic.trunk == "own"
    policy, model = Policy(tiny_llama(), values=not own), ValueModel(tiny_qwen(1)) if own else None
    learner = Learner(policy, make_optimizer(policy, document.optimizer, critic, model), CPU, value_model=model)
    metrics = [optimizer_step(learner, _multiplied(seed, size), document) for seed in range(steps)]
    return {name: weight.detach() for name, weight in policy.model.named_parameters()}, metrics


def _multiplied(seed: int, size: float) -> list[Sample]:
    ids = [f"run.{group}.{number}" for group in range(2) for number in range(2)]
    rows = [row for i, one in enumerate(ids) for row in agent_rows(*agent_forest(10 * seed + i, one), one)]
    return [replace(row, calls=tuple(replace(one, reward=size * one.reward) for one in row.calls)) for row in rows]


@pytest.mark.parametrize("trunk", ["shared", "own"])
def test_rewards_a_hundred_times_as_large_train_the_same_policy(trunk: str) -> None:
    document: Any = config(trunk=trunk, learning_rate=0.05).model_dump()
    document["algorithm"]["mini_batches"] = 2
    document = RunConfig.model_validate(document)
    (weights, metrics), (larger, of_larger) = of_size(1, document), of_size(100, document)
    for name, weight in weights.items():
        assert torch.allclose(larger[name], weight, rtol=0, atol=1e-5), name
    with torch.no_grad():
        pairs = zip(weights.values(), tiny_llama().parameters(), strict=True)
        moved = max(float((weight - before).abs().max()) for weight, before in pairs)
    assert moved > 1e-2
    for one, other in zip(metrics, of_larger, strict=True):
        for name in ("gradient_norm", "value_gradient_norm", "value_loss", "value_explained_variance"):
            assert other[name] == pytest.approx(one[name], rel=1e-4), name
    assert of_larger[-1]["value_mean"] == pytest.approx(100 * metrics[-1]["value_mean"], rel=1e-4)
