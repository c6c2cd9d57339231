"""Teams of the SQL agent's writer and checker: the documents of each way to train them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.judgements import judge
from tests.campaigns.experiments.choices import Choices
from tests.campaigns.experiments.coordination import COORDINATION, ROLES
from tests.campaigns.experiments.sql import SQL

CHOICES = Choices(steps=7, held_out=9)


def checked(document: dict[str, Any]) -> RunConfig:
    run = RunConfig.model_validate(document)
    assert judge(run) == []
    assert run.evaluation is not None
    assert run.evaluation.planned_versions(run.training.steps) == [None]
    assert run.evaluation.max_tasks == 9
    return run


def test_together_both_policies_train_from_one_model() -> None:
    run = checked(COORDINATION.together(2, CHOICES, "/start"))
    assert {role.name: role.policy for role in run.roles} == {"writer": None, "checker": "checker", "rewriter": None}
    assert (run.model, run.policies["checker"].model, run.policies["checker"].trains) == ("/start", "/start", True)
    assert (run.train, run.training.steps, run.policy_document("checker").training.steps) == (None, 7, 7)
    assert run.policy_document("checker").optimizer == run.optimizer


@pytest.mark.parametrize(("policy", "other"), [("writer", "checker"), ("checker", "writer")])
def test_alone_a_policy_trains_as_its_run_and_the_other_one_is_frozen(policy: str, other: str) -> None:
    run = checked(COORDINATION.alone(2, CHOICES, "/start", policy))
    assert {role.name for role in run.roles if role.policy is None} == set(ROLES[policy]) == set(run.train or ())
    assert (run.model, run.policies[other].model, run.policies[other].frozen) == ("/start", "/start", True)
    together = RunConfig.model_validate(COORDINATION.together(2, CHOICES, "/start"))
    parts = ("dataset", "sampling", "credit", "algorithm", "optimizer", "training", "evaluation", "reward")
    assert all(getattr(run, part) == getattr(together, part) for part in parts)


def test_both_that_trained_apart_are_measured_without_a_step() -> None:
    run = checked(COORDINATION.both(2, CHOICES, "/writer", "/checker"))
    assert (run.training.steps, run.model, run.policies["checker"].model) == (0, "/writer", "/checker")


def test_the_solutions_are_those_of_the_sql_experiment() -> None:
    of_sql = SQL.demonstrations(2, replace(CHOICES, level="joins"))
    assert COORDINATION.demonstrations(2, CHOICES) == of_sql
