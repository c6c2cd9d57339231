from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from leyden.services.engine.scheduler import Scheduler
from leyden.services.engine.sequence import Sequence
from tests.fakes.tiny_engine import new_sequence, run, tiny_scheduler


@pytest.fixture
def scheduler(tiny_model: Path) -> Scheduler:
    return tiny_scheduler(tiny_model)


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


def random_ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 320, count).tolist()


def expected_logprobs(reference: torch.nn.Module, sequence: Sequence) -> list[float]:
    """Log-probabilities of the output by one plain float32 forward over the whole sequence."""
    ids = torch.from_numpy(sequence.token_ids().astype(np.int64))
    with torch.no_grad():
        logits = reference(ids.unsqueeze(0)).logits[0] / sequence.draw.sampling.divisor
    scored = logits.log_softmax(-1)[:-1].gather(1, ids[1:].unsqueeze(1)).squeeze(1)
    return scored[len(sequence.prompt_ids) - 1 :].tolist()


def assert_exact(reference: torch.nn.Module, *sequences: Sequence) -> None:
    for sequence in sequences:
        assert sequence.logprobs == pytest.approx(expected_logprobs(reference, sequence), abs=1e-5)


def test_logprobs_equal_a_plain_forward(scheduler: Scheduler, reference: torch.nn.Module) -> None:
    sequence = new_sequence(scheduler, random_ids(20), temperature=0.7)
    run(scheduler, sequence)
    assert len(sequence.output_ids) == 8
    assert_exact(reference, sequence)


def test_logprobs_are_exact_in_a_batch_that_changes(scheduler: Scheduler, reference: torch.nn.Module) -> None:
    shared = random_ids(90)
    sequences = [
        new_sequence(scheduler, shared[: 90 - 7 * i] + random_ids(3 * i + 1, i), max_new_tokens=5 + 9 * i)
        for i in range(10)
    ]
    for sequence in sequences:
        scheduler.submit([sequence])
        scheduler.step()
    run(scheduler)
    assert_exact(reference, *sequences)


def test_logprobs_are_exact_when_prompts_are_chunked(tiny_model: Path, reference: torch.nn.Module) -> None:
    scheduler = tiny_scheduler(tiny_model, prefill_tokens=16)
    sequences = [new_sequence(scheduler, random_ids(70 + i, i)) for i in range(3)]
    run(scheduler, *sequences)
    assert_exact(reference, *sequences)


def test_the_next_turn_reuses_prompt_and_answer(scheduler: Scheduler, reference: torch.nn.Module) -> None:
    first = new_sequence(scheduler, random_ids(40))
    run(scheduler, first)
    ids = first.token_ids().tolist()
    second = new_sequence(scheduler, [*ids, 1, 2, 3])
    run(scheduler, second)
    # The last token of the first turn was sampled and never computed.
    assert second.cached_tokens == len(ids) - 1
    assert_exact(reference, first, second)


def test_a_prefix_shared_by_concurrent_requests_is_computed_once(
    scheduler: Scheduler, reference: torch.nn.Module
) -> None:
    shared = random_ids(500)
    sequences = [new_sequence(scheduler, shared + random_ids(4, i)) for i in range(1, 33)]
    run(scheduler, *sequences)
    # The last token of each prompt is decoded, not prefilled.
    assert scheduler.totals.prefill_tokens <= 500 + 32 * 3
    assert_exact(reference, *sequences)


def test_siblings_of_one_prompt_compute_it_once(scheduler: Scheduler, reference: torch.nn.Module) -> None:
    sequences = [new_sequence(scheduler, random_ids(300)) for _ in range(8)]
    run(scheduler, *sequences)
    assert scheduler.totals.prefill_tokens == 299
    assert sorted(sequence.cached_tokens for sequence in sequences) == [0] + [299] * 7
    assert len({tuple(sequence.output_ids) for sequence in sequences}) == 8
    assert_exact(reference, *sequences)


