"""Roles of a run: contradictions are refused with the remedy."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from leyden.libs.contracts.config import RunConfig
from tests.support import builders

WRITER = {"name": "writer", "agent_name": "writer*"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"roles": [WRITER, WRITER]}, "write one role, or two names"),
        ({"roles": [{"name": "others"}, WRITER]}, "'others' has no condition and takes every call: write it last"),
        ({"roles": [WRITER], "train": ["checker"]}, "add them to roles"),
        ({"roles": [WRITER], "train": []}, "training.steps 0"),
        ({"credit": {"baseline": {"per": "role"}}}, "add roles, or write 'rollout'"),
        ({"roles": [{"name": "a", "identity": "xyz"}]}, "identity"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RunConfig.model_validate(builders.run_document(**changes))


def test_a_run_may_train_some_of_its_roles() -> None:
    document = builders.run_document(roles=[WRITER, {"name": "others"}], train=["writer"])
    config = RunConfig.model_validate(document)
    assert ([role.name for role in config.roles], config.train) == (["writer", "others"], ["writer"])
    assert RunConfig.stored(config.model_dump(mode="json")) == config
