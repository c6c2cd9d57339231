from __future__ import annotations

import errno
import json
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from services.runner.folder import Folders


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    folder = tmp_path / "agent"
    (folder / "lib").mkdir(parents=True)
    (folder / "agent.py").write_text("print()")
    (folder / "lib" / "more.py").write_text("")
    return folder


@pytest.fixture
def folders_of(tmp_path: Path) -> Iterator[Callable[[str], Folders]]:
    with ExitStack() as stack:
        yield lambda owner: stack.enter_context(closing(Folders(tmp_path / "work", owner)))


def test_an_attempt_gets_a_private_fresh_copy(folders_of: Callable[[str], Folders], agent: Path) -> None:
    folders = folders_of("runner-1")
    first, second = (folders.make("r.0.0", {"question": "Café"}, str(agent)) for _ in range(2))
    assert first.work != second.work
    assert sorted(path.name for path in first.work.rglob("*")) == ["agent.py", "lib", "more.py"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in (first.root, first.work, first.scratch)} == {0o700}
    assert json.loads(first.task_file.read_text()) == {"question": "Café"}
    (first.work / "agent.py").write_text("changed")
    assert (second.work / "agent.py").read_text() == (agent / "agent.py").read_text() == "print()"


def test_removing_takes_what_the_agent_made_read_only(tmp_path: Path) -> None:
    folders = Folders(tmp_path / "work", "runner-1")
    folder = folders.make("r.0.0", {}, None)
    (folder.work / "deep" / "er").mkdir(parents=True)
    (folder.work / "deep" / "er" / "file").write_text("x")
    for path in (folder.work / "deep" / "er", folder.work / "deep", folder.work):
        path.chmod(0o500)
    folders.remove(folder)
    assert not folder.root.exists()
    folders.close()
    assert not folders.root.exists()


def test_a_new_runner_removes_what_a_dead_one_left_and_nothing_of_a_living_one(
    folders_of: Callable[[str], Folders], tmp_path: Path
) -> None:
    living = folders_of("living")
    kept = living.make("r.0.0", {}, None)
    dead = tmp_path / "work" / "dead" / "attempt"
    dead.mkdir(parents=True)
    folders_of("new")
    assert kept.work.exists()
    assert not dead.parent.exists()


def test_a_missing_agent_directory_is_named(folders_of: Callable[[str], Folders], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        folders_of("runner-1").make("r.0.0", {}, str(tmp_path / "nowhere"))


def test_a_folder_that_cannot_be_removed_costs_no_outcome(
    folders_of: Callable[[str], Folders], monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = folders_of("runner-1")
    folder = folders.make("r.0.0", {}, None)

    def broken(*_: object, **__: object) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    with monkeypatch.context() as patched:
        patched.setattr("services.runner.folder._remove", broken)
        folders.remove(folder)
    assert folder.root.exists()
