from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from leyden.libs.service.errors import Misconfigured
from leyden.services.runner.backends.process.workspace import Workspaces, remove_tree


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    folder = tmp_path / "agent"
    (folder / "lib").mkdir(parents=True)
    (folder / "agent.py").write_text("print()")
    (folder / "lib" / "more.py").write_text("")
    return folder


@pytest.fixture
def workspaces_of(tmp_path: Path) -> Iterator[Callable[[str], Workspaces]]:
    with ExitStack() as stack:
        yield lambda owner: stack.enter_context(closing(Workspaces(tmp_path / "work", owner)))


def test_an_attempt_gets_a_private_fresh_copy(workspaces_of: Callable[[str], Workspaces], agent: Path) -> None:
    workspaces = workspaces_of("runner-1")
    first, second = (workspaces.make("r.0.0", {"question": "Café"}, str(agent)) for _ in range(2))
    assert first.work != second.work
    assert sorted(path.name for path in first.work.rglob("*")) == ["agent.py", "lib", "more.py"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in (first.root, first.work, first.scratch)} == {0o700}
    assert json.loads(first.task_file.read_text()) == {"question": "Café"}
    (first.work / "agent.py").write_text("changed")
    assert (second.work / "agent.py").read_text() == (agent / "agent.py").read_text() == "print()"


def test_removing_takes_what_the_agent_made_read_only(tmp_path: Path) -> None:
    workspaces = Workspaces(tmp_path / "work", "runner-1")
    folder = workspaces.make("r.0.0", {}, None)
    (folder.work / "deep" / "er").mkdir(parents=True)
    (folder.work / "deep" / "er" / "file").write_text("x")
    for path in (folder.work / "deep" / "er", folder.work / "deep", folder.work):
        path.chmod(0o500)
    remove_tree(folder.root)
    assert not folder.root.exists()
    workspaces.close()
    assert not workspaces.root.exists()


def test_a_new_runner_removes_what_a_dead_one_left_and_nothing_of_a_living_one(
    workspaces_of: Callable[[str], Workspaces], tmp_path: Path
) -> None:
    living = workspaces_of("living")
    kept = living.make("r.0.0", {}, None)
    dead = tmp_path / "work" / "dead" / "attempt"
    dead.mkdir(parents=True)
    (dead.parent / ".lock").touch()
    workspaces_of("new")
    assert kept.work.exists()
    assert not dead.parent.exists()


def test_what_is_not_a_runners_is_never_removed(workspaces_of: Callable[[str], Workspaces], tmp_path: Path) -> None:
    letters = tmp_path / "work" / "letters"
    letters.mkdir(parents=True)
    (letters / "one").write_text("dear")
    workspaces_of("new")
    assert (letters / "one").read_text() == "dear"


def test_a_parent_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    for parent in ("open", "link"):
        with pytest.raises(Misconfigured, match="set RUNNER_WORK_FOLDER"):
            Workspaces(tmp_path / parent, "runner-1")


def test_removing_follows_no_link_and_needs_no_stack(
    workspaces_of: Callable[[str], Workspaces], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("x")
    workspaces = workspaces_of("runner-1")
    folder = workspaces.make("r.0.0", {}, None)
    (folder.work / "link").symlink_to(kept)
    shutil.rmtree(folder.scratch)
    folder.scratch.symlink_to(kept)
    monkeypatch.chdir(folder.work)
    for _ in range(2000):
        os.mkdir("deep")  # noqa: PTH102  # a path this long has no name from the root
        os.chdir("deep")
    monkeypatch.chdir(tmp_path)
    remove_tree(folder.root)
    assert not folder.root.exists()
    folder.root.symlink_to(kept)
    remove_tree(folder.root)
    assert not folder.root.is_symlink()
    assert (kept / "file").read_text() == "x"


def test_an_attempt_of_another_user_owns_its_folders_but_not_their_parent(
    workspaces_of: Callable[[str], Workspaces], agent: Path
) -> None:
    # Only root may give files away.
    uid = 12345 if os.geteuid() == 0 else os.geteuid()
    folder = workspaces_of("runner-1").make("r.0.0", {}, str(agent), uid)
    inside = [folder.work, folder.scratch, folder.task_file, *folder.work.rglob("*")]
    assert {(path.stat().st_uid, path.stat().st_gid) for path in inside} == {(uid, uid)}
    root = folder.root.stat()
    assert (root.st_uid, root.st_gid, stat.S_IMODE(root.st_mode)) == (os.geteuid(), uid, 0o710)
    assert stat.S_IMODE(folder.task_file.stat().st_mode) == 0o600


def test_a_missing_agent_directory_is_named(workspaces_of: Callable[[str], Workspaces], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        workspaces_of("runner-1").make("r.0.0", {}, str(tmp_path / "nowhere"))


def test_a_folder_that_cannot_be_removed_costs_no_outcome(
    workspaces_of: Callable[[str], Workspaces], monkeypatch: pytest.MonkeyPatch
) -> None:
    workspaces = workspaces_of("runner-1")
    folder = workspaces.make("r.0.0", {}, None)
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "run", lambda *_, **__: None)
        remove_tree(folder.root)
    assert folder.root.exists()
