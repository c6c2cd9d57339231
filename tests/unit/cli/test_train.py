"""One line becomes a run's document: the agent's command, a grader's short form, names."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from leyden.libs.cli.__main__ import app
from leyden.libs.cli.commands import train
from leyden.libs.cli.commands.train import agent_here, dataset_of, grader_of, name_of, reward_of, write_document
from leyden.libs.cli.errors import CommandError
from leyden.libs.contracts.config import RunConfig


@pytest.mark.parametrize(
    ("text", "grader"),
    [
        ("token_f1:{task.answer}", {"type": "token_f1", "reference": "{task.answer}"}),
        ("string_check:7", {"type": "string_check", "reference": "7"}),
        ("regex:^a: .*$", {"type": "regex", "pattern": "^a: .*$"}),
        ("call_budget:5", {"type": "call_budget", "at_most": 5}),
        ("tool_use", {"type": "tool_use"}),
        ('{"type": "length", "at_most": 9}', {"type": "length", "at_most": 9}),
    ],
)
def test_the_short_form_of_a_grader_gives_the_field_that_it_needs(text: str, grader: dict[str, object]) -> None:
    assert grader_of(text) == grader
    document = {"name": "r", "dataset": "d", "agent": {"command": ["a"]}, "reward": reward_of([text])}
    assert RunConfig.model_validate(document).reward is not None


def test_several_graders_of_one_type_add_up() -> None:
    reward = reward_of(["regex:a", "regex:b", "tool_use", '{"type": "regex", "pattern": "c"}'])
    assert [one["name"] for one in reward["components"]] == ["regex", "regex_2", "tool_use", "regex_3"]
    document = {"name": "r", "dataset": "d", "agent": {"command": ["a"]}, "reward": reward}
    assert RunConfig.model_validate(document).reward is not None


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("f1:{task.answer}", "there is no grader 'f1': write one of string_check, token_f1"),
        ("choice:A,B", "choice has no short form: write JSON with its fields output, reference, options"),
        ("call_budget:few", "call_budget:few"),
        ('{"type": ', "--reward"),
    ],
)
def test_a_wrong_grader_names_what_to_write(text: str, remedy: str) -> None:
    with pytest.raises(CommandError) as refused:
        grader_of(text)
    assert remedy in str(refused.value)


@pytest.mark.parametrize("text", ['{"question": "q", "answer": "a"}\n', '[{"question": "q", "answer": "a"}]'])
def test_a_reference_that_is_the_bare_name_of_a_field_is_refused(tmp_path: Path, text: str) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(text)
    with pytest.raises(CommandError) as refused:
        train.refuse_names(reward_of(["token_f1:answer"]), train.first_task(tasks))
    assert "write {task.answer}" in str(refused.value)
    for one in ("token_f1:{task.answer}", "string_check:yes", "regex:answer"):
        train.refuse_names(reward_of([one]), train.first_task(tasks))


@pytest.mark.parametrize("text", ["", "{broken", "7", '["a"]', "[]"])
def test_tasks_that_cannot_be_read_are_left_to_the_upload(tmp_path: Path, text: str) -> None:
    (tmp_path / "tasks.jsonl").write_text(text)
    assert train.first_task(tmp_path / "tasks.jsonl") == {}


def test_the_command_means_the_program_that_the_shell_would_start(tmp_path: Path) -> None:
    (tmp_path / "my agent.py").touch()
    assert agent_here(["sh", "my agent.py"], tmp_path) == {
        "agent": {"command": [shutil.which("sh"), "my agent.py"], "directory": str(tmp_path)}
    }
    for first in ("./run.sh", "{python}"):
        assert agent_here([first], tmp_path)["agent"]["command"] == [first]
    with pytest.raises(CommandError, match="there is no program 'no-such-program'"):
        agent_here(["no-such-program"], tmp_path)
    assert (name_of(["sh", "my agent.py"], tmp_path), name_of(["./{x}"], tmp_path)) == ("my-agent", "x")
    assert name_of(["/bin/claude", "-p", "You are an assistant. " * 300], tmp_path) == "claude"


@pytest.mark.parametrize(
    ("words", "place"),
    [((), "container"), (("--url", "http://elsewhere:8000"), "kubernetes"), (("--context", "kind"), "kubernetes")],
)
def test_an_image_is_a_container_here_and_a_pod_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], place: str
) -> None:
    documents: list[dict[str, Any]] = []
    monkeypatch.setattr(train, "_train", lambda _context, document, _tasks, as_json: documents.append(document))
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"question": "?"}')
    command = ("python", "/app/agent.py", "{task.question}")
    image = ("--image", "localhost/my-agent:1", "--set", "runner.timeout_seconds=60")
    arguments = ("--home", str(tmp_path), *words, "train", "--tasks", str(tasks), *image, "--", *command)
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    [document] = documents
    config = RunConfig.model_validate(document)
    assert config.runner.model_dump(include={"type", "image", "timeout_seconds"}) == {
        "type": place,
        "image": "localhost/my-agent:1",
        "timeout_seconds": 60,
    }
    assert config.agent is not None
    # The program is the image's, whatever this machine has.
    assert (config.agent.command, config.agent.directory) == (list(command), None)


def test_changed_tasks_are_another_dataset_and_a_changed_document_replaces_none(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("{}")
    first = dataset_of(tasks)
    tasks.write_text('{"a": 1}')
    assert (first.startswith("tasks-"), dataset_of(tasks) != first) == (True, True)
    path = write_document({"name": "mine", "seed": 1}, tmp_path)
    assert (path.name, write_document({"name": "mine", "seed": 1}, tmp_path)) == ("mine.run.json", path)
    assert not (tmp_path / "mine.run.json~").exists()
    write_document({"name": "mine", "seed": 2}, tmp_path)
    assert '"seed": 1' in (tmp_path / "mine.run.json~").read_text()
