from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from leyden.libs.sandbox.workspace import AgentFolder, MoreFiles, Workspaces, others_filled_disk, remove_tree
from leyden.libs.service.errors import Misconfigured
from leyden.services.runner.backends.machine import NAMES

WORK_FOLDER = "RUNNER_WORK_FOLDER"


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
        yield lambda owner: stack.enter_context(closing(Workspaces(tmp_path / "work", owner, WORK_FOLDER)))


@contextmanager
def agent_folder(folder: Path, max_bytes: int = 2**20) -> Iterator[AgentFolder]:
    descriptor = os.open(folder, os.O_RDONLY)
    yield AgentFolder(descriptor, max_bytes, threading.Event(), NAMES)
    os.close(descriptor)


def test_an_attempt_gets_a_private_fresh_copy(workspaces_of: Callable[[str], Workspaces], agent: Path) -> None:
    workspaces = workspaces_of("runner-1")
    (agent / "agent.py").chmod(0o4755)
    os.utime(agent / "agent.py", (1, 2))
    with agent_folder(agent) as folder:
        first, second = (workspaces.make("r.0.0", {"question": "Café"}, folder) for _ in range(2))
    assert first.work != second.work
    assert sorted(path.name for path in first.work.rglob("*")) == ["agent.py", "lib", "more.py"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in (first.root, first.work, first.scratch)} == {0o700}
    assert json.loads(first.task_file.read_text()) == {"question": "Café"}
    copied = (first.work / "agent.py").stat()
    assert (stat.S_IMODE(copied.st_mode), copied.st_mtime) == (0o755, 2)
    (first.work / "agent.py").write_text("changed")
    assert (second.work / "agent.py").read_text() == (agent / "agent.py").read_text() == "print()"


def test_a_task_file_replaces_the_agents_and_follows_no_link(
    workspaces_of: Callable[[str], Workspaces], agent: Path, tmp_path: Path
) -> None:
    workspaces, outside = workspaces_of("runner-1"), tmp_path / "outside"
    outside.write_text("untouched")
    (agent / "link.json").symlink_to(outside)
    with agent_folder(agent) as folder:
        for name in ("agent.py", "link.json"):
            made = workspaces.make("r.0.0", {"question": "Café"}, folder, None, MoreFiles(name))
            assert json.loads((made.work / name).read_text()) == {"question": "Café"}
        with pytest.raises(OSError, match="lib"):
            workspaces.make("r.0.0", {}, folder, None, MoreFiles("lib"))
    assert outside.read_text() == "untouched"


def test_removing_a_workspace_removes_read_only_files(tmp_path: Path) -> None:
    workspaces = Workspaces(tmp_path / "work", "runner-1", WORK_FOLDER)
    folder = workspaces.make("r.0.0", {}, None)
    (folder.work / "deep" / "er").mkdir(parents=True)
    (folder.work / "deep" / "er" / "file").write_text("x")
    for path in (folder.work / "deep" / "er", folder.work / "deep", folder.work):
        path.chmod(0o500)
    remove_tree(folder.root)
    assert not folder.root.exists()
    workspaces.close()
    assert not workspaces.root.exists()


def test_a_new_runner_removes_workspaces_of_dead_runners_only(
    workspaces_of: Callable[[str], Workspaces], tmp_path: Path
) -> None:
    living = workspaces_of("living")
    alive = living.make("r.0.0", {}, None)
    dead = tmp_path / "work" / "dead" / "attempt"
    dead.mkdir(parents=True)
    (dead.parent / ".lock").touch()
    workspaces_of("new")
    assert alive.work.exists()
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
            Workspaces(tmp_path / parent, "runner-1", WORK_FOLDER)


