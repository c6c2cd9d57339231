"""A program's view of the machine: its workspace at one path, a /tmp of its own, and nothing of it left."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog

from leyden.libs.sandbox import mounts, programs
from leyden.libs.sandbox.mounts import paths_in_covered, place_of_workspaces, rights_to_show, texts_with_paths
from leyden.libs.sandbox.place import Place
from leyden.libs.sandbox.program import Program
from leyden.libs.sandbox.programs import Programs
from leyden.libs.sandbox.view import SHM_BYTES
from leyden.services.runner.backends.machine import NAMES

TMP = Path("/tmp")
MEMORY_BYTES = 100 << 20
REPORTS = """
import json, os, sys, time
meeting = os.environ["MEETING"]
print(json.dumps({
    "uid": os.getuid(),
    "cwd": os.getcwd(),
    "home": os.environ["HOME"],
    "task": json.load(open(os.environ["LEYDEN_TASK_FILE"])),
    "rights": [line.split()[1] for line in open("/proc/self/status") if line.startswith("CapEff")],
}))
open("/tmp/mine", "x").write(sys.argv[1])
open(os.environ["TMPDIR"] + "/also", "x")
for folder in ("/var/tmp", "/dev/shm"):
    open(f"{folder}/mine-of-a-test", "x").write(sys.argv[1])
open(f"{meeting}/{sys.argv[1]}", "x")
while len(os.listdir(meeting)) < int(sys.argv[2]): time.sleep(0.005)
print(json.dumps([sorted(os.listdir("/tmp")), open("/tmp/mine").read()]))
others = "/var/tmp", "/dev/shm"
print(json.dumps([[os.listdir(folder), open(f"{folder}/mine-of-a-test").read()] for folder in others]))
room = os.statvfs("/dev/shm")
print(json.dumps([room.f_blocks * room.f_frsize, os.stat("/dev/shm").st_mode & 0o7777]))
try:
    open("/new", "x")
except OSError as error:
    print(json.dumps(error.errno))
"""


@pytest.fixture
def attempts() -> Iterator[Path]:
    """A work folder where it usually is: one in /tmp would close /tmp itself to programs."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)


@asynccontextmanager
async def opened(attempts: Path) -> AsyncIterator[Programs]:
    """Programs that leave nothing."""
    ran = Programs(Place(names=NAMES, work_folder=attempts, user="same"), "runner-1")
    try:
        yield ran
    finally:
        await ran.close()
    assert sorted(path.name for path in attempts.rglob("*")) == [".starting", "attempt"]


def needs(tmp_path: Path, rights: mounts.Rights) -> None:
    """Skips where the machine does not give these rights."""
    room, folder = tmp_path / "room", tmp_path / "folder"
    room.mkdir()
    folder.mkdir()
    view = mounts.view_of(folder, folder, folder, None, mounts.WORK, (), room, rights)
    if not mounts.is_shown(view):
        pytest.skip(f"this machine gives no view by {rights}")


def program(name: str, code: str, *words: str, memory: int | None = MEMORY_BYTES, **environment: str) -> Program:
    """A program in Python, whose task is its first word."""
    command = [sys.executable, "-S", "-E", "-c", code, *words]
    task = {"task": next(iter(words), None)}
    return Program(name, command, environment, task, "LEYDEN_TASK_FILE", 60.0, 10_000, memory_bytes=memory)


async def reports(ran: Programs, meeting: Path, *names: str) -> list[list[Any]]:
    """The lines that programs print which run at the same time."""
    meeting.mkdir()
    memory = {"a": MEMORY_BYTES, "b": None}
    asked = [
        program(f"r.0.{name}", REPORTS, name, str(len(names)), memory=memory.get(name), MEETING=str(meeting))
        for name in names
    ]
    ended = await asyncio.gather(*map(ran.run, asked))
    assert [one.exit_code for one in ended] == [0] * len(names), [one.stderr for one in ended]
    return [[json.loads(line) for line in one.stdout.splitlines()] for one in ended]


