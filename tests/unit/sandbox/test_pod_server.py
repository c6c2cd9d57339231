"""The server in a pod that attempts share, as root on this machine: users, files, processes and the end of each."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from leyden.libs.sandbox import pod_server
from leyden.services.runner.backends.kubernetes import shared_pods
from tests.fakes.shared_pod import listens, serving
from tests.support.shared import free_port
from tests.support.waiting import eventually

MARKER = Path(f"/tmp/leyden-{os.getpid()}")
TOKEN = "of-this-pod"


@pytest.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[subprocess.Popen[bytes]]:
    port = free_port()
    monkeypatch.setattr(shared_pods, "PORT", port)
    values = {pod_server.TOKEN: TOKEN, pod_server.ATTEMPTS: "40", pod_server.IDLE_SECONDS: "60", "OF_IMAGE": "kept"}
    with serving(tmp_path, port, values) as process:
        await eventually(lambda: listens(port))
        yield process


def orders(script: str, **changes: Any) -> dict[str, Any]:
    return {
        **{"token": TOKEN, "command": ["/bin/sh", "-c", script], "environment": {"KEY": "own"}, "task": {"n": 1}},
        **{"task_on_stdin": False, "timeout_seconds": 120.0, "grace_seconds": 0.5, "output_bytes": 10_000},
        **{
            "memory_bytes": None,
            "memory_poll_seconds": 0.5,
            "max_open_files": 256,
            "max_file_bytes": None,
            "max_processes": 64,
        },
        **changes,
    }


async def attempt(script: str, **changes: Any) -> dict[str, Any]:
    return dict(await shared_pods._attempt("127.0.0.1", orders(script, **changes), lambda: None))


def tree(folder: Path) -> list[str]:
    return sorted(str(one.relative_to(folder)) for one in folder.rglob("*"))


async def test_an_attempt_has_a_user_a_folder_and_the_environment_of_its_image(server: Any) -> None:
    ended = await attempt('id -u; pwd; cat "$LEYDEN_TASK_FILE"; echo "$KEY $OF_IMAGE $LEYDEN_POD_TOKEN."; ls "$HOME"')
    uid, folder, *rest = ended["stdout"].decode().split("\n")
    assert (int(uid) >= pod_server.UIDS_FROM, folder, rest) == (True, "/", ['{"n": 1}own kept .', ""])
    assert (ended["exit_code"], ended["all_dead"]) == (0, True)


async def test_attempts_side_by_side_cannot_read_signal_or_inspect_each_other(server: Any) -> None:
    marker = MARKER.with_suffix(".first")
    until = 'while [ ! -e "$HOME/go" ]; do sleep 0.1; done'
    first = asyncio.create_task(attempt(f'echo secret >"$HOME/file"; echo $$ >{marker}; chmod 644 {marker}; {until}'))
    await eventually(lambda: marker.exists() and marker.read_text().strip())
    pid = int(marker.read_text())
    home = next(
        value.partition("=")[2]
        for value in Path(f"/proc/{pid}/environ").read_text().split("\0")
        if value.startswith("HOME=")
    )
    script = (
        f"cat {home}/file; ls {home}; cat /proc/{pid}/environ; kill -9 {pid}; rm -f {marker}; "
        f'echo x >>{marker}; tr "\\0" "\\n" </proc/{server.pid}/environ; cat {home}/../task.json'
    )
    second = await attempt(script)
    assert b"secret" not in second["stdout"]
    assert (b"own" in second["stdout"], TOKEN.encode() in second["stdout"]) == (False, False)
    assert marker.read_text() == f"{pid}\n"
    Path(home, "go").touch()
    assert (await first)["exit_code"] == 0


async def test_nothing_of_an_attempt_is_left_after_its_end(server: Any) -> None:
    script = (
        f"(setsid sleep 300 &) ; echo x >{MARKER}.left; mkdir -p {MARKER}.tree/a; chmod 000 {MARKER}.tree;"
        'cd "$HOME"; i=0; while [ $i -lt 1500 ]; do mkdir d && cd d || break; i=$((i+1)); done; id -u'
    )
    ended = await attempt(script)
    uid = int(ended["stdout"])
    assert [pid for pid in Path("/proc").glob("[0-9]*") if pid.exists() and pid.stat().st_uid == uid] == []
    assert not MARKER.with_suffix(".left").exists()
    assert not MARKER.with_suffix(".tree").exists()


SHARES = "mkdir -m 777 {0}; while [ ! -e {0}/b ]; do sleep 0.05; done; "


async def test_what_siblings_left_together_costs_the_pod_and_not_the_report(server: Any) -> None:
    """A folder with a sibling's file in it can be removed by neither."""
    shared = MARKER.with_suffix(".shared")
    joins = f"while ! mkdir {shared}/b; do sleep 0.05; done"
    try:
        first, _ = await asyncio.gather(attempt(SHARES.format(shared) + f"echo x >{MARKER}.zz; exit 3"), attempt(joins))
        assert (first["exit_code"], shared.name in (first["left"] or "")) == (3, True)
        # The others of its files are removed all the same.
        assert not MARKER.with_suffix(".zz").exists()
    finally:
        shutil.rmtree(shared)


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_cancelled_attempt_that_leaves_something_costs_the_pod(server: Any, leaves: bool) -> None:
    shared, lost = MARKER.with_suffix(".cancelled"), list[bool]()
    script = SHARES.format(shared) if leaves else f"mkdir -p -m 777 {shared}/b; echo x >{shared}/b/x; "
    sent = orders(script + f"echo x >{shared}/ready; sleep 300")
    running = asyncio.create_task(shared_pods._attempt("127.0.0.1", sent, lambda: lost.append(True)))
    if leaves:
        await attempt(f"while ! mkdir {shared}/b; do sleep 0.05; done")
    await eventually((shared / "ready").exists)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (lost, shared.exists()) == ([True] if leaves else [], leaves)
    shutil.rmtree(shared, ignore_errors=True)


