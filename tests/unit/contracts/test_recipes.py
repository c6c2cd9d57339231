"""Recipes begin a run's document; the document overrides them, and the stored one no longer needs them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from leyden.libs.cli.commands import demo
from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.recipes import RECIPES
from tests.support.builders import run_document


def run(**changes: Any) -> RunConfig:
    document = run_document(**changes)
    return RunConfig.model_validate({key: document[key] for key in document if key != "sampling" or key in changes})


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_a_valid_start_and_is_stored_as_its_values(name: str) -> None:
    found = run(recipe=name)
    stored = found.model_dump(mode="json")
    assert stored["recipe"] is None
    assert found == RunConfig.stored(stored)
    for section, values in RECIPES[name].document.items():
        assert (
            getattr(found, section).model_dump(exclude_unset=True).items()
            >= {key: value for key, value in values.items() if not isinstance(value, dict)}.items()
        )


def test_the_document_overrides_its_recipe() -> None:
    found = run(recipe="lora-1gpu", training={"steps": 3, "lora": {"rank": 8}}, algorithm={"type": "cispo"})
    assert found.training.lora is not None
    assert (found.training.steps, found.training.precision, found.training.lora.rank) == (3, "bfloat16", 8)
    assert found.training.lora.alpha == 64.0
    # Another loss has none of the recipe's fields.
    assert found.algorithm.correction is None
    assert run(recipe="lora-1gpu", training={"lora": None}).training.lora is None


def test_an_unknown_recipe_is_refused_with_its_path_and_the_known_ones() -> None:
    with pytest.raises(ValidationError, match=r"recipe\n.*there is no recipe 'grpo': write one of flight-cpu"):
        run(recipe="grpo")


def test_the_recipe_of_the_flight_agent_is_what_the_demo_runs() -> None:
    shown = demo.run_document(demo.DemoOptions())
    found = run(recipe="flight-cpu")
    assert found.sampling == shown.sampling
    assert (found.credit, found.algorithm, found.optimizer) == (shown.credit, shown.algorithm, shown.optimizer)
    assert found.training == shown.training
