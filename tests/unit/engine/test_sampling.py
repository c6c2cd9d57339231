from __future__ import annotations

from typing import Any

import pytest
import torch

from leyden.services.engine.request import SamplingParams
from leyden.services.engine.sampling import Draw, Drawn, Sampler


def draw(output_ids: list[int] | None = None, seed: int | None = None, **sampling: Any) -> Draw:
    return Draw(SamplingParams(**sampling), frozenset({0}), output_ids=output_ids or [], seed=seed)


def sample(logits: torch.Tensor, *draws: Draw, seed: int = 0) -> list[Drawn]:
    return Sampler(seed).sample(logits.clone(), draws)


def frequencies(logits: torch.Tensor, times: int, **sampling: Any) -> torch.Tensor:
    drawn = sample(logits.expand(times, -1), *(draw(**sampling) for _ in range(times)))
    return torch.bincount(torch.tensor([token.token_id for token in drawn]), minlength=logits.shape[-1]) / times


@pytest.mark.parametrize("size", [5, 512, 1300])
def test_token_frequencies_match_their_probabilities(size: int) -> None:
    logits = torch.zeros(size).index_fill_(0, torch.tensor([1, size - 1]), 8.0)
    expected = (logits / 0.9).softmax(-1)
    measured = frequencies(logits, 4000, temperature=0.9)
    assert measured[[1, size - 1]].tolist() == pytest.approx(expected[[1, size - 1]].tolist(), abs=0.04)


def test_logprobs_are_scaled_by_temperature_over_the_full_vocabulary() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1))
    (drawn,) = sample(logits, draw(temperature=0.5, top_k=3))
    assert drawn.logprob == pytest.approx(float((logits / 0.5).log_softmax(-1)[0, drawn.token_id]), abs=1e-6)


def test_temperature_zero_is_greedy_with_logprobs_at_temperature_one() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    (drawn,) = sample(logits, draw(temperature=0.0))
    assert (drawn.token_id, drawn.logprob) == (1, pytest.approx(float(logits.log_softmax(-1)[0, 1])))


def test_truncation_samples_only_allowed_tokens() -> None:
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1])
    logits = probabilities.log()
    cases = {"top_k": (2, 2), "top_p": (0.6, 2), "min_p": (0.6, 2)}
    for name, (value, kept) in cases.items():
        measured = frequencies(logits, 1000, **{name: value})
        assert int((measured > 0).sum()) == kept, name
        assert measured[:2].tolist() == pytest.approx([4 / 7, 3 / 7], abs=0.06)


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((1, 600), -torch.inf).index_fill_(1, torch.tensor([3, 599]), 0.0)
    drawn = sample(logits.expand(500, -1), *(draw() for _ in range(500)))
    assert {token.token_id for token in drawn} == {3, 599}


def test_penalties_bias_and_minimum_length_change_logits_first() -> None:
    logits = torch.tensor([[5.0, 2.0, -1.0, 0.0]])
    asked = draw(
        [1, 1, 2],
        temperature=2.0,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        repetition_penalty=2.0,
        logit_bias={"3": 1.0},
        min_new_tokens=4,
        stop_token_ids=[0],
    )
    # Token 1: (2 - 2 * 0.5 - 0.25) / 2; token 2: (-1 - 0.5 - 0.25) * 2; token 0 would end the sequence too early.
    expected = (torch.tensor([-torch.inf, 0.375, -3.5, 1.0]) / 2.0).log_softmax(-1)
    (drawn,) = sample(logits, asked)
    assert drawn.logprob == pytest.approx(float(expected[drawn.token_id]), abs=1e-6)
    assert drawn.token_id != 0


def test_requested_logprobs_are_returned_with_the_token() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    asked = draw(temperature=1.0)
    asked.top_logprobs_num, asked.token_ids_logprob = 2, [0]
    (drawn,) = sample(logits, asked)
    scored = logits.log_softmax(-1)[0].tolist()
    assert [token for _, token in drawn.top] == [1, 2]
    assert [logprob for logprob, _ in drawn.top] == pytest.approx([scored[1], scored[2]])
    assert drawn.chosen == [(pytest.approx(scored[0]), 0)]


def test_a_seed_gives_the_same_tokens_in_any_batch() -> None:
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(2))
    alone = sample(logits[1:2], draw(seed=5))[0].token_id
    assert sample(logits, draw(), draw(seed=5), draw(temperature=0.0), seed=9)[1].token_id == alone