def test_nested_prefixes_stay_exact(scheduler: Scheduler, reference: torch.nn.Module) -> None:
    system, document = random_ids(100), random_ids(400, 1)
    waves = [
        [new_sequence(scheduler, system + random_ids(5, 10 + i)) for i in range(3)],
        [new_sequence(scheduler, system + document + random_ids(5, 20 + i)) for i in range(3)],
        [new_sequence(scheduler, system + document + random_ids(9, 30 + i), max_new_tokens=40) for i in range(3)],
    ]
    for wave in waves:
        scheduler.submit(wave)
        scheduler.step()
        scheduler.step()
    run(scheduler)
    assert_exact(reference, *(sequence for wave in waves for sequence in wave))


def test_a_salt_separates_prefixes(scheduler: Scheduler) -> None:
    ids = random_ids(50)
    run(scheduler, new_sequence(scheduler, ids, salt="a"))
    other, same = new_sequence(scheduler, ids, salt="b"), new_sequence(scheduler, ids, salt="a")
    run(scheduler, other, same)
    assert (other.cached_tokens, same.cached_tokens) == (0, 49)


def test_new_weights_find_nothing_that_old_ones_computed(scheduler: Scheduler) -> None:
    ids = random_ids(50)
    run(scheduler, new_sequence(scheduler, ids))
    scheduler.replace_model(scheduler.model.with_weights(scheduler.model.weights), "v1")
    after = new_sequence(scheduler, ids)
    run(scheduler, after)
    assert after.cached_tokens == 0
    assert after.versions == ["v1"] * 8


def test_what_two_versions_computed_is_not_cached(scheduler: Scheduler) -> None:
    sequence = new_sequence(scheduler, random_ids(50))
    run(scheduler, sequence, steps=3)
    scheduler.replace_model(scheduler.model.with_weights(scheduler.model.weights), "v1")
    run(scheduler)
    assert sequence.versions == ["v0"] * 3 + ["v1"] * 5
    again = new_sequence(scheduler, sequence.token_ids().tolist())
    run(scheduler, again)
    assert again.cached_tokens == 0


def test_retracted_sequences_continue_with_the_same_tokens(scheduler: Scheduler, reference: torch.nn.Module) -> None:
    sequences = [new_sequence(scheduler, random_ids(30, i)) for i in range(4)]
    run(scheduler, *sequences, steps=4)
    scheduler.retract(list(scheduler.running))
    assert [sequence.rid for sequence in scheduler.waiting] == ["r"] * 4
    assert list(scheduler.waiting) == sequences
    run(scheduler)
    assert [sequence.retractions for sequence in sequences] == [1] * 4
    assert_exact(reference, *sequences)


def test_a_retracted_prompt_is_scored_by_one_model_alone(tiny_model: Path) -> None:
    """A part of it was scored before other weights came: all of it is scored again."""
    scheduler = tiny_scheduler(tiny_model, prefill_tokens=32)
    sequence = new_sequence(scheduler, random_ids(100), return_logprob=True, logprob_start_len=0)
    scheduler.submit([sequence])
    scheduler.step()
    assert 0 < len(sequence.input_logprobs) < 99
    scheduler.retract([*scheduler.running, *scheduler.prefilling])
    scheduler.replace_model(scheduler.model, "v1")
    run(scheduler)
    other = tiny_scheduler(tiny_model)
    whole = new_sequence(other, random_ids(100), return_logprob=True, logprob_start_len=0)
    run(other, whole)
    assert sequence.input_logprobs == pytest.approx(whole.input_logprobs, abs=1e-5)


def test_a_full_budget_retracts_the_youngest_and_everything_ends(tiny_model: Path, reference: torch.nn.Module) -> None:
    scheduler = tiny_scheduler(tiny_model, max_total_tokens=300)
    sequences = [new_sequence(scheduler, random_ids(40, i), max_new_tokens=60) for i in range(6)]
    run(scheduler, *sequences)
    assert all(len(sequence.output_ids) == 60 for sequence in sequences)
    assert sum(sequence.retractions for sequence in sequences) > 0
    assert sequences[0].retractions == 0
    assert_exact(reference, *sequences)


