"""One process per attempt that starts the agent, bounds it, and leaves nothing of it behind.

The runner starts it with `python -I -S`, so it imports the standard library alone, and only the modules that load fast.
It reads its orders from stdin and writes one report to stdout, both as `marshal`. Stdout is a socket whose other end
only the runner holds: the stream from there ends when the runner dies, even by SIGKILL, or cancels the attempt.
With its orders comes perhaps the descriptor of a lock, which the supervisor holds open: other runners see by it that
this attempt's user still has processes. The supervisor is a subreaper: children that daemonise or open a session
of their own become its children and die with the attempt.
"""
# pathlib costs more start-up time than everything else here:
# ruff: noqa: PTH123, PTH208

from __future__ import annotations

import ctypes
import marshal
import math
import os
import resource
import select
import sys
import time

# `os.execvpe` imports it, and the sandbox may hide the standard library.
import warnings  # noqa: F401

# Relative: in its own process this file is no part of `leyden`.
from . import sandbox  # noqa: TID251
from .output import Output  # noqa: TID251

if sandbox.TYPE_CHECKING:
    from typing import TypedDict

    from .sandbox import Sandbox  # noqa: TID251

    class Orders(TypedDict):
        """One execution of an agent.

        `environment` is complete: the agent inherits nothing. `stdin` is the file that it reads as its stdin.
        `output_bytes` bounds what stays of stdout and of stderr.
        `memory_bytes` bounds the resident memory of all its processes, measured every `memory_poll_seconds`. `limits`
        are the arguments of `setrlimit`: number, soft, hard. Without a `sandbox` the program keeps its rights, as a
        client of a container engine must.
        """

        command: list[str]
        environment: dict[str, str]
        stdin: str
        folder: str
        timeout_seconds: float
        grace_seconds: float
        output_bytes: int
        memory_bytes: int | None
        memory_poll_seconds: float
        limits: list[tuple[int, int, int]]
        sandbox: Sandbox | None

    class Report(TypedDict):
        """The end of an agent.

        `exit_code` is negative for a signal. `start_error` says why the agent never started. `all_dead` is false where
        a process outlived SIGKILL, asleep in the kernel. `memory_bytes`: the supervisor killed an agent that used so
        much, more than it may. `cpu_exceeded`: the agent ignored SIGXCPU, and the kernel sent SIGKILL. `lacked_memory`:
        the kernel ended processes for want of memory meanwhile; None if it does not count.
        """

        exit_code: int | None
        start_error: str | None
        timed_out: bool
        all_dead: bool
        stdout: bytes
        stderr: bytes
        reward_line: bytes
        seconds: float
        memory_bytes: int | None
        cpu_exceeded: bool
        lacked_memory: bool | None


PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
# The module `signal` builds enums, which costs more than all else here.
SIG_DFL, SIGKILL, SIGTERM, SIGPIPE = 0, 9, 15, 13
STDOUT = 1
CHUNK_BYTES = 1 << 16
DRAIN_CHUNKS = 64
KILL_SECONDS = 10.0
MEMORY_POLL_SECONDS = 0.5
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_libc = ctypes.CDLL(None)


def become_subreaper() -> None:
    """Makes orphaned descendants children of this process instead of init's."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def be_undumpable() -> None:
    """Closes this process's memory and environment to other processes of its user."""
    _libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def parents() -> dict[int, int]:
    """Process id to parent's process id, of every process that /proc shows."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as stat:
                    found[int(name)] = int(stat.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError):
                continue
    return found


def descendants(ancestor: int) -> list[int]:
    """Every process below `ancestor`, parents before their children."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents().items():
        children.setdefault(parent, []).append(pid)
    found = list(children.get(ancestor, ()))
    for pid in found:
        found += children.get(pid, ())
    return found


