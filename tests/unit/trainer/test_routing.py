"""Routing replay: tokens have the experts of the engine's record, and the shares of the trainer's own router."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor
from transformers import PreTrainedModel

from leyden.libs.contracts.config import PpoClip, RunConfig
from leyden.libs.contracts.samples import RoutedExperts
from leyden.libs.store.records.chains import RoutedCall
from leyden.services.trainer.model.experts import router_names
from leyden.services.trainer.model.forward import Policy
from leyden.services.trainer.rows import tree
from leyden.services.trainer.rows.batch import Sample, trained_tokens, with_agreed_experts
from leyden.services.trainer.rows.routing import Experts, agreed_experts, is_recorded, row_experts
from leyden.services.trainer.state.assembly import assemble_learner, make_accelerator
from leyden.services.trainer.step.batch import Batch
from leyden.services.trainer.step.gradients import batch_logprobs, plan_batch
from leyden.services.trainer.step.step import optimizer_step
from tests.support.builders import run_document
from tests.unit.trainer.cases import agent_samples, gradients_of, tiny_experts, tiny_gpt_oss
from tests.unit.trainer.test_compute import assert_same, gradients, plain_gradients, plain_logprobs
from tests.unit.trainer.test_experts import config_of

CPU = make_accelerator("cpu", "float32")
LAYERS, CHOSEN = 3, 2
Make = Callable[..., PreTrainedModel]


@pytest.fixture(autouse=True)
def short_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "LEAST_PREFIX", 1)


class Engine:
    """A model whose routers choose with a bias, as an engine does whose rounding differs, and which records the choice.

    Its shares are those of its scores, without the bias.
    """

    def __init__(self, bias: float, make: Make = tiny_experts, **options: Any) -> None:
        self.model = make(**options)
        self._recorded: list[Tensor] = []
        for number, router in enumerate(m for m in self.model.modules() if "Router" in type(m).__name__):
            generator = torch.Generator().manual_seed(number)
            noise = bias * torch.randn(router.num_experts, generator=generator, dtype=torch.float64)
            router.register_forward_hook(self._choose(noise))

    def _choose(self, noise: Tensor) -> Any:
        def choose(router: Any, _: Any, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            logits = outputs[0]
            chosen = (logits + noise).topk(router.top_k, dim=-1).indices
            shares = logits.softmax(-1).gather(1, chosen)
            self._recorded.append(chosen)
            return logits, shares / shares.sum(-1, keepdim=True), chosen

        return choose

    def logprobs(self, samples: Sequence[Sample]) -> Tensor:
        return torch.cat([plain_logprobs(self.model, sample) for sample in samples])

    def experts(self, sample: Sample) -> Experts:
        """Those of all tokens but the last, for which there is none; Qwen3-MoE's first layer is dense."""
        self._recorded.clear()
        with torch.no_grad():
            self.model(input_ids=torch.from_numpy(sample.token_ids).long()[None])
        found = np.full((len(sample.token_ids), LAYERS, CHOSEN), 255, np.uint8)
        found[:-1] = 0
        for number, chosen in enumerate(self._recorded, start=LAYERS - len(self._recorded)):
            found[:-1, number] = chosen[:-1].numpy()
        return found.reshape(len(found), -1)

    def recorded(self, samples: Sequence[Sample]) -> list[Sample]:
        return [replace(sample, experts=self.experts(sample)) for sample in samples]


def logprobs(model: PreTrainedModel, samples: Sequence[Sample], *, replays: bool = True) -> NDArray[np.float64]:
    tokens = trained_tokens(samples)
    plan = plan_batch(samples, tokens, 40)
    return batch_logprobs(Policy(model, replays=replays), plan, len(tokens), CPU)


def replayed_gradients(
    samples: Sequence[Sample], make: Make = tiny_experts, *, checkpointing: bool = False
) -> tuple[float, dict[str, Tensor]]:
    model = make(router="trained")
    policy = Policy(model, activation_checkpointing=checkpointing, replays=True)
    return gradients_of(policy, Batch(samples), PpoClip(), 40).loss, gradients(model)


def test_the_trainers_own_choice_replayed_has_the_same_loss_and_gradients() -> None:
    samples = agent_samples(2)
    expected = plain_gradients(tiny_experts(router="trained"), PpoClip(), samples)
    assert_same(replayed_gradients(Engine(0.0).recorded(samples)), expected)


@pytest.mark.parametrize("make", [tiny_experts, tiny_gpt_oss])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_reach_the_router_through_the_shares_of_the_engines_choice(make: Make, checkpointing: bool) -> None:
    engine, samples = Engine(1.0, make, router="trained"), agent_samples(2)
    recorded, expected = engine.recorded(samples), plain_gradients(engine.model, PpoClip(), samples)
    assert set(router_names(engine.model)) <= expected[1].keys()
    assert_same(replayed_gradients(recorded, make, checkpointing=checkpointing), expected)


def test_logprobs_are_the_engines_where_its_choice_is_replayed_and_differ_where_it_is_not() -> None:
    engine, samples = Engine(1.0), agent_samples(2)
    recorded, expected = engine.recorded(samples), engine.logprobs(samples).detach().numpy()
    assert logprobs(tiny_experts(), recorded) == pytest.approx(expected, abs=1e-9)
    assert np.abs(logprobs(tiny_experts(), recorded, replays=False) - expected).max() > 1e-3