@pytest.mark.parametrize("rights", ["mounts", "user"])
async def test_programs_at_once_find_their_files_at_one_path_and_not_each_others_in_tmp(
    tmp_path: Path, attempts: Path, rights: mounts.Rights
) -> None:
    needs(tmp_path, rights)
    meeting = tmp_path / "meeting"
    async with opened(attempts) as ran:
        ran._rights, ran._seen_at = rights, Path("/work-of-a-test")
        printed = await reports(ran, meeting, "a", "b")
    for name, (facts, (names, mine), others, shared_memory, error) in zip("ab", printed, strict=True):
        assert facts == {
            "uid": os.getuid(),
            "cwd": "/work-of-a-test/work",
            "home": "/work-of-a-test/work",
            "task": {"task": name},
            "rights": ["0000000000000000"],
        }
        # Its own files, and the folder that its variable names.
        seen = {Path(path).name for path in paths_in_covered([str(meeting)]) if Path(path).parent == TMP}
        assert (names, mine) == (sorted({"mine", "also", *seen}), name)
        assert others == [[["mine-of-a-test"], name]] * 2
        assert shared_memory == [MEMORY_BYTES if name == "a" else SHM_BYTES, 0o1777]
        assert error in {errno.EACCES, errno.EROFS}
    assert not (TMP / "mine").exists()
    assert not any(Path(folder, "mine-of-a-test").exists() for folder in ("/var/tmp", "/dev/shm"))


async def test_a_program_on_a_machine_with_such_a_folder_finds_its_files_at_another(
    tmp_path: Path, attempts: Path
) -> None:
    needs(tmp_path, "user")
    room = attempts / "attempt"
    assert place_of_workspaces(room, work=tmp_path) == room
    assert place_of_workspaces(room, work=tmp_path / "none") == tmp_path / "none"
    above = "import os\nabove = os.path.dirname(os.path.dirname(os.environ['HOME']))\n"
    above += "print(above, oct(os.stat(above).st_mode), flush=True)\nopen(above + '/made', 'w')"
    usual = os.umask(0o077)
    try:
        async with opened(attempts) as ran:
            ran._seen_at = room
            [(facts, *_)] = await reports(ran, tmp_path / "meeting", "a")
            written = await ran.run(program("r.0.above", above))
    finally:
        os.umask(usual)
    assert (facts["cwd"], facts["home"]) == (f"{room}/work", f"{room}/work")
    assert written.stdout == f"{attempts} 0o40755\n".encode()
    assert f"[Errno {errno.EROFS}]".encode() in written.stderr


async def test_without_the_right_programs_run_where_their_files_are_and_the_log_says_so_once(
    attempts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "rights_to_show", lambda *_, **__: None)
    with structlog.testing.capture_logs() as logs:
        async with opened(attempts) as ran:
            asked = [program(f"r.0.{number}", "import os; print(os.getcwd())") for number in range(2)]
            ended = [await ran.run(one) for one in asked]
    assert len([log for log in logs if log["event"].startswith("agents share /tmp")]) == 1
    assert ended[0].stdout != ended[1].stdout
    assert [one.stdout.decode().startswith(f"{attempts}/runner-1/r.0.") for one in ended] == [True] * 2


def test_a_kernel_that_refuses_gives_no_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "is_shown", lambda view: view["as_user"])
    assert rights_to_show(tmp_path, tmp_path, own_users=False) == "user"
    # Nobody else is known there.
    assert rights_to_show(tmp_path, tmp_path, own_users=True) is None
    monkeypatch.setattr(mounts, "is_shown", lambda view: False)
    assert rights_to_show(tmp_path, tmp_path, own_users=False) is None


def test_of_folders_of_all_users_a_program_sees_what_its_command_and_variables_name(tmp_path: Path) -> None:
    top = tmp_path.parts[2] if tmp_path.is_relative_to(TMP) else None
    if top is None:
        pytest.skip("TMPDIR is not /tmp")
    for text in (f"{tmp_path}", f"cd {tmp_path}; ls", f"--file={tmp_path}/x", f"/usr/bin:{tmp_path}"):
        assert paths_in_covered([text]) == [f"/tmp/{top}"]
    assert paths_in_covered(["/tmp", "/tmp/", "/tmp/..", "/tmp/no-such-name", f"x{tmp_path}", "/usr/bin"]) == []
    with tempfile.NamedTemporaryFile(dir="/var/tmp") as one, tempfile.NamedTemporaryFile(dir="/dev/shm") as two:
        assert paths_in_covered([f"cat {one.name} {two.name}/x"]) == [two.name, one.name]
        # Another folder beside its own workspace in one variable.
        assert paths_in_covered([f"{two.name}/files:{one.name}"], but=two.name) == [one.name]
        assert paths_in_covered([f"cat {two.name}/a b/x {one.name}"], but=f"{two.name}/a b") == [one.name]
        assert paths_in_covered([f"{two.name}/a", f"{two.name}-"], but=two.name[:-1]) == [two.name]
    # The text of a task names files that it wants made.
    variables = {"PATH": "/usr/bin", "LEYDEN_TASK": f'{{"question": "write {tmp_path}"}}'}
    assert texts_with_paths(["a", "b"], variables) == ["a", "b", "/usr/bin"]
