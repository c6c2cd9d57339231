"""The process backend: from a specification to orders, and from a report to an exit."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from leyden.libs.contracts.config import ProcessRunner
from leyden.libs.sandbox import supervisor
from leyden.libs.sandbox.ended import Ended, ended_of
from leyden.libs.sandbox.place import open_work_folder
from leyden.libs.sandbox.users import SandboxUser
from leyden.libs.service.errors import Misconfigured
from leyden.services.runner.backends.base import AttemptSpec, BackendError
from leyden.services.runner.backends.machine import NAMES, place_of, program_of
from leyden.services.runner.backends.process import ProcessBackend
from leyden.services.runner.settings import Settings

if TYPE_CHECKING:
    from leyden.libs.sandbox.supervisor import Report

STRANGER = SandboxUser(1_700_000_000)


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[ProcessBackend]:
    opened = ProcessBackend(_settings(tmp_path), "runner-1")
    yield opened
    await opened.close()
    assert list((tmp_path / "attempts").glob("runner-*")) == []


def _settings(folder: Path, **changes: Any) -> Settings:
    return Settings(agent_user="same", work_folder=folder / "attempts", agent_roots=(folder,), **changes)


def spec(*command: str, **changes: Any) -> AttemptSpec:
    values: dict[str, Any] = {
        "name": "r.0.0.1",
        "command": list(command),
        "environment": {"HOME": "/of/the/run", "OWN": "1", "LEYDEN_TASK_FILE": "forged"},
        "secrets": {"KEY": "signed"},
        "task": {"question": "Café?"},
        "directory": None,
        "limits": ProcessRunner(),
    }
    return AttemptSpec(**{**values, **changes})


async def test_an_agent_gets_its_variables_its_task_and_its_limits(backend: ProcessBackend) -> None:
    code = """
