from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from leyden.services.engine.ahead import SLICE, Ahead
from leyden.services.engine.attention import PrefillAttention
from leyden.services.engine.model import Model
from leyden.services.engine.scheduler import Scheduler
from leyden.services.engine.sequence import Finish, Sequence
from leyden.services.engine.tiny import make_tiny_model
from leyden.services.engine.weights import load_weights
from tests.fakes.tiny_engine import new_sequence, run, tiny_scheduler

SHARED, OWN, SIBLINGS = 100, 70, 6


@pytest.fixture(scope="module")
def new_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "new", seed=1)


@pytest.fixture
def scheduler(tiny_model: Path) -> Scheduler:
    return tiny_scheduler(tiny_model)


class Counting(Model):
    """A model that counts the tokens of its prefill, pass by pass."""

    passes: list[int]

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: object) -> torch.Tensor:
        if isinstance(attention, PrefillAttention):
            self.passes.append(len(token_ids))
        return super().hidden(token_ids, positions, attention)


def next_model(scheduler: Scheduler, folder: Path) -> Counting:
    model = Counting(scheduler.model.config, load_weights(folder, scheduler.model.config))
    model.passes = []
    return model


def random_ids(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 320, count).tolist()


def siblings(scheduler: Scheduler, count: int = SIBLINGS, **options: str) -> list[Sequence]:
    """Sequences that begin alike and have sampled three tokens."""
    shared = random_ids(SHARED, 0)
    made = [
        new_sequence(scheduler, shared + random_ids(OWN, 1 + index), max_new_tokens=60, **options)
        for index in range(count)
    ]
    scheduler.submit(made)
    while any(len(sequence.output_ids) < 3 for sequence in made):
        scheduler.step()
    return made


def prepare(scheduler: Scheduler, model: Model) -> int:
    """Slices, each followed by a step of the old weights, until no more is worth it; how many there were."""
    ahead, slices = Ahead(scheduler, model), 0
    while ahead.advance():
        slices += 1
        scheduler.step()
    return slices


def exchange(scheduler: Scheduler, model: Model) -> None:
    scheduler.retract([*scheduler.running, *scheduler.prefilling])
    scheduler.replace_model(model, "v1")
    assert scheduler.forget_old_weights()


def scored(folder: Path, sequence: Sequence) -> list[float]:
    """Log-probabilities of the output by a plain forward pass."""
    ids = torch.from_numpy(sequence.token_ids().astype(np.int64))
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids.unsqueeze(0)).logits[0]
    found = logits.log_softmax(-1)[:-1].gather(1, ids[1:].unsqueeze(1)).squeeze(1)
    return found[len(sequence.prompt_ids) - 1 :].tolist()


def test_after_the_exchange_little_is_left_to_compute(scheduler: Scheduler, new_folder: Path) -> None:
    siblings(scheduler)
    model = next_model(scheduler, new_folder)
    assert prepare(scheduler, model) > 0
    assert max(model.passes) <= SLICE
    computed = sum(model.passes)
    exchange(scheduler, model)
    run(scheduler)
    # The prompts once, the shared tokens once for all, and what was sampled before the exchange.
    assert SHARED + SIBLINGS * OWN <= sum(model.passes) <= SHARED + SIBLINGS * (OWN + 3) + 3 * SIBLINGS
    # And of the tokens sampled since the last look, one for each.
    assert sum(model.passes) - computed <= SLICE + SIBLINGS


def test_every_token_is_of_the_weights_that_it_names(scheduler: Scheduler, tiny_model: Path, new_folder: Path) -> None:
    sequences = siblings(scheduler)
    model = next_model(scheduler, new_folder)
    prepare(scheduler, model)
    exchange(scheduler, model)
    run(scheduler)
    for sequence in sequences:
        before = sequence.versions.count("v0")
        assert sequence.versions == ["v0"] * before + ["v1"] * (60 - before)
        expected = scored(tiny_model, sequence)[:before] + scored(new_folder, sequence)[before:]
        assert sequence.logprobs == pytest.approx(expected, abs=1e-5)


def test_steps_of_the_old_weights_find_nothing_of_the_new_ones(
    scheduler: Scheduler, tiny_model: Path, new_folder: Path
) -> None:
    first = siblings(scheduler)[0]
    prepare(scheduler, next_model(scheduler, new_folder))
    late = new_sequence(scheduler, first.prompt_ids.tolist())
    run(scheduler, late)
    assert late.versions == ["v0"] * 8
    assert late.logprobs == pytest.approx(scored(tiny_model, late), abs=1e-5)


def test_salts_are_kept_apart(scheduler: Scheduler, new_folder: Path) -> None:
    siblings(scheduler, 2, salt="a")
    siblings(scheduler, 2, salt="b")
    model = next_model(scheduler, new_folder)
    prepare(scheduler, model)
    exchange(scheduler, model)
    run(scheduler)
    assert sum(model.passes) >= 2 * (SHARED + 2 * OWN)


def test_little_in_flight_is_left_for_the_exchange(scheduler: Scheduler, new_folder: Path) -> None:
    siblings(scheduler, 1)
    model = next_model(scheduler, new_folder)
    assert (prepare(scheduler, model), model.passes) == (0, [])


def test_what_has_ended_is_not_computed(scheduler: Scheduler, new_folder: Path) -> None:
    sequences = siblings(scheduler)
    model = next_model(scheduler, new_folder)
    ahead = Ahead(scheduler, model)
    assert ahead.advance()
    for sequence in sequences:
        scheduler.abort([sequence])
    assert not ahead.advance()
    assert [sequence.finish for sequence in sequences] == [Finish("abort", message="Aborted")] * SIBLINGS
    assert sum(model.passes) <= SLICE


def test_it_gives_up_where_more_comes_than_is_computed(scheduler: Scheduler, new_folder: Path) -> None:
    siblings(scheduler)
    model = next_model(scheduler, new_folder)
    ahead, seed = Ahead(scheduler, model), 100
    lacking = SHARED + SIBLINGS * (OWN + 3)
    while ahead.advance():
        seed += 1
        scheduler.submit([new_sequence(scheduler, random_ids(SLICE, seed), max_new_tokens=60)])
        scheduler.step()
    assert lacking < sum(model.passes) < 2 * lacking + SLICE


def test_a_cache_that_is_too_small_ends_it(tiny_model: Path, new_folder: Path) -> None:
    scheduler = tiny_scheduler(tiny_model, max_total_tokens=400)
    long = new_sequence(scheduler, random_ids(350, 0), max_new_tokens=40)
    run(scheduler, long, steps=3)
    model = next_model(scheduler, new_folder)
    prepare(scheduler, model)
    exchange(scheduler, model)
    run(scheduler)
    assert len(long.output_ids) == 40
    assert long.logprobs[-20:] == pytest.approx(scored(new_folder, long)[-20:], abs=1e-5)


def test_an_error_that_drops_everything_does_not_end_the_preparation(scheduler: Scheduler, new_folder: Path) -> None:
    siblings(scheduler)
    model = next_model(scheduler, new_folder)
    ahead = Ahead(scheduler, model)
    assert ahead.advance()
    scheduler.drop_all(Finish("abort", status_code=500))
    assert not ahead.advance()
    siblings(scheduler)
    assert ahead.advance()