def children(pid: int) -> list[int]:
    """The living children of a process, without a look at all others."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found += map(int, file.read().split())
    except OSError:
        # The process has ended.
        pass
    return found


def memory_of_descendants(limit: int, uid: int | None) -> int:
    """Returns resident bytes of all descendants. Above `limit` it measures again and counts each shared page once.

    Args: uid: their user; None for that of this process
    """
    pids = children(os.getpid())
    for pid in pids:
        pids += children(pid)
    size = sum(map(resident_bytes, pids))
    if size <= limit:
        return size
    if uid is not None:
        # In a pod root has no CAP_SYS_PTRACE, and without it the kernel shows pages to the user alone whose they are.
        # An agent cannot signal this process meanwhile, which changes the user of its look at files and no other.
        look_as(uid, uid)
    try:
        return sum(map(proportional_bytes, pids))
    finally:
        look_as(os.geteuid(), os.getegid())


def look_as(uid: int, gid: int) -> None:
    """Makes this process look at files as another user."""
    _libc.setfsgid(gid)
    _libc.setfsuid(uid)


def resident_bytes(pid: int) -> int:
    """Bytes of a process in memory; 0 once it has ended."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * PAGE_BYTES
    except (OSError, IndexError):
        return 0


def proportional_bytes(pid: int) -> int:
    """The same, with each shared page divided among its processes."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(b"Pss:"))
    except (OSError, StopIteration):
        return resident_bytes(pid)


def signal_all(pids: list[int], number: int) -> None:
    """Sends a signal to each process that still exists."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def oom_kills() -> int | None:
    """The number of processes of this machine that the kernel ended for want of memory; None if it does not count."""
    try:
        with open("/proc/vmstat", "rb") as counts:
            return next((int(line.split()[1]) for line in counts if line.startswith(b"oom_kill ")), None)
    except OSError:
        return None


