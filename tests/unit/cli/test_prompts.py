"""`leyden prompts optimise` refuses what it cannot begin, and names the remedy."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from leyden.libs.cli.__main__ import app
from leyden.libs.contracts.placeholders import as_literal

AGENT = {"command": ["agent"], "environment": {"PROMPT": "Answer."}}


def optimise(folder: Path, **document: Any) -> Result:
    (folder / "run.json").write_text(json.dumps({"name": "one", "dataset": "train", **document}))
    words = (
        "prompts",
        "optimise",
        str(folder / "run.json"),
        "--prompt",
        "PROMPT",
        "--reflection",
        "m",
        "--budget",
        "9",
    )
    return CliRunner().invoke(app, ["--url", "http://127.0.0.1:1", *words])


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"agent": None, "agents": [{"name": "a", "command": ["x"]}]}, "prompts are those of one: write it as `agent`"),
        ({"agent": {"command": ["agent"]}}, "agent.environment has no text 'PROMPT': write the present prompt there"),
        ({"agent": AGENT}, "and `evaluation.dataset`, for the held-out tasks"),
    ],
    ids=["several agents", "no variable", "no held-out tasks"],
)
def test_a_document_without_a_part_is_refused_with_the_remedy(
    tmp_path: Path, document: dict[str, Any], words: str
) -> None:
    said = optimise(tmp_path, **document)
    assert said.exit_code == 2 and words in said.stderr
    assert [one.name for one in tmp_path.iterdir()] == ["run.json"]


def test_a_platform_that_is_not_there_ends_the_command_with_the_remedy(tmp_path: Path) -> None:
    said = optimise(tmp_path, agent=AGENT, evaluation={"dataset": "held-out"})
    assert said.exit_code != 0
    assert "start the platform with `leyden up`, or name another with --url or LEYDEN_URL" in said.stderr
    assert [one.name for one in tmp_path.iterdir()] == ["run.json"]


def test_a_folder_without_an_optimisation_has_nothing_to_clean(tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["--url", "http://127.0.0.1:1", "prompts", "clean", str(tmp_path)])
    assert (said.exit_code, said.stderr.replace("\n", " ").endswith("name the folder of an optimisation ")) == (1, True)
    assert list(tmp_path.iterdir()) == []


def test_the_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gepa", None)
    monkeypatch.delitem(sys.modules, "leyden.libs.prompts.optimise", raising=False)
    said = optimise(tmp_path, agent=AGENT, evaluation={"dataset": "held-out"})
    assert (said.exit_code, said.stderr) == (1, "error: the package gepa is missing: pip install 'leyden[gepa]'\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{task.a} {task.b} {task}", "{task.a} {{task.b}} {{task}}"),
        ("{{task.a}} {{task.b}}", "{{task.a}} {{task.b}}"),
        ("{a} {task.}", "{a} {task.}"),
    ],
)
def test_a_placeholder_that_no_prompt_had_stands_for_itself(text: str, expected: str) -> None:
    assert as_literal(text, ["Q: {task.a} {{task.b}}"]) == expected