def test_a_token_without_a_record_has_the_trainers_choice() -> None:
    samples = agent_samples(2)
    none = [replace(sample, experts=row_experts([], len(sample.token_ids))) for sample in samples]
    own = logprobs(tiny_experts(), samples, replays=False)
    assert np.array_equal(logprobs(tiny_experts(), none), own)
    some = Engine(1.0).recorded(samples)
    for sample in some:
        assert sample.experts is not None
        sample.experts[: np.flatnonzero(sample.mask)[-1] - 1] = 255
    # The last trained token of each row alone has a state of recorded experts before it.
    last_K = np.append(np.diff(trained_tokens(samples).rows_K) > 0, True)
    differ_K = np.abs(logprobs(tiny_experts(), some) - own) > 1e-9
    assert not (differ_K & ~last_K).any()
    assert differ_K.any()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_rows_that_share_a_token_have_one_record_of_it_whatever_their_packs(order: tuple[int, ...]) -> None:
    rows = [[1, 2, 3, 4, 5], [1, 2, 3, 6, 7], [1, 2, 8, 9]]
    records = np.arange(5)[:, None] + np.arange(3)[:, None, None] * 5 + np.zeros((1, 6), int)
    records[0, 1:3] = 255
    found = agreed_experts(
        [np.array(rows[row], np.int32) for row in order],
        [records[row, : len(rows[row])].astype(np.uint16 if row == 2 else np.uint8) for row in order],
    )
    firsts = dict(zip(order, [one[:, 0].tolist() for one in found], strict=True))
    # The first row lacks its second and third token; the second row has them for all, and the third keeps its own end.
    assert firsts == {0: [0, 6, 7, 3, 4], 1: [0, 6, 7, 8, 9], 2: [0, 6, 12, 13]}


def test_packs_and_their_order_change_nothing_where_records_differ() -> None:
    samples = Engine(1.0).recorded(agent_samples(2))
    others = Engine(3.0).recorded(agent_samples(2))
    mixed = with_agreed_experts([pair[number % 2] for number, pair in enumerate(zip(samples, others, strict=True))])
    tokens = trained_tokens(mixed)
    policy = Policy(tiny_experts(), replays=True)
    one, other = (batch_logprobs(policy, plan_batch(mixed, tokens, most), len(tokens), CPU) for most in (8, 10_000))
    assert one == pytest.approx(other, abs=1e-9)


def test_a_step_counts_the_tokens_without_a_record(tmp_path: Path) -> None:
    tiny_experts(dtype=torch.float32).save_pretrained(tmp_path)
    samples = agent_samples(0)
    ends = [int(np.flatnonzero(sample.mask)[-1]) for sample in samples]

    def counted(samples: Sequence[Sample], **training: bool) -> float | None:
        learner = assemble_learner(tmp_path, config_of(**training), CPU)
        return optimizer_step(learner, samples, config_of(**training)).get("routing_unrecorded_tokens")

    recorded = Engine(1.0).recorded(samples)
    assert counted(recorded, routing_replay=True) == 0
    assert recorded[0].experts is not None
    recorded[0].experts[1:3] = 255
    assert counted(recorded, routing_replay=True) == 2
    none = [replace(sample, experts=row_experts([], len(sample.token_ids))) for sample in samples]
    assert counted(none, routing_replay=True) == sum(ends)
    assert counted(samples) is None


def test_a_run_that_replays_needs_a_router_and_experts_of_its_own_model(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match=r"routing_replay: the model has no router: leave the field out"):
        assemble_learner(tiny_model, config_of(routing_replay=True), CPU)
    [sample] = agent_samples(0)[:1]
    for experts in (np.zeros((len(sample.token_ids), 5), np.uint8), np.full((len(sample.token_ids), 6), 5, np.uint8)):
        with pytest.raises(ValueError, match="recorded experts are not the model's"):
            logprobs(tiny_experts(), [replace(sample, experts=experts)])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"training": {"routing_replay": True, "compile": True}}, "remove one of them"),
        ({"training": {"routing_replay": True}, "algorithm": {"type": "sft"}}, "routing_replay cannot act with"),
    ],
)
def test_a_document_with_a_replay_that_cannot_act_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        RunConfig.model_validate(run_document(**changes))


def recorded_call(shared: int, start: int, rows: Sequence[Sequence[int]], kind: str = "u1") -> RoutedCall:
    ids = np.array(rows, f"<{kind}")
    return RoutedCall(shared, RoutedExperts(start, ids.shape[1], ids.itemsize, ids.tobytes()))


def test_the_first_call_with_a_token_has_its_experts() -> None:
    first = recorded_call(0, 0, [[1, 2], [3, 4], [5, 6]])
    second = recorded_call(4, 3, [[7, 8], [9, 9]])
    assert row_experts([first, second], 6).tolist() == [[1, 2], [3, 4], [5, 6], [7, 8], [9, 9], [255, 255]]
    # The branch shares the parent's first two tokens, and its record begins at the second.
    branch = recorded_call(2, 1, [[0, 0], [7, 7]])
    assert row_experts([first, branch], 4).tolist() == [[1, 2], [3, 4], [7, 7], [255, 255]]


def test_calls_without_a_record_leave_a_gap_and_numbers_may_have_two_bytes() -> None:
    first = recorded_call(0, 0, [[1, 255]])
    second = recorded_call(3, 2, [[300, 65535]], "u2")
    found = row_experts([first, RoutedCall(2, None), second], 4)
    assert found.tolist() == [[1, 65535], [65535, 65535], [300, 65535], [65535, 65535]]
    assert not is_recorded(found).any()
    with pytest.raises(ValueError, match="of different models"):
        row_experts([first, recorded_call(1, 1, [[1, 2, 3]])], 4)
