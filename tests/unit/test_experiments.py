"""Experiments: tasks and teacher of the SQL agent, documents of runs, intervals and pages."""

from __future__ import annotations

import doctest
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from leyden.libs.contracts.config import Component, RunConfig
from leyden.libs.contracts.overlay import overlay
from leyden.libs.grading.facts import AttemptFacts
from leyden.libs.grading.grade import grade
from tests.campaigns.experiments import results
from tests.campaigns.experiments.__main__ import EXPERIMENTS
from tests.campaigns.experiments.choices import Choices
from tests.campaigns.experiments.disaggregation import Disaggregation
from tests.campaigns.experiments.flight import RULES, Flight
from tests.campaigns.experiments.page import curve, held_out, page, step_seconds
from tests.campaigns.experiments.results import Seed, interval, mean_seconds, shown
from tests.campaigns.experiments.sql import SQL
from tests.campaigns.experiments.taught import Taught
from tests.support.examples import example_modules

TAUGHT = [one for one in EXPERIMENTS.values() if isinstance(one, Taught)]


def written(folder: Path, seed: int, level: str) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    command = [sys.executable, str(SQL.agent / "tasks.py"), "--out", str(folder), "--seed", str(seed)]
    subprocess.run([*command, *SQL.of_tasks(Choices(level=level))], check=True)
    training, kept = (rows(folder / name) for name in ("train.jsonl", "heldout.jsonl"))
    return training, kept


