"""A learning rate that is left out follows the parameters that train, and the stored document has the number."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.recipes import RECIPES
from tests.support.builders import run_document

ROLES = [{"name": "checker", "system": "check", "policy": "small"}, {"name": "writer"}]


def rate(**changes: Any) -> float | None:
    return RunConfig.model_validate(run_document(**changes)).optimizer.learning_rate


def test_the_rate_follows_what_trains() -> None:
    assert rate() == rate(optimizer={"learning_rate": None}) == 1e-6
    assert rate(training={"lora": {}}) == rate(training={"lora": {}}, optimizer={"beta2": 0.9}) == 1e-5
    assert rate(training={"lora": {}}, optimizer={"learning_rate": 3e-6}) == 3e-6
    assert rate(recipe="grpo-8b", training={"lora": {}}) == 1e-5
    assert rate(recipe="lora-1gpu") == 1e-4


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_stored_run_has_its_rate(recipe: str) -> None:
    document = {name: value for name, value in run_document(recipe=recipe).items() if name != "sampling"}
    stored = RunConfig.model_validate(document).storable()
    assert isinstance(stored["optimizer"]["learning_rate"], float)


@pytest.mark.parametrize(
    ("run", "policy", "expected"),
    [
        ({}, {"lora": {}}, 1e-5),
        ({"training": {"lora": {}}}, {}, 1e-6),
        ({}, {"lora": {}, "optimizer": {"beta2": 0.9}}, 1e-5),
        # The run's own number is every policy's, unless that has another.
        ({"optimizer": {"learning_rate": 0.5}}, {"lora": {}}, 0.5),
        ({"optimizer": {"learning_rate": 0.5}}, {"lora": {}, "optimizer": {"learning_rate": 0.1}}, 0.1),
    ],
)
def test_each_policy_has_a_rate_of_its_own_kind(run: dict[str, Any], policy: dict[str, Any], expected: float) -> None:
    document = run_document(roles=ROLES, policies={"small": {"pool": "other", **policy}}, **run)
    found = RunConfig.model_validate(document)
    assert found.policy_document("small").optimizer.learning_rate == expected
    # A continued run lays its changes over the stored document.
    assert RunConfig.stored(found.storable()).policy_document("small") == found.policy_document("small")


@pytest.mark.parametrize("section", ["training", "optimizer"])
def test_a_section_that_is_no_object_is_refused_by_its_name(section: str) -> None:
    with pytest.raises(ValidationError, match=f"(?m)^{section}$"):
        RunConfig.model_validate(run_document(**{section: 3}))
