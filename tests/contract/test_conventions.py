"""The linters of prose, migrations and commit subjects find errors, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checks import commits, conventions


@pytest.mark.parametrize(
    "subject", ["gateway: record partial calls", "Install everything under one name", "ci: pass the cache on"]
)
def test_an_imperative_is_a_subject(subject: str) -> None:
    assert commits.check(subject) is None


@pytest.mark.parametrize(
    "subject", ["gateway: what is kept", "docs: the demo measured again", "store: fixed a bug", f"api: add {'x' * 65}"]
)
def test_invalid_commit_subjects_are_reported(subject: str) -> None:
    assert commits.check(subject) is not None


def test_relative_pronouns_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conventions, "ROOT", tmp_path)
    (tmp_path / "libs").mkdir()
    (tmp_path / "libs" / "one.py").write_text('"""Reads rows. What it does."""\n')
    found = [line.split(": ")[:2] for line in conventions.findings()]
    assert found == [["libs/one.py:1", "a sentence begins with 'What'"]]


def test_migrations_that_merged_side_by_side_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conventions, "ROOT", tmp_path)
    folder = tmp_path / "libs/store/migrations/versions"
    folder.mkdir(parents=True)
    for file, revision, parent in (("1_a", "1", None), ("2_b", "2", "1"), ("2_c", "2", "1"), ("4_d", "3", "2")):
        written = "None" if parent is None else f'"{parent}"'
        (folder / f"{file}.py").write_text(f'revision = "{revision}"\ndown_revision = {written}\n')
    found = [line.partition(": ")[2] for line in conventions.findings()]
    assert found == [
        "it follows 1, and the file before it is 2: number it anew",
        "its revision is 3: name the file after it",
    ]
