"""Files that a program left: the patterns name them, bounds hold, and nothing leads out of the working folder."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from leyden.libs.sandbox import artifacts
from leyden.libs.sandbox.artifacts import KeptFiles, read_artifacts


@pytest.fixture
def work(tmp_path: Path) -> Path:
    made = tmp_path / "work"
    for path in ("report.md", "notes.txt", "src/a.py", "src/deep/b.py", "src/deep/.hidden", "other/src/c.py"):
        target = made / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(path)
    return made


def paths(found: KeptFiles) -> list[str]:
    return [one.path for one in found.files]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["report.md"], ["report.md"]),
        (["*"], ["notes.txt", "report.md"]),
        (["src/*"], ["src/a.py"]),
        (["src/**"], ["src/a.py", "src/deep/.hidden", "src/deep/b.py"]),
        (["**/*.py"], ["other/src/c.py", "src/a.py", "src/deep/b.py"]),
        (["**/src/**/?.py"], ["other/src/c.py", "src/a.py", "src/deep/b.py"]),
        (["n[aeo]tes.txt", "report.md", "report.*"], ["notes.txt", "report.md"]),
        (["src", "nothing.md", "report.md/x"], []),
        ([], []),
    ],
)
def test_patterns_name_files_by_their_paths(work: Path, patterns: list[str], expected: list[str]) -> None:
    found = read_artifacts(work, patterns)
    assert (paths(found), found.left_out) == (expected, 0)
    assert [one.content.decode() for one in found.files] == expected
    assert [one.size_bytes for one in found.files] == list(map(len, expected))


def test_no_link_is_followed_and_no_pipe_is_waited_for(work: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the platform")
    (work / "link.md").symlink_to(secret)
    (work / "relative.md").symlink_to("report.md")
    (work / "folder").symlink_to(tmp_path)
    os.link(secret, work / "second_name.md")
    os.mkfifo(work / "pipe.md")
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(work / "socket.md"))
    server.close()
    found = read_artifacts(work, ["*.md", "folder/**"])
    assert (paths(found), found.left_out) == (["report.md"], 6)
    (tmp_path / "moved").symlink_to(work)
    assert read_artifacts(tmp_path / "moved", ["**"]) == KeptFiles([], 1)


def test_names_that_no_terminal_may_show_are_left_out(work: Path) -> None:
    for name in (b"\x1b[2J.md", b"\xff.md", b"two\nlines.md", "é.md".encode()):
        (work / os.fsdecode(name)).write_text("x")
    found = read_artifacts(work, ["*.md"])
    assert (paths(found), found.left_out) == (["report.md", "é.md"], 3)


def test_paths_are_bounded_in_bytes(work: Path) -> None:
    folder = work
    for name in "数" * 80, "字" * 80, "长" * 80, "名" * 80:
        folder /= name
    folder.mkdir(parents=True)
    for name in ("a" * (artifacts.MAX_PATH - 4 * 241), "a" * (artifacts.MAX_PATH - 4 * 241 + 1)):
        (folder / name).write_text("x")
    found = read_artifacts(work, ["数*/**"])
    assert ([len(one.path.encode()) for one in found.files], found.left_out) == ([artifacts.MAX_PATH], 1)


def test_bytes_are_bounded_and_what_is_cut_keeps_its_size(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "MAX_BYTES", 12)
    found = read_artifacts(work, ["notes.txt", "report.md", "src/*"])
    assert [(one.path, one.size_bytes, one.content) for one in found.files] == [
        ("notes.txt", 9, b"notes.txt"),
        ("report.md", 9, b"rep"),
        ("src/a.py", 8, b""),
    ]


def test_files_entries_and_depth_are_bounded(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "MAX_FILES", 2)
    found = read_artifacts(work, ["**"])
    assert (paths(found), found.left_out) == (["notes.txt", "other/src/c.py"], 4)
    monkeypatch.setattr(artifacts, "MAX_FILES", 200)
    deep = work
    for _ in range(artifacts.MAX_DEPTH + 3):
        deep /= "d"
    deep.mkdir(parents=True)
    (deep / "x").write_text("x")
    found = read_artifacts(work, ["d/**"])
    assert (paths(found), found.left_out) == ([], 1)
    monkeypatch.setattr(artifacts, "MAX_ENTRIES", 2)
    found = read_artifacts(work, ["*"])
    assert (len(found.files) <= 2, found.left_out) == (True, 1)


def test_a_working_folder_that_the_program_removed_has_none(tmp_path: Path) -> None:
    assert read_artifacts(tmp_path / "gone", ["**"]) == KeptFiles([], 1)
