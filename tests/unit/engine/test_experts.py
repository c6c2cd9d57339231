"""A mixture of experts on the CPU engine: transformers' log-probabilities, and the experts of each computed token."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from leyden.services.engine.answer import Answer
from leyden.services.engine.request import parse_generate
from leyden.services.engine.sequence import Sequence
from leyden.services.engine.text import Text
from tests.fakes.sglang_types import api_types
from tests.fakes.tiny_engine import new_sequence, run, tiny_scheduler
from tests.unit.engine.test_scheduler import assert_exact, random_ids

LAYERS, CHOSEN = 3, 2


@pytest.fixture(scope="module")
def reference(tiny_experts: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(tiny_experts, dtype=torch.float32)


def chosen_by(reference: torch.nn.Module, sequence: Sequence) -> NDArray[np.int64]:
    """[tokens, LAYERS, CHOSEN]: a plain forward's choice, with zeros for the dense layer."""
    found: list[torch.Tensor] = []
    routers = [module for module in reference.modules() if "Router" in type(module).__name__]
    hooks = [router.register_forward_hook(lambda *a: found.append(a[2][2])) for router in routers]
    with torch.no_grad():
        reference(input_ids=torch.from_numpy(sequence.token_ids()).long()[None])
    for hook in hooks:
        hook.remove()
    return torch.stack([torch.zeros_like(found[0]), *found], dim=1).numpy()


def assert_routed(reference: torch.nn.Module, *sequences: Sequence) -> None:
    for sequence in sequences:
        experts = torch.cat(sequence.experts).numpy()
        assert np.array_equal(experts, chosen_by(reference, sequence)[:-1])


def test_logprobs_and_experts_are_those_of_a_plain_forward(tiny_experts: Path, reference: torch.nn.Module) -> None:
    scheduler = tiny_scheduler(tiny_experts, prefill_tokens=16)
    prompts = [random_ids(40), random_ids(40)[:30] + random_ids(9, seed=1), random_ids(5, seed=2)]
    sequences = [new_sequence(scheduler, ids) for ids in prompts]
    run(scheduler, *sequences)
    assert_exact(reference, *sequences)
    assert_routed(reference, *sequences)


def test_tokens_of_the_prefix_cache_have_the_experts_of_the_pass_that_computed_them(
    tiny_experts: Path, reference: torch.nn.Module
) -> None:
    scheduler = tiny_scheduler(tiny_experts)
    first = new_sequence(scheduler, random_ids(40))
    run(scheduler, first)
    second = new_sequence(scheduler, [*first.token_ids().tolist(), *random_ids(6, seed=3)])
    run(scheduler, second)
    assert second.cached_tokens == first.length - 1
    assert_routed(reference, second)


def test_a_retracted_sequence_has_the_experts_of_all_its_tokens(tiny_experts: Path, reference: torch.nn.Module) -> None:
    scheduler = tiny_scheduler(tiny_experts)
    sequence = new_sequence(scheduler, random_ids(20))
    run(scheduler, sequence, steps=4)
    scheduler.retract([sequence])
    run(scheduler)
    assert_routed(reference, sequence)


def test_an_answer_has_the_experts_from_a_position_on_in_sglangs_form(tiny_experts: Path) -> None:
    scheduler = tiny_scheduler(tiny_experts)
    asking, other = new_sequence(scheduler, [1, 2, 3, 4]), new_sequence(scheduler, [1, 2, 3, 4])
    asking.prompt = asking.prompt.model_copy(update={"return_routed_experts": True, "routed_experts_start_len": 3})
    run(scheduler, asking, other)
    request, text = parse_generate({"input_ids": [1]}), Text(tiny_experts)
    answers = [
        Answer(one, request, text).build(finish, len(one.output_ids), "v")
        for one in (asking, other)
        for finish in (None, one.finish)
    ]
    metas = [answer["meta_info"] for answer in answers]
    assert api_types().GenerateResponse.from_json_value(answers[1]).meta_info.id == asking.rid
    assert ["routed_experts" in meta for meta in metas] == [False, True, False, False]
    found = np.frombuffer(base64.b64decode(metas[1]["routed_experts"]), "<i4").reshape(-1, LAYERS, CHOSEN)
    assert np.array_equal(found, torch.cat(asking.experts).numpy()[3:])
    assert len(found) == 4 + 8 - 1 - 3