import json, os, resource
names = ("HOME", "OWN", "KEY", "TMPDIR", "USER")
limits = [resource.getrlimit(one) for one in (resource.RLIMIT_CPU, resource.RLIMIT_CORE)]
task = json.load(open(os.environ["LEYDEN_TASK_FILE"]))
print(json.dumps([[os.environ.get(name) for name in names], limits, task, os.listdir()]))
"""
    limits = ProcessRunner(cpu_seconds=7)
    ended = await backend.run(spec("{python}", "-S", "-E", "-c", code, limits=limits))
    assert (ended.exit_code, ended.stderr) == (0, b"")
    [home, own, key, scratch, user], bounds, task, files = json.loads(ended.stdout)
    assert (home, own, key, task, files) == ("/of/the/run", "1", "signed", {"question": "Café?"}, [])
    assert Path(scratch).name == "tmp"
    assert user is None
    assert bounds == [[7, 12], [0, 0]]


async def test_a_directory_is_copied_and_the_platforms_own_is_refused(tmp_path: Path, backend: ProcessBackend) -> None:
    agent = tmp_path / "agent"
    agent.mkdir()
    (agent / "run").write_text("#!/bin/sh\necho ran in $PWD\n")
    (agent / "run").chmod(0o755)
    ended = await backend.run(spec("./run", directory=str(agent)))
    assert ended.stdout.startswith(b"ran in " + os.fsencode(os.path.realpath(tmp_path / "attempts")))
    for private in (tmp_path, tmp_path / "attempts"):
        with pytest.raises(BackendError, match="belongs to the platform"):
            await backend.run(spec("true", directory=str(private)))


async def test_only_folders_below_the_operators_roots_are_copied(tmp_path: Path) -> None:
    roots, outside = tmp_path / "roots", tmp_path / "outside"
    for folder in (roots, outside):
        folder.mkdir()
    (roots / "link").symlink_to(outside)
    backend = ProcessBackend(_settings(tmp_path).model_copy(update={"agent_roots": (roots,)}), "runner-1")
    for folder in (Path("/etc"), outside, roots / "link", roots / ".." / "outside"):
        with pytest.raises(
            BackendError, match=rf"{folder.resolve()} lies in no folder of RUNNER_AGENT_ROOTS \({roots}"
        ):
            await backend.run(spec("true", directory=str(folder)))
    with pytest.raises(BackendError, match=r"agent.directory .*nowhere .*correct its path"):
        await backend.run(spec("true", directory=str(roots / "nowhere")))
    await backend.close()


async def test_cancelling_a_copy_removes_it(tmp_path: Path, backend: ProcessBackend) -> None:
    agent = tmp_path / "agent"
    agent.mkdir()
    with (agent / "large").open("wb") as file:
        file.truncate(2**30)
    running = asyncio.create_task(backend.run(spec("true", directory=str(agent))))
    copies = tmp_path / "attempts" / "runner-1"
    while not any(copies.rglob("large")):
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [path.name for path in copies.iterdir()] == [".lock"]


async def test_a_program_that_cannot_start_is_an_error_of_ours(backend: ProcessBackend) -> None:
    with pytest.raises(BackendError, match=r"the agent could not be started: no-such-program: .*No such file"):
        await backend.run(spec("no-such-program"))


async def test_a_check_names_an_interpreter_that_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # It would outlast this test.
    monkeypatch.setattr(supervisor, "become_subreaper", lambda: None)
    for python in (str(tmp_path / "nowhere"), "/bin/false"):
        backend = ProcessBackend(_settings(tmp_path, python=python), "runner-1")
        with pytest.raises(Misconfigured, match=f"agents cannot start RUNNER_PYTHON, {python}"):
            await backend.check()
        await backend.close()


def test_a_path_that_the_agents_user_cannot_reach_is_named_with_the_remedies(
    tmp_path: Path, backend: ProcessBackend
) -> None:
    script = tmp_path / "closed" / "agent"
    script.parent.mkdir(mode=0o700)
    script.touch()
    workspace = backend._programs._workspaces.make("r.0.0", {}, None)
    with pytest.raises(PermissionError, match="is closed to the user that the agent becomes: let other users pass"):
        backend._programs._orders(program_of(spec("/bin/sh", str(script))), workspace, STRANGER)
    assert (
        backend._programs._orders(program_of(spec("/bin/sh", str(script))), workspace, SandboxUser())["sandbox"]["uid"]
        is None
    )


def test_a_user_of_its_own_has_a_name_and_a_bound_on_its_processes(
    backend: ProcessBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend._programs, "_check_reachable", lambda *_: None)
    workspace = backend._programs._workspaces.make("r.0.0", {}, None)
    orders = backend._programs._orders(program_of(spec("/bin/sh")), workspace, STRANGER)
    assert orders["environment"]["USER"] == "agent"
    place = Path(orders["sandbox"]["visible"])
    view = orders["sandbox"]["view"]
    assert place == (Path(view["place"]) if view else workspace.root.resolve())
    assert orders["environment"]["LEYDEN_TASK_FILE"] == str(place / "task.json")
    assert orders["folder"] == str(place / "work")
    assert (resource.RLIMIT_NPROC, 512, 512) in orders["limits"]
    assert orders["sandbox"]["hidden"] == [os.path.realpath(workspace.root.parents[1])]


async def test_a_work_folder_unreachable_for_agents_is_replaced_by_a_reachable_one(
    tmp_path: Path, backend: ProcessBackend
) -> None:
    (tmp_path / "closed").mkdir(mode=0o700)
    backend._programs._place = place_of(Settings(work_folder=tmp_path / "closed" / "new" / "attempts"))
    assert backend._programs._work_folder() == tmp_path / "closed" / "new" / "attempts"
    backend._programs._users.first = 1_700_000_000
    assert backend._programs._work_folder() == open_work_folder()


def _report(**changes: Any) -> Report:
    values: dict[str, Any] = {
        "exit_code": 0,
        "start_error": None,
        "timed_out": False,
        "all_dead": True,
        "stdout": b"out",
        "stderr": b"err",
        "seconds": 1.0,
        "cpu_exceeded": False,
        "reward_line": b"",
        "memory_bytes": None,
        "lacked_memory": False,
    }
    return {**values, **changes}  # type: ignore[typeddict-item]


def exit_of(report: Report, *, contained: bool, lacked_room: bool = False) -> Ended:
    return ended_of(report, NAMES, contained=contained, lacked_room=lacked_room)


@pytest.mark.parametrize(
    ("code", "lacked_memory", "contained", "is_ours"),
    [
        (-signal.SIGKILL, True, True, True),
        (137, True, True, True),
        (137, False, True, False),
        (-signal.SIGKILL, None, True, True),
        # Another agent may have sent it.
        (-signal.SIGKILL, False, False, True),
        (-signal.SIGKILL, False, True, False),
        (-signal.SIGSEGV, True, False, False),
        (1, True, False, False),
    ],
)
def test_a_sigkill_is_the_agents_only_where_it_must_have_sent_it_itself(
    code: int, lacked_memory: bool | None, contained: bool, is_ours: bool
) -> None:
    ended = exit_of(_report(exit_code=code, lacked_memory=lacked_memory), contained=contained)
    assert (ended.platform_failure is not None) is is_ours
    for certain in ({"timed_out": True}, {"cpu_exceeded": True}):
        report = _report(exit_code=code, lacked_memory=lacked_memory, **certain)
        assert exit_of(report, contained=contained).platform_failure is None


def test_a_failure_on_a_disk_that_others_filled_is_the_platforms() -> None:
    assert exit_of(_report(exit_code=1), contained=True, lacked_room=True).platform_failure is not None
    for report in (_report(exit_code=0), _report(exit_code=1, timed_out=True)):
        assert exit_of(report, contained=True, lacked_room=True).platform_failure is None


def test_an_exit_carries_the_report() -> None:
    ended = exit_of(_report(exit_code=-9, cpu_exceeded=True), contained=True)
    assert (ended.exit_code, ended.stdout, ended.stderr) == (-9, b"out", b"err")
    assert ended.limit_exceeded == "the agent went on after its limit of CPU time"


def test_an_agent_killed_for_its_memory_is_reported_as_such() -> None:
    ended = exit_of(_report(exit_code=-9, memory_bytes=5 << 30, lacked_memory=True), contained=False)
    assert ended.limit_exceeded == "the agent used more memory than allowed (runner.memory_bytes): 5120 MiB"
    assert ended.platform_failure is None