def rows(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize(("level", "sizes"), [("one_table", (115, 38)), ("joins", (160, 51))])
def test_every_reference_has_its_own_result_and_no_question_is_in_both_sets(
    tmp_path: Path, level: str, sizes: tuple[int, int]
) -> None:
    training, kept = written(tmp_path / "0", 0, level)
    assert (len(training), len(kept)) == sizes
    elsewhere = rows(tmp_path / "0" / "elsewhere.jsonl")
    questions = [{task["question"] for task in tasks} for tasks in (training, kept, elsewhere)]
    assert not questions[0] & questions[1]
    assert not (questions[0] | questions[1]) & questions[2]
    assert not {task["database"] for task in training} & {task["database"] for task in elsewhere}
    assert any(" JOIN " in task["sql"] for task in [*training, *kept, *elsewhere]) == (level == "joins")
    component = Component.model_validate(SQL.document(0, Choices())["reward"]["components"][0])
    for task in [*training, *kept, *elsewhere]:
        facts = AttemptFacts(task, json.dumps({"sql": task["sql"], "rewritten": False}))
        assert grade(component, facts).value == 1.0, task["question"]
        assert grade(component, AttemptFacts(task, '{"sql": "SELECT \'no answer\'"}')).value == 0.0, task["question"]


def test_a_seed_decides_the_tasks(tmp_path: Path) -> None:
    folders = ((tmp_path / name, seed, "joins") for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    first, same, other = (written(*one) for one in folders)
    assert first == same != other


def test_each_level_has_its_tasks_and_its_page() -> None:
    assert SQL.dataset(0, Choices()) == SQL.dataset(0, Choices(level="one_table")) == "sql-one_table-0"
    assert (SQL.page(Choices()), SQL.page(Choices(level="joins"))) == ("sql-one-table", "sql-joins")
    assert SQL.title(Choices(level="joins")) == f"{SQL.heading}, joins"


def test_the_teacher_solves_tasks_and_sends_some_to_the_rewriter(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, prompts = example_modules(monkeypatch, SQL.agent, "teacher", "prompts")
    solutions = {f"Question {number}?": f"SELECT {number}" for number in range(9)}

    def said(messages: list[dict[str, Any]]) -> str:
        answer: str = teacher.solution(solutions, messages)
        return answer

    assert said(prompts.to_writer("a(b)", "Question 3?")) == "SELECT 3"
    assert said(prompts.to_rewriter("a(b)", "Question 3?", "SELECT", "Error: incomplete input")) == "SELECT 3"
    assert said(prompts.to_writer("a(b)", "Another?")) == ""
    checked = [said(prompts.to_checker(question, "SELECT 1", "[[1]]")) for question in solutions]
    assert {"yes", "no"} == set(checked)


@pytest.mark.parametrize("one", TAUGHT, ids=lambda one: one.name)
def test_documents_of_an_experiment_with_a_teacher_are_valid(one: Taught) -> None:
    choices = Choices(steps=7)
    shown_ = RunConfig.model_validate(one.demonstrations(0, choices))
    assert ({role.policy for role in shown_.roles}, shown_.training.steps) == ({"teacher"}, 0)
    warm = RunConfig.model_validate(one.warm_start(0, choices, "run-k3m9x2abcd"))
    assert (warm.algorithm.type, warm.optimizer.schedule) == ("sft", "linear")
    assert warm.train == RunConfig.model_validate(one.document(0, choices)).train
    trained = RunConfig.model_validate(overlay(warm.model_dump(mode="json"), one.changes(0, choices)))
    assert (trained.algorithm.type, trained.optimizer.schedule, trained.training.steps) == ("ppo_clip", "constant", 7)
    assert (trained.reward, trained.roles) == (warm.reward, warm.roles)
    # Each version is measured once: the base model and the fine-tuned one by the warm start.
    measured = [
        run.evaluation and run.evaluation.planned_versions(run.training.steps) for run in (shown_, warm, trained)
    ]
    assert measured == [[None], [0, None], [None]]


def test_each_version_of_the_sql_model_answers_on_the_other_database_once() -> None:
    models = (None, "/models/warm")
    found = [RunConfig.model_validate(SQL.elsewhere(0, Choices(), model)) for model in models]
    assert [run.model for run in found] == [None, "/models/warm"]
    for run in found:
        assert run.evaluation is not None
        assert (run.evaluation.dataset, run.training.steps) == ("sql-one_table-0-elsewhere", 0)
        assert run.evaluation.planned_versions(0) == [None]


@pytest.mark.parametrize("air", ["dense", "sparse"])
@pytest.mark.parametrize("rule", list(RULES))
def test_documents_of_the_flight_experiment_are_valid(rule: str, air: Any) -> None:
    document = Flight().document(3, Choices(steps=2, air=air, credit=rule))
    assert (document.credit.rule.type, document.sampling.seed, document.training.steps) == (rule, 3, 2)
    assert (document.credit.air is not None) == (air == "dense")


@pytest.mark.parametrize("lag", [0, 1])
def test_documents_of_disaggregation_are_those_of_the_flight_experiment_but_for_the_lag(
    lag: int,
) -> None:
    choices = Choices(steps=2, lag=lag)
    own, usual = (one.document(3, choices).model_dump() for one in (Disaggregation(), Flight()))
    assert own["sampling"].pop("max_policy_lag") == lag
    assert usual["sampling"].pop("max_policy_lag") == 0
    assert own == usual


def test_the_time_of_a_step_is_the_mean_between_the_first_end_and_the_last() -> None:
    ends = [datetime(2026, 11, 27, 4, 0, second, tzinfo=UTC) for second in (0, 10, 15)]
    assert (mean_seconds(ends), mean_seconds(ends[:1])) == (7.5, None)


def test_an_interval_is_students_t_and_one_seed_has_none() -> None:
    assert doctest.testmod(results).failed == 0
    # Means of 1, 2, 3, 4 have s = 1.2910 and t(3) = 3.182.
    assert interval([1.0, 2.0, 3.0, 4.0]) == pytest.approx((0.44603, 4.55397), abs=1e-4)
    assert (shown([0.5]), shown([0.5, 0.5]), shown([0.5, None])) == ("0.50", "0.50 [0.50, 0.50]", "–")


def test_a_page_has_each_seed_and_their_mean() -> None:
    seeds = [
        Seed(
            0, ["run-a"], [38, 40], {"base model": 0.0, "trained": 0.5}, {"trained": [0.1, 0.2]}, {"trained": 7.5}, 60
        ),
        Seed(1, ["run-b"], [38, 40], {"base model": 0.1, "trained": 0.7}, {"trained": [0.3]}, {"trained": None}, 61.6),
    ]
    assert held_out(seeds)[2:] == [
        "| base model | 0.00 | 0.10 | 0.05 [-0.59, 0.69] |",
        "| trained | 0.50 | 0.70 | 0.60 [-0.67, 1.87] |",
    ]
    assert curve("trained", seeds)[2:] == ["| 1 | 0.10 | 0.30 | 0.20 [-1.07, 1.47] |", "| 2 | 0.20 | – | – |"]
    assert step_seconds(seeds)[2:] == ["| trained | 7.50 | – | – |"]
    text = page("Title", "Purpose.", "make experiment", seeds)
    assert "over 2 seeds" in text
    assert "on 38 to 40 held-out tasks" in text
    assert "60; 62" in text
    assert "One seed has no interval" in page("Title", "Purpose.", "make experiment", seeds[:1])