def test_a_sweep_passes_over_files_that_siblings_remove_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("gone", "own"):
        (tmp_path / name).touch()
    found = list(os.scandir(tmp_path))
    (tmp_path / "gone").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(pod_server.os, "scandir", lambda _: found)
        assert [one.name for one in pod_server._entries(str(tmp_path), os.getuid())] == ["own"]


async def test_a_report_without_end_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The image's own python serves the pod."""
    sent = 0

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        with contextlib.suppress(OSError):
            while sent < 2**26:
                writer.write(bytes(2**16))
                await writer.drain()
                sent += 2**16
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
        monkeypatch.setattr(shared_pods, "PORT", listener.sockets[0].getsockname()[1])
        with pytest.raises(EOFError, match="more than"):
            await attempt("true")
    assert sent < 2**26


async def test_orders_that_trickle_keep_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_server, "ORDERS_SECONDS", 0.3)
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def trickle() -> None:
            with contextlib.suppress(OSError):
                for _ in range(40):
                    time.sleep(0.1)
                    theirs.send(b" ")

        sending = asyncio.create_task(asyncio.to_thread(trickle))
        with pytest.raises(TimeoutError):
            await asyncio.to_thread(pod_server._orders_of, ours, TOKEN)
        ours.close()
        await sending


async def test_a_closed_connection_ends_the_attempt(server: Any) -> None:
    marker = MARKER.with_suffix(".cancelled")
    running = asyncio.create_task(attempt(f"echo x >{marker}; sleep 300"))
    await eventually(marker.exists)
    uid = marker.stat().st_uid
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not marker.exists()
    assert [pid for pid in Path("/proc").glob("[0-9]*") if pid.exists() and pid.stat().st_uid == uid] == []


async def test_both_ends_ask_whether_the_others_node_is_still_there(server: Any) -> None:
    marker = MARKER.with_suffix(".silent")
    running = asyncio.create_task(attempt(f"echo x >{marker}; sleep 300"))
    await eventually(marker.exists)
    table = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    port = f":{shared_pods.PORT:04X}"
    # State 01 is an established connection; its timer 02 is that of keepalive.
    timers = [row[5][:2] for row in table if port in (row[1][-5:], row[2][-5:]) and row[3] == "01"]
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert timers == ["02", "02"]


