"""An optimisation on a platform in memory: what it finds, what it costs, and how it goes on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leyden.libs.client import Client
from leyden.libs.prompts.cleaning import remove_made
from leyden.libs.prompts.errors import PromptError
from leyden.libs.prompts.journal import FILE, Journal
from leyden.libs.prompts.measuring import Example, Measuring
from leyden.libs.prompts.optimise import Plan, optimise
from leyden.libs.prompts.results import Version, best_run
from tests.fakes.prompt_platform import FakePlatform

TASKS = [{"letters": "abcd"}, {"letters": "cdef"}, {"letters": "efgh"}, {"letters": "abgh"}]
SEED = {"PROMPT": "!"}


def adding(question: str) -> str:
    """Rewrites a prompt: it adds the first letter of the tasks shown that the prompt lacks."""
    present = question.split("```")[1].strip()
    missing = sorted(set("".join(re.findall(r"### letters\n(\w+)", question))) - set(present))
    return f"```\n{present}{missing[0] if missing else '?'}\n```"


class Optimisation:
    """One folder on one platform, as the command makes it."""

    def __init__(self, platform: FakePlatform, folder: Path) -> None:
        self.platform, self.folder, self.told = platform, folder, list[str]()
        self.asked = 0
        platform.datasets |= {"train": TASKS, "held": TASKS}

    def run(self, budget: int, model: Callable[[str], str] = adding, *, seed: int = 0, **plan: Any) -> list[Version]:
        repeats = plan.pop("repeats", 1)
        document = {
            "name": "letters",
            "dataset": "train",
            "agent": {"command": ["agent"], "environment": {"OTHER": "1", **SEED}},
            "evaluation": {"dataset": "held", "rollouts_per_task": repeats},
        }
        training, held_out = ([Example(name, number, task) for number, task in enumerate(TASKS)] for name in "th")
        journal = Journal(self.folder, {"document": document, "seed": seed})
        leyden: Client = self.platform  # type: ignore[assignment]

        def reflect(question: str) -> str:
            known = journal.get("answer", str(self.asked))
            if known is None:
                known = model(question)
                journal.add("answer", str(self.asked), known)
            self.asked += 1
            return str(known)

        self.asked = 0
        made = Plan(SEED, training, held_out, repeats, budget, 2, seed, **plan)
        try:
            measuring = Measuring(leyden, document, held_out, journal, self.told.append, poll_seconds=0.0)
            return optimise(made, measuring, reflect, self.folder, journal, self.told.append)
        finally:
            journal.close()

    @property
    def rollouts(self) -> int:
        """All that the platform has run."""
        sizes = (
            (request.max_tasks or 0) * (request.rollouts_per_task or 1)
            for _, request in self.platform.evaluations.values()
        )
        return sum(sizes)


@pytest.fixture
def optimisation(tmp_path: Path) -> Optimisation:
    return Optimisation(FakePlatform(), tmp_path / "out")


def test_a_better_prompt_is_found_within_the_budget(optimisation: Optimisation) -> None:
    versions = optimisation.run(60)
    result = json.loads((optimisation.folder / "versions.json").read_text())
    best = next(one for one in result["versions"] if one["version"] == result["best"])
    assert versions[0].texts == SEED and versions[0].score == 0.0 and versions[0].parents == ()
    assert best["score"] >= 0.5 and len(best["scores"]) == 4
    assert (optimisation.folder / "PROMPT.txt").read_text() == best["prompts"]["PROMPT"]
    assert optimisation.rollouts <= 60
    assert [one.number for one in versions] == list(range(len(versions)))
    assert all(one.parents and one.parents[0] < one.number for one in versions[1:])
    document = optimisation.platform.runs[best["run"]]
    assert document["agent"]["environment"] == {"OTHER": "1", "PROMPT": best["prompts"]["PROMPT"]}
    assert document["training"]["steps"] == 0


def test_a_version_that_is_no_better_has_no_score(optimisation: Optimisation) -> None:
    versions = optimisation.run(30, lambda _: "```\n?\n```")
    assert [(one.number, one.score) for one in versions] == [(0, 0.0), (1, None)]
    assert (optimisation.folder / "PROMPT.txt").read_text() == "!"
    assert "version 1: 0.000 on 2 examples, its parent 0.000" in optimisation.told


def test_negative_rewards_need_a_number_for_failures(optimisation: Optimisation) -> None:
    optimisation.platform.offset = -0.5
    with pytest.raises(PromptError, match="failure_reward"):
        optimisation.run(30)
    assert not any("version 1" in words for words in optimisation.told)


def test_a_prompt_that_makes_every_agent_crash_is_measured_by_another_run(optimisation: Optimisation) -> None:
    optimisation.platform.crashing = "?"
    versions = optimisation.run(30, lambda _: "```\n?\n```")
    assert [(one.number, one.score) for one in versions] == [(0, 0.0), (1, None)]
    assert "version 1: 0.000 on 2 examples, its parent 0.000" in optimisation.told


def test_rollouts_per_task_count_in_the_budget(optimisation: Optimisation) -> None:
    optimisation.run(80, repeats=3)
    assert 48 <= optimisation.rollouts <= 80


def test_a_budget_below_one_version_is_refused_with_the_least_one(optimisation: Optimisation) -> None:
    with pytest.raises(PromptError, match="--budget 11 is below 12: 4 held-out tasks"):
        optimisation.run(11)
    assert optimisation.rollouts == 0


def test_it_ends_when_a_version_solves_every_held_out_task(optimisation: Optimisation) -> None:
    versions = optimisation.run(10_000, lambda _: "```\nabcdefgh\n```")
    assert [one.score for one in versions] == [0.0, 1.0]


@pytest.mark.parametrize("ends", [0, 1, 3])
def test_a_killed_optimisation_goes_on_to_the_same_result(tmp_path: Path, ends: int) -> None:
    whole, broken = (Optimisation(FakePlatform(), tmp_path / name) for name in ("whole", "broken"))
    expected = whole.run(60)
    answers = iter(range(1000))

    class Killed(Exception):
        pass

    def dying(question: str) -> str:
        if next(answers) == ends:
            raise Killed
        return adding(question)

    with pytest.raises(Killed):
        broken.run(60, dying)
    # A process that is killed leaves the beginning of a line.
    with (broken.folder / FILE).open("a") as file:
        file.write('["answer", "9')
    found = broken.run(60)
    assert [(one.texts, one.parents, one.scores) for one in found] == [
        (one.texts, one.parents, one.scores) for one in expected
    ]
    assert broken.platform.evaluations.keys() == whole.platform.evaluations.keys()


def test_a_larger_budget_goes_on(tmp_path: Path) -> None:
    whole, grown = (Optimisation(FakePlatform(), tmp_path / name) for name in ("whole", "grown"))
    expected = whole.run(60)
    grown.run(30)
    before = len(grown.platform.evaluations)
    assert [one.texts for one in grown.run(60)] == [one.texts for one in expected]
    assert before < len(grown.platform.evaluations) == len(whole.platform.evaluations)


def test_a_folder_of_another_optimisation_is_refused(optimisation: Optimisation) -> None:
    optimisation.run(30)
    with pytest.raises(PromptError, match="another document, prompt or seed: name another folder with --to"):
        optimisation.run(30, seed=1)


def test_a_second_process_in_the_folder_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path, {})
    with pytest.raises(PromptError, match="another process works in"):
        Journal(tmp_path, {})
    journal.close()


def test_grades_that_change_later_change_nothing_that_was_measured(tmp_path: Path) -> None:
    whole, grown = (Optimisation(FakePlatform(), tmp_path / name) for name in ("whole", "grown"))
    expected = whole.run(60)
    grown.run(30)
    # A new revision of every grade, and runs whose records were deleted.
    grown.platform.regraded = dict.fromkeys(grown.platform.evaluations, -1.0)
    found = grown.run(60)
    assert [(one.texts, one.scores) for one in found] == [(one.texts, one.scores) for one in expected]


def test_what_it_made_is_deleted_but_for_the_best_version(optimisation: Optimisation) -> None:
    versions = optimisation.run(60)
    platform, best = optimisation.platform, best_run(optimisation.folder)
    examples = [one for one in platform.datasets if "prompt examples" in one]
    assert examples and all(one.startswith("letters prompt examples ") for one in examples)
    journal = Journal(optimisation.folder, None)
    leyden: Client = platform  # type: ignore[assignment]
    busy = next(one.run for one in versions if one.run != best)
    assert busy is not None
    platform.busy = {busy}
    assert remove_made(leyden, journal, best) == [f"{busy} is evaluating"]
    platform.busy = set()
    assert remove_made(leyden, journal, best) == []
    assert set(platform.runs) == {best}
    used = {request.dataset for run, request in platform.evaluations.values() if run == best}
    assert {one for one in platform.datasets if one in examples} == used & set(examples)
    journal.close()


def test_equal_examples_are_one_dataset_for_all_optimisations_of_a_document(tmp_path: Path) -> None:
    first = Optimisation(FakePlatform(), tmp_path / "first")
    first.run(60)
    made = set(first.platform.datasets)
    again = Optimisation(first.platform, tmp_path / "again")
    again.run(60)
    assert set(first.platform.datasets) == made


def test_unknown_rewards_are_an_error_and_measured_again(optimisation: Optimisation) -> None:
    optimisation.platform.unrewarded = 1
    with pytest.raises(PromptError, match=r"1 rollouts of version 0 have no reward, such as run-0\.e0\.0\.0 "):
        optimisation.run(30)
    assert optimisation.run(30)[0].score == 0.0
    assert len(optimisation.platform.runs) == len(optimisation.run(30))


def test_ctrl_c_cancels_the_run_and_the_next_start_makes_another(optimisation: Optimisation) -> None:
    optimisation.platform.interrupt_at = 1
    with pytest.raises(KeyboardInterrupt):
        optimisation.run(30)
    assert optimisation.platform.cancelled == ["run-0"]
    assert "run run-0 is cancelled" in optimisation.told
    versions = optimisation.run(30)
    # The held-out rollouts of the cancelled run were complete before.
    assert versions[0].run == "run-1" and versions[0].score == 0.0
    assert optimisation.platform.evaluations["run-1.e2"][1].dataset != "held"


def test_a_failed_run_is_an_error_and_measured_again(optimisation: Optimisation) -> None:
    optimisation.platform.phases["run-0"] = "failed"
    with pytest.raises(PromptError, match="run run-0 of version 0 is failed: out of luck; mend the cause"):
        optimisation.run(30)
    assert optimisation.run(30)[0].run == "run-1"
