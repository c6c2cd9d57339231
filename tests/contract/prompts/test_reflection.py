"""The reflection model over loopback HTTP, in OpenAI's protocol."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from leyden.libs.prompts import reflection
from leyden.libs.prompts.errors import PromptError
from leyden.libs.prompts.journal import Journal
from leyden.libs.prompts.reflection import Reflection
from tests.fakes.judge import Said, ScriptedJudge, judge_beside


@pytest.fixture
def model() -> Iterator[ScriptedJudge]:
    with judge_beside() as scripted:
        yield scripted


def asked(model: ScriptedJudge, folder: Path, *questions: str, seconds: float = 5.0) -> list[str]:
    """The answers of a process that begins with the journal of the folder."""
    journal = Journal(folder, {})
    made = Reflection(model.url, "rewriter", "a-key", journal, print, outage_seconds=seconds)
    try:
        return [made(question) for question in questions]
    finally:
        made.close()
        journal.close()


def test_each_question_is_asked_once_over_all_starts(model: ScriptedJudge, tmp_path: Path) -> None:
    model.answer = lambda _, number: Said(f"answer {number}")
    assert asked(model, tmp_path, "a", "a") == ["answer 0", "answer 1"]
    assert asked(model, tmp_path, "a", "a", "b") == ["answer 0", "answer 1", "answer 2"]
    assert model.bodies[0] == {"model": "rewriter", "messages": [{"role": "user", "content": "a"}]}
    assert set(model.keys) == {"Bearer a-key"}


def test_another_question_in_the_place_of_a_known_one_is_asked(model: ScriptedJudge, tmp_path: Path) -> None:
    model.answer = lambda _, number: Said(f"answer {number}")
    asked(model, tmp_path, "a", "b")
    assert asked(model, tmp_path, "a", "c") == ["answer 0", "answer 2"]


def test_a_server_that_is_not_there_ends_the_command_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reflection, "FIRST_SECONDS", 0.1)
    monkeypatch.setattr(reflection, "FIRST_PAUSE_SECONDS", 0.01)
    journal, told = Journal(tmp_path, {}), list[str]()
    made = Reflection("http://127.0.0.1:1/v1", "rewriter", None, journal, told.append)
    with pytest.raises(
        PromptError, match=r"no answer from the reflection model .*check --reflection, --reflection-url"
    ):
        made("a")
    assert [one.rpartition(";")[2] for one in told] == [" it is asked again for up to 0.1 s"]
    made.close()
    journal.close()


def test_a_busy_server_is_asked_again(model: ScriptedJudge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reflection, "FIRST_PAUSE_SECONDS", 0.01)
    model.says(Said(status=429), Said(status=503), Said("better"))
    assert asked(model, tmp_path, "a") == ["better"]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (Said(status=401), "answers 401"),
        (Said("half of a", finish_reason="length"), "was cut off at the server's limit of tokens"),
        (Said(None), "has no text"),
    ],
    ids=["key", "cut", "silent"],
)
def test_an_answer_that_is_no_prompt_is_an_error_and_asked_again(
    model: ScriptedJudge, tmp_path: Path, said: Said, words: str
) -> None:
    model.says(said, Said("better"))
    with pytest.raises(PromptError, match=f"{words}.*LEYDEN_REFLECTION_API_KEY, and run the command again"):
        asked(model, tmp_path, "a")
    assert asked(model, tmp_path, "a") == ["better"]