async def test_a_killed_supervisor_takes_its_agent_with_it(server: Any) -> None:
    marker = MARKER.with_suffix(".orphan")
    running = asyncio.create_task(attempt(f"echo $PPID >{marker}; sleep 300"))
    await eventually(lambda: marker.exists() and marker.read_text().strip())
    os.kill(int(marker.read_text()), 9)
    with pytest.raises((EOFError, OSError)):
        await running
    await eventually(lambda: not list(Path("/var/tmp").glob(f"leyden-pod-{os.getpid()}-*/*")))
    assert not marker.exists()


async def test_limits_hold(server: Any) -> None:
    late, large = await asyncio.gather(
        attempt("sleep 300", timeout_seconds=0.5),
        attempt("exec python3 -c 'a = bytearray(200 << 20)\nwhile True: pass'", memory_bytes=100 << 20),
    )
    assert late["timed_out"]
    assert large["memory_bytes"] > 100 << 20


SHARING = """
import mmap, os, time
shared = mmap.mmap(-1, 60 << 20)
shared.write(b"x" * (60 << 20))
first = os.getpid()
for _ in range(3):
    if os.getpid() == first and os.fork() == 0:
        shared[:: mmap.PAGESIZE]
time.sleep(3)
"""


async def test_memory_that_processes_of_an_attempt_share_counts_once(server: Any) -> None:
    """The server lacks the right of root to look at other users' pages."""
    ended = await attempt("", command=["python3", "-S", "-c", SHARING], memory_bytes=150 << 20)
    assert (ended["exit_code"], ended["memory_bytes"]) == (0, None)


async def test_a_report_may_come_after_the_whole_grace_period(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.5)
        report = {"timed_out": True, "all_dead": True, "left": None, "stdout": "", "stderr": "", "reward_line": ""}
        writer.write(json.dumps(report).encode())
        writer.close()

    monkeypatch.setattr(shared_pods, "SPARE_SECONDS", 0.0)
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listener:
        monkeypatch.setattr(shared_pods, "PORT", listener.sockets[0].getsockname()[1])
        assert (await attempt("", timeout_seconds=0.0, grace_seconds=70.0))["timed_out"]
        with pytest.raises(TimeoutError):
            await attempt("", timeout_seconds=0.0, grace_seconds=0.0)


async def test_another_token_starts_nothing(server: Any) -> None:
    with pytest.raises(EOFError, match="another pod's"):
        await attempt("true", token="guessed")


async def test_more_attempts_than_the_pod_has_room_for_wait(server: Any) -> None:
    began = time.monotonic()
    ended = await asyncio.gather(*(attempt("sleep 0.2; id -u") for _ in range(100)))
    print(f"{len(ended) / (time.monotonic() - began):.0f} attempts a second")
    assert len({one["stdout"] for one in ended}) == 100


def test_agents_that_use_up_the_pods_processes_do_not_end_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fork)
    monkeypatch.setattr(pod_server, "is_inside", lambda *_: False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = pod_server.Server(listener, TOKEN, attempts=1, idle_seconds=0.5)
        with socket.create_connection(listener.getsockname()) as runner:
            server.run()
            runner.settimeout(10)
            assert runner.recv(1) == b""


def test_no_two_attempts_have_one_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_server, "UIDS", 3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = pod_server.Server(listener, TOKEN, attempts=3, idle_seconds=0.5)
        for pid in range(3):
            server._uids[pid] = server._free_uid()
            if pid == 1:
                del server._uids[0]
    assert len({*server._uids.values()}) == 2
    assert server._free_uid() not in server._uids.values()


def test_connections_from_inside_the_pod_are_refused() -> None:
    own = "::ffff:10.0.0.7"
    assert all(pod_server.is_inside(peer, own) for peer in (own, "127.0.0.1", "::ffff:127.0.0.1", "::1"))
    assert not pod_server.is_inside("::ffff:10.0.0.9", "::ffff:10.0.0.7")