def test_more_than_may_run_wait_their_turn(tiny_model: Path) -> None:
    scheduler = tiny_scheduler(tiny_model, max_running=2)
    sequences = [new_sequence(scheduler, random_ids(10, i)) for i in range(5)]
    run(scheduler, *sequences, steps=1)
    assert (len(scheduler.running), len(scheduler.waiting)) == (2, 3)
    run(scheduler)
    assert all(sequence.finish is not None for sequence in sequences)


def test_aborted_sequences_retain_their_tokens(scheduler: Scheduler) -> None:
    running = new_sequence(scheduler, random_ids(30))
    run(scheduler, running, steps=3)
    queued = new_sequence(scheduler, random_ids(30, 1))
    scheduler.submit([queued])
    scheduler.abort([running, queued])
    assert not scheduler.has_work
    assert (len(running.output_ids), running.finish and running.finish.message) == (3, "Aborted")
    assert (queued.output_ids, queued.finish and queued.finish.message) == ([], "Abort in waiting queue")


def test_prompt_logprobs_equal_a_plain_forward(scheduler: Scheduler, reference: torch.nn.Module) -> None:
    ids = random_ids(40)
    run(scheduler, new_sequence(scheduler, ids))
    sequence = new_sequence(
        scheduler, ids, temperature=0.5, return_logprob=True, logprob_start_len=10, top_logprobs_num=2
    )
    run(scheduler, sequence)
    with torch.no_grad():
        scored = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [float(scored[place - 1, ids[place]]) for place in range(11, 40)]
    assert sequence.input_logprobs == pytest.approx(expected, abs=1e-5)
    assert sequence.cached_tokens == 10
    assert [top[0][1] for top in sequence.input_top_logprobs] == scored[10:39].argmax(-1).tolist()


def test_no_new_tokens_end_after_the_prompt(scheduler: Scheduler) -> None:
    sequence = new_sequence(scheduler, random_ids(10), max_new_tokens=0)
    run(scheduler, sequence)
    assert (sequence.output_ids, sequence.finish and sequence.finish.kind) == ([], "length")


def test_seeded_sequences_repeat_whatever_runs_beside_them(scheduler: Scheduler) -> None:
    ids = random_ids(20)
    alone = new_sequence(scheduler, ids, sampling_seed=7)
    run(scheduler, alone)
    crowd = [new_sequence(scheduler, random_ids(25, i)) for i in range(5)]
    again = new_sequence(scheduler, ids, sampling_seed=7)
    run(scheduler, *crowd, again)
    assert again.output_ids == alone.output_ids


@pytest.mark.parametrize("cut", [1, 5, 11])
def test_a_seeded_answer_that_is_continued_is_the_one_in_one_piece(scheduler: Scheduler, cut: int) -> None:
    ids = random_ids(20)
    whole = new_sequence(scheduler, ids, sampling_seed=7, max_new_tokens=12)
    run(scheduler, whole)
    begun = [*ids, *whole.output_ids[:cut]]
    rest = new_sequence(scheduler, begun, sampling_seed=7, max_new_tokens=12 - cut)
    other = new_sequence(scheduler, begun, sampling_seed=8, max_new_tokens=12 - cut)
    run(scheduler, rest, other)
    assert rest.output_ids == whole.output_ids[cut:] != other.output_ids


def test_an_error_drops_everything_and_the_next_request_works(scheduler: Scheduler, reference: torch.nn.Module) -> None:
    from leyden.services.engine.sequence import Finish

    lost = new_sequence(scheduler, random_ids(30))
    run(scheduler, lost, steps=2)
    assert scheduler.drop_all(Finish("abort", message="the engine failed", status_code=500)) == [lost]
    sequence = new_sequence(scheduler, random_ids(30))
    run(scheduler, sequence)
    assert sequence.cached_tokens == 0
    assert_exact(reference, sequence)