def test_removing_follows_no_link_and_needs_no_stack(
    workspaces_of: Callable[[str], Workspaces], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("x")
    workspaces = workspaces_of("runner-1")
    folder = workspaces.make("r.0.0", {}, None)
    (folder.work / "link").symlink_to(outside)
    shutil.rmtree(folder.scratch)
    folder.scratch.symlink_to(outside)
    monkeypatch.chdir(folder.work)
    for _ in range(2000):
        os.mkdir("deep")  # noqa: PTH102  # a path this long has no name from the root
        os.chdir("deep")
    monkeypatch.chdir(tmp_path)
    remove_tree(folder.root)
    assert not folder.root.exists()
    folder.root.symlink_to(outside)
    remove_tree(folder.root)
    assert not folder.root.is_symlink()
    assert (outside / "file").read_text() == "x"


def test_an_attempt_of_another_user_owns_its_folders_but_not_their_parent(
    workspaces_of: Callable[[str], Workspaces], agent: Path
) -> None:
    # Only root may give files away.
    uid = 12345 if os.geteuid() == 0 else os.geteuid()
    with agent_folder(agent) as source:
        folder = workspaces_of("runner-1").make("r.0.0", {}, source, uid)
    inside = [folder.work, folder.scratch, folder.task_file, *folder.work.rglob("*")]
    assert {(path.stat().st_uid, path.stat().st_gid) for path in inside} == {(uid, uid)}
    root = folder.root.stat()
    assert (root.st_uid, root.st_gid, stat.S_IMODE(root.st_mode)) == (os.geteuid(), uid, 0o710)
    assert stat.S_IMODE(folder.task_file.stat().st_mode) == 0o600


def test_a_link_is_copied_as_a_link_and_never_followed(
    workspaces_of: Callable[[str], Workspaces], agent: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "shadow").write_text("secret")
    for name, target in {"file": outside / "shadow", "folder": outside, "lost": Path("nowhere")}.items():
        (agent / name).symlink_to(target)
    with agent_folder(agent) as source:
        work = workspaces_of("runner-1").make("r.0.0", {}, source).work
    assert (work / "file").readlink() == outside / "shadow"
    assert (work / "folder").readlink() == outside
    assert (work / "lost").readlink() == Path("nowhere")


def test_a_file_that_may_have_no_end_is_refused_by_name(
    workspaces_of: Callable[[str], Workspaces], agent: Path
) -> None:
    os.mkfifo(agent / "lib" / "endless")
    workspaces = workspaces_of("runner-1")
    with agent_folder(agent) as source, pytest.raises(OSError, match=r"lib/endless is no regular file: remove it"):
        workspaces.make("r.0.0", {}, source)
    assert [path.name for path in workspaces.root.iterdir()] == [".lock"]


@pytest.mark.parametrize("sizes", [[70_000], [20_000] * 4, [0] * 20])
def test_a_folder_that_is_too_large_is_refused(
    workspaces_of: Callable[[str], Workspaces], agent: Path, sizes: list[int]
) -> None:
    for number, size in enumerate(sizes):
        with (agent / f"{number}").open("wb") as file:
            file.truncate(size)
    with agent_folder(agent, 2**16) as source, pytest.raises(OSError, match="more than 65536 bytes"):
        workspaces_of("runner-1").make("r.0.0", {}, source)


def test_a_folder_that_cannot_be_removed_costs_no_outcome(
    workspaces_of: Callable[[str], Workspaces], monkeypatch: pytest.MonkeyPatch
) -> None:
    workspaces = workspaces_of("runner-1")
    folder = workspaces.make("r.0.0", {}, None)
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "run", lambda *_, **__: None)
        remove_tree(folder.root)
    assert folder.root.exists()


@pytest.mark.parametrize(
    ("free_blocks", "free_files", "own_bytes", "is_ours"),
    [(16, 9, 0, False), (15, 9, 0, True), (500, 0, 0, True), (15, 9, 3 << 20, False)],
)
def test_a_disk_is_filled_by_others_where_less_than_half_of_it_is_the_attempts_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_blocks: int, free_files: int, own_bytes: int, is_ours: bool
) -> None:
    (tmp_path / "notes").write_bytes(bytes(own_bytes))
    # A disk of 4 MiB in blocks of 4 KiB.
    disk = os.statvfs_result((4096, 4096, 1024, free_blocks, free_blocks, 99, free_files, free_files, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    assert others_filled_disk(tmp_path) is is_ours
