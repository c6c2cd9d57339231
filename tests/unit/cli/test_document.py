"""A file that is no run document ends the command with one line that names the error."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from leyden.libs.cli.__main__ import app

BAD = {
    "noise.json": b"\x80\x81",
    "noise.toml": b"\x80\x81",
    "wide.json": "{}".encode("utf-16"),
    "empty.json": b"",
    "list.json": b"[]",
    "twice.json": b'{"name": "a", "name": "b"}',
    "nan.json": b'{"a": NaN}',
    "nan.toml": b"a = nan",
    "date.toml": b"a = 2026-01-01",
    "deep.json": b"[" * 100_000,
    "deep.toml": b"a = " + b"[" * 100_000,
    "digits.json": b'{"a": ' + b"9" * 5000 + b"}",
    "digits.toml": b"a = " + b"9" * 5000,
    "nul.json": b'{"agent": {"directory": "a\\u0000b"}}',
    "half.json": b'{"agent": {"directory": "\\ud800"}}',
    "half.toml": b'a = "\\ud800"',
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_no_document_is_named(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_bytes(BAD[name])
    ended = CliRunner().invoke(app, ["--url", "http://127.0.0.1:1", "--token", "x", "run", "create", str(file)])
    assert (ended.exit_code, type(ended.exception)) == (2, SystemExit), ended.output
    [line] = ended.stderr.splitlines()
    assert line.startswith(f"error: {file}: ")


@pytest.mark.parametrize("change", ["a", "=", ".a=1", "name.x=1", "x=NaN"])
def test_a_change_that_cannot_be_made_is_named(tmp_path: Path, change: str) -> None:
    file = tmp_path / "run.json"
    file.write_text('{"name": "a"}')
    command = ["--url", "http://127.0.0.1:1", "--token", "x", "run", "create", str(file), "--set", change]
    ended = CliRunner().invoke(app, command)
    assert (ended.exit_code, type(ended.exception), len(ended.stderr.splitlines())) == (2, SystemExit, 1), ended.output