class Agent:
    """The agent's process tree, from its start to the death of its last descendant."""

    def __init__(self, orders: Orders) -> None:
        self.stdout, stdout = os.pipe()
        self.stderr, stderr = os.pipe()
        failure, report = os.pipe()
        self.exit_code: int | None = None
        self.cpu_seconds = 0.0
        self.exceeded_bytes: int | None = None
        self.uid = orders["sandbox"] and orders["sandbox"]["uid"]
        supervisor = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _become_agent(orders, supervisor, stdout, stderr, report)
        for descriptor in (stdout, stderr, report):
            os.close(descriptor)
        with os.fdopen(failure, "rb") as pipe:
            self.start_error = pipe.read().decode(errors="replace") or None

    def reap(self) -> bool:
        """Collects the dead; true while any descendant lives."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.pid:
                self.exit_code = os.waitstatus_to_exitcode(status)
                self.cpu_seconds = usage.ru_utime + usage.ru_stime

    def kill(self) -> bool:
        """SIGKILLs descendants until none is left; false if one outlives `KILL_SECONDS` (it sleeps in the kernel)."""
        end = time.monotonic() + KILL_SECONDS
        while self.reap():
            if time.monotonic() > end:
                return False
            # Again and again: a descendant may have forked while its parent was being killed.
            if self.uid is not None:
                _kill_user(self.uid)
            signal_all(descendants(os.getpid()), SIGKILL)
            time.sleep(0.001)
        return True


def _kill_user(uid: int) -> None:
    """SIGKILLs every process of a user that only this attempt has."""
    try:
        pid = os.fork()
    except OSError:
        return
    if pid == 0:
        try:
            sandbox.become(uid)
            sandbox.kill_all_of_this_user()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def _become_agent(orders: Orders, supervisor: int, stdout: int, stderr: int, report: int) -> None:
    """Bounds the forked child and makes it the agent. The pipe `report` closes then, or carries the reason why not."""
    try:
        os.setsid()
        _libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        _prefer_for_oom_kill()
        os.dup2(os.open(orders["stdin"], os.O_RDONLY), 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        _libc.signal(SIGPIPE, ctypes.c_void_p(SIG_DFL))
        os.umask(0o077)
        for number, soft, hard in orders["limits"]:
            resource.setrlimit(number, (soft, hard))
        if orders["sandbox"] is not None:
            sandbox.enter(orders["sandbox"])
        # After the change of user, which clears it: the agent dies even if its supervisor is killed.
        _libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
        if os.getppid() != supervisor:
            os._exit(127)
        os.chdir(orders["folder"])
        os.execvpe(orders["command"][0], orders["command"], orders["environment"])  # noqa: S606
    except BaseException as error:  # noqa: BLE001  # nothing may return into the supervisor's own code
        os.write(report, f"{orders['command'][0]}: {error}".encode(errors="replace")[:4096])
    os._exit(127)


def _prefer_for_oom_kill() -> None:
    """When memory is short, the kernel ends agents before anything of the platform."""
    try:
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")
    except OSError:
        return


def watch(agent: Agent, orders: Orders, outputs: dict[int, Output]) -> bool:
    """Drains output until the agent ends, time or memory is over, or the runner died or cancelled.

    Returns: whether the agent ran into its timeout
    """
    poll = select.poll()
    ended = os.pidfd_open(agent.pid)
    for descriptor in (STDOUT, ended, *outputs):
        poll.register(descriptor, select.POLLIN)
    timed_out = False
    limit, pause = orders["memory_bytes"] or sys.maxsize, orders["memory_poll_seconds"]
    deadline = time.monotonic() + orders["timeout_seconds"]
    next_poll = time.monotonic() + pause
    while True:
        now = time.monotonic()
        remaining = deadline - now
        if remaining <= 0 and timed_out:
            return True
        if remaining <= 0:
            timed_out = True
            deadline = time.monotonic() + orders["grace_seconds"]
            signal_all(descendants(os.getpid()), SIGTERM)
            continue
        if now >= next_poll:
            next_poll = now + pause
            if (used := memory_of_descendants(limit, agent.uid)) > limit:
                agent.exceeded_bytes = used
                return timed_out
        ready = {descriptor for descriptor, _ in poll.poll(min(remaining, next_poll - now) * 1000 + 1)}
        for descriptor in ready & outputs.keys():
            if not read(descriptor, outputs[descriptor], orders["output_bytes"]):
                poll.unregister(descriptor)
        if STDOUT in ready or ended in ready:
            return timed_out


def read(descriptor: int, output: Output, limit: int) -> bool:
    """Adds a chunk to the output; false at its end."""
    chunk = os.read(descriptor, CHUNK_BYTES)
    output.add(chunk, limit)
    return bool(chunk)


def drain(outputs: dict[int, Output], limit: int) -> None:
    """Reads the rest from the pipes of the dead, and stops there: a stranger may have been handed the other end."""
    for descriptor, output in outputs.items():
        os.set_blocking(descriptor, False)
        try:
            for _ in range(DRAIN_CHUNKS):
                read(descriptor, output, limit)
        except BlockingIOError:
            continue


def supervise(orders: Orders) -> Report:
    """Runs one agent. When this returns, the agent and everything that it started are dead."""
    started, oom_kills_before, limit = time.monotonic(), oom_kills(), orders["output_bytes"]
    agent = Agent(orders)
    outputs = {agent.stdout: Output(), agent.stderr: Output()}
    timed_out = watch(agent, orders, outputs)
    all_dead = agent.kill()
    drain(outputs, limit)
    cpu_bound = next((hard for number, _, hard in orders["limits"] if number == resource.RLIMIT_CPU), math.inf)
    return {
        "exit_code": agent.exit_code,
        "start_error": agent.start_error,
        "timed_out": timed_out,
        "all_dead": all_dead,
        "stdout": outputs[agent.stdout].last(limit),
        "stderr": outputs[agent.stderr].last(limit),
        "reward_line": outputs[agent.stdout].reward_line(),
        "seconds": time.monotonic() - started,
        "memory_bytes": agent.exceeded_bytes,
        "cpu_exceeded": agent.exit_code == -SIGKILL and agent.cpu_seconds > cpu_bound - 1,
        "lacked_memory": None if oom_kills_before is None else oom_kills() != oom_kills_before,
    }


def main() -> None:
    """Supervises one agent as ordered on stdin and reports on stdout."""
    # Without Landlock, agents of the same user could inspect this process, which knows their neighbour's key.
    be_undumpable()
    become_subreaper()
    try:
        orders, lock = marshal.loads(sys.stdin.buffer.read())  # noqa: S302  # from our own runner
        if lock is not None:
            os.set_inheritable(lock, False)
        report = marshal.dumps(dict(supervise(orders)))
        with open(STDOUT, "wb") as out:
            out.write(report)
    finally:
        # Skips the interpreter's shutdown. Without a report the runner, if it lives, knows that something broke.
        os._exit(0)
