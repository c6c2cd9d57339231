"""Text from outside is printed character by character, at any width of the terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from leyden.libs.cli.__main__ import app
from leyden.libs.cli.commands import doctor
from leyden.libs.cli.errors import CommandError, exit_on_error
from leyden.libs.cli.view.console_link import link_line
from leyden.libs.cli.view.output import as_block, facts, heading, print_json, print_parts, table
from leyden.libs.cli.view.safe_text import safe_line

OUTSIDE = "[bold]list[int] [/INST] :boom:"


def test_no_text_is_read_as_markup(capsys: pytest.CaptureFixture[str]) -> None:
    print_parts(facts((OUTSIDE, OUTSIDE)), table((OUTSIDE,), [(OUTSIDE,)]))
    with pytest.raises(typer.Exit), exit_on_error():
        raise CommandError(OUTSIDE)
    said = capsys.readouterr()
    assert (said.out.count(OUTSIDE), said.err) == (4, f"error: {OUTSIDE}\n")


def test_an_escape_sequence_is_shown_and_does_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_parts(facts(("answer", "\x1b]0;title\x07 and \x9b31m")))
    assert "\\x1b]0;title\\x07 and \\x9b31m" in capsys.readouterr().out


FORGED = "fine\nrun-1: completed, reward 1.0\r\x1b[2K\u202egnirts\u2066x\u2069\u2028next\x85"


def test_text_of_an_agent_makes_no_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    print_parts(facts(("reason", FORGED)), as_block(FORGED), table(("name",), [(FORGED,)]), heading(FORGED))
    with pytest.raises(typer.Exit), exit_on_error():
        raise CommandError(FORGED)
    print_json({"reason": FORGED})
    said = capsys.readouterr()
    shown = said.out + said.err
    assert not [line for line in shown.splitlines() if line.startswith("run-1")]
    assert not set(shown) & set("\r\x1b\u202e\u2066\u2069\u2028\x85")
    assert "│ run-1: completed, reward 1.0\\r\\x1b[2K\\u202egnirts" in said.out
    assert json.loads(said.out[said.out.index("{") :]) == {"reason": FORGED}


@pytest.mark.parametrize("character", ["é", "日", "👨‍👩‍👧", "نص", "\t", "‌"])
def test_ordinary_characters_of_every_script_stay(character: str) -> None:
    assert safe_line(character) == character


def test_no_id_and_no_word_is_cut_at_the_width_of_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    ids = ("run-" + "a" * 40, "rollout-" + "b" * 60)
    reason = " ".join(f"word{number}" for number in range(30))
    print_parts(table(("run", "rollout", "reason"), [(*ids, reason)]))
    said = capsys.readouterr().out
    assert all(one in said for one in ids)
    assert "".join(said.split()).count("word") == 30
    assert "…" not in said


def commands(group: typer.core.TyperGroup, *names: str) -> dict[tuple[str, ...], typer.core.TyperCommand]:
    found = {}
    for name, command in group.commands.items():
        path = (*names, name)
        found |= commands(command, *path) if isinstance(command, typer.core.TyperGroup) else {path: command}
    return found


COMMANDS = commands(typer.main.get_command(app))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_shows_every_option_with_all_its_words(path: tuple[str, ...], tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["--home", str(tmp_path), *path, "--help"], env={"COLUMNS": "400"}).output
    for option in COMMANDS[path].params:
        if getattr(option, "help", None) and not getattr(option, "hidden", False):
            assert option.help in said
        if isinstance(option.show_default, str):
            assert option.show_default in said


def test_the_doctor_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "WHEELS", {"no_such_module": "service", "nor_this_one": "store"})
    said = CliRunner().invoke(app, ["--home", str(tmp_path), "doctor"]).stdout
    assert "leyden[service,store]" in said


@pytest.mark.parametrize(
    ("program", "status", "words"),
    [
        (None, "skipped", "no podman or docker"),
        ("exit 0", "ok", "/podman"),
        ("echo 'Cannot connect to the Docker daemon at unix:///x.' >&2; exit 1", "warning", "start docker's daemon"),
    ],
)
def test_the_doctor_says_whether_agents_may_be_containers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str | None, status: str, words: str
) -> None:
    path = tmp_path / "podman"
    monkeypatch.setenv("RUNNER_CONTAINER_PROGRAM", str(path))
    if program is not None:
        path.write_text(f"#!/bin/sh\n{program}\n")
        path.chmod(0o755)
    said = CliRunner().invoke(app, ["--home", str(tmp_path / "home"), "doctor", "--json"]).stdout
    [found] = [one for one in json.loads(said) if one["name"] == "containers"]
    assert found["status"] == status
    assert words in found["detail"]
    assert ("runner.type container" in found["remedy"]) == (status != "ok")


def test_a_link_stays_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    link = f"http://127.0.0.1:8000/#sign-in={'x' * 200}&to=/"
    print_parts(link_line(link))
    assert capsys.readouterr().out == f"console (signs in once): {link}\n"
