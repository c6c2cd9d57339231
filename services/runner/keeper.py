"""One process per attempt that starts the agent, bounds it, and leaves nothing of it behind.

Sits between runner and agent: `main` with the arguments ROOT LIFELINE_FD [LOCK_FD], standard library only, because 64
of these start at once. It reads its orders (`marshal`, see `process._orders_of`) from stdin, watches the lifeline (a
pipe whose other end only the runner holds: when the runner dies, even by SIGKILL, it closes), and writes one report to
stdout. It is a subreaper: children that daemonise or open a session of their own become its children and die with the
attempt. The lock it only holds open: it tells other runners that this attempt's user still has processes.
"""
# pathlib costs more start-up time than everything else here:
# ruff: noqa: PTH123, PTH208

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the public `signal` builds enums, a third of this process's start-up time
import ctypes
import fcntl
import marshal
import os
import resource
import select
import sys
import time

# `os.execvpe` imports it, behind walls that may hide the standard library.
import warnings  # noqa: F401

from services.runner import walls

if walls.TYPE_CHECKING:
    from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
SIGKILL, SIGTERM, SIGPIPE = 9, 15, 13
CHUNK_BYTES = 1 << 16
DRAIN_CHUNKS = 64
KILL_SECONDS = 10.0

_libc = ctypes.CDLL(None)


class Tail:
    """The last `limit` bytes of a stream that may be endless."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.kept = bytearray()
        self.total = 0

    def add(self, chunk: bytes) -> None:
        self.total += len(chunk)
        self.kept += chunk
        if len(self.kept) > 2 * self.limit:
            del self.kept[: -self.limit]

    def bytes(self) -> bytes:
        return bytes(self.kept[-self.limit :])


def become_subreaper() -> None:
    """Makes orphaned descendants children of this process instead of init's."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


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


def signal_all(pids: list[int], number: int) -> None:
    """Sends a signal to each process that still exists."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def oom_kills() -> int | None:
    """How many processes the kernel has ended for want of memory, of all cgroups; None where it does not tell."""
    try:
        with open("/proc/vmstat", "rb") as counts:
            return next((int(line.split()[1]) for line in counts if line.startswith(b"oom_kill ")), None)
    except OSError:
        return None


class Agent:
    """The agent's process tree, from its start to the death of its last descendant."""

    def __init__(self, orders: dict[str, Any]) -> None:
        self.stdout, stdout = os.pipe()
        self.stderr, stderr = os.pipe()
        failure, report = os.pipe()
        self.exit_code: int | None = None
        self.own_cpu_seconds = self.cpu_seconds = 0.0
        self.max_rss_bytes = 0
        self.user = orders["walls"]["user"] if orders["walls"]["own_user"] else None
        self._oom_kills = oom_kills()
        keeper = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _become_agent(orders, keeper, stdout, stderr, report)
        # Nobody may look into this process, as an agent of the same user else could where there is no Landlock.
        _libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        for descriptor in (stdout, stderr, report):
            os.close(descriptor)
        with os.fdopen(failure, "rb") as pipe:
            self.start_error = pipe.read().decode(errors="replace") or None

    def reap(self) -> bool:
        """Collects what has ended; true while any descendant lives."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            self.cpu_seconds += usage.ru_utime + usage.ru_stime
            self.max_rss_bytes = max(self.max_rss_bytes, usage.ru_maxrss * 1024)
            if pid == self.pid:
                self.exit_code = os.waitstatus_to_exitcode(status)
                self.own_cpu_seconds = usage.ru_utime + usage.ru_stime

    @property
    def lacked_memory(self) -> bool | None:
        """Whether the kernel ended anything for want of memory since the start; None where it does not tell."""
        return None if self._oom_kills is None else oom_kills() != self._oom_kills

    def kill(self) -> bool:
        """SIGKILLs descendants until none is left; false if one outlives `KILL_SECONDS` (it sleeps in the kernel)."""
        end = time.monotonic() + KILL_SECONDS
        while self.reap():
            if time.monotonic() > end:
                return False
            # Again and again: a descendant may have forked while its parent was being killed.
            if self.user is not None:
                _kill_user(*self.user)
            signal_all(descendants(os.getpid()), SIGKILL)
            time.sleep(0.001)
        return True


def _kill_user(uid: int, gid: int) -> None:
    """SIGKILLs every process of a user that only this attempt has."""
    try:
        pid = os.fork()
    except OSError:
        return
    if pid == 0:
        try:
            walls.become(uid, gid)
            walls.kill_all_of_this_user()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def _become_agent(orders: dict[str, Any], keeper: int, stdout: int, stderr: int, report: int) -> None:
    """In the forked child: bounds itself and becomes the agent; the pipe `report` closes then, or tells why not."""
    try:
        os.setsid()
        _be_the_first_to_go()
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        _signal.signal(SIGPIPE, _signal.SIG_DFL)
        os.umask(0o077)
        for number, soft, hard in orders["limits"]:
            resource.setrlimit(number, (soft, hard))
        walls.close_in(orders["walls"])
        # After the change of user, which clears it: the agent dies even if its keeper is killed.
        _libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
        if os.getppid() != keeper:
            os._exit(127)
        os.chdir(orders["folder"])
        os.execvpe(orders["command"][0], orders["command"], orders["environment"])  # noqa: S606
    except BaseException as error:  # noqa: BLE001  # nothing may return into the keeper's own code
        os.write(report, f"{orders['command'][0]}: {error}".encode(errors="replace")[:4096])
    os._exit(127)


def _be_the_first_to_go() -> None:
    """When memory is short, the kernel ends agents before anything of the platform."""
    try:
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")
    except OSError:
        return


def watch(agent: Agent, lifeline: int, orders: dict[str, Any], tails: dict[int, Tail]) -> dict[str, bool]:
    """Drains output until the agent ends, the time is over or the lifeline closes.

    Returns: which of `timed_out` and `abandoned` (the runner is gone or wants the attempt dead) came true.
    """
    poll = select.poll()
    ended = os.pidfd_open(agent.pid)
    for descriptor in (lifeline, ended, *tails):
        poll.register(descriptor, select.POLLIN)
    timed_out = False
    deadline = time.monotonic() + orders["timeout_seconds"]
    while True:
        remaining = deadline - time.monotonic()
        if remaining <= 0 and timed_out:
            return {"timed_out": True, "abandoned": False}
        if remaining <= 0:
            timed_out = True
            deadline = time.monotonic() + orders["grace_seconds"]
            signal_all(descendants(os.getpid()), SIGTERM)
            continue
        ready = {descriptor for descriptor, _ in poll.poll(remaining * 1000 + 1)}
        for descriptor in ready & tails.keys():
            chunk = os.read(descriptor, CHUNK_BYTES)
            tails[descriptor].add(chunk)
            if not chunk:
                poll.unregister(descriptor)
        if lifeline in ready:
            return {"timed_out": timed_out, "abandoned": True}
        if ended in ready:
            return {"timed_out": timed_out, "abandoned": False}


def drain(tails: dict[int, Tail]) -> None:
    """Reads what is left in the pipes of the dead, and no more: somebody else may have been handed the other end."""
    for descriptor, tail in tails.items():
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_NONBLOCK)
        try:
            for _ in range(DRAIN_CHUNKS):
                tail.add(os.read(descriptor, CHUNK_BYTES))
        except BlockingIOError:
            continue


def ignored_its_cpu_limit(agent: Agent, orders: dict[str, Any]) -> bool:
    """Whether the kernel killed the agent at the second bound of its CPU time."""
    bound = next((hard for number, _, hard in orders["limits"] if number == resource.RLIMIT_CPU), None)
    return bound is not None and agent.exit_code == -SIGKILL and agent.own_cpu_seconds > bound - 1


def main() -> None:
    """Runs one agent as ordered on stdin and reports on stdout."""
    lifeline, *_ = kept = [int(descriptor) for descriptor in sys.argv[2:]]
    for descriptor in kept:
        os.set_inheritable(descriptor, False)
    orders = marshal.loads(sys.stdin.buffer.read())  # noqa: S302  # from our own runner
    become_subreaper()
    started = time.monotonic()
    agent = Agent(orders)
    tails = {descriptor: Tail(orders["output_bytes"]) for descriptor in (agent.stdout, agent.stderr)}
    end = watch(agent, lifeline, orders, tails)
    clean = agent.kill()
    drain(tails)
    contained = agent.user is not None or walls.holds_signals(orders["walls"])
    report = {
        **end,
        "clean": clean,
        "exit_code": agent.exit_code,
        "start_error": agent.start_error,
        "seconds": time.monotonic() - started,
        "cpu_seconds": agent.cpu_seconds,
        "max_rss_bytes": agent.max_rss_bytes,
        "cpu_exceeded": ignored_its_cpu_limit(agent, orders),
        "lacked_memory": agent.lacked_memory,
        "contained": contained,
        "stdout": tails[agent.stdout].bytes(),
        "stderr": tails[agent.stderr].bytes(),
        "stdout_total": tails[agent.stdout].total,
        "stderr_total": tails[agent.stderr].total,
    }
    try:
        with open(1, "wb") as out:
            out.write(marshal.dumps(report))
    except BrokenPipeError:
        # The runner is gone; nobody is left to tell.
        os._exit(1)
    # Skips the interpreter's own shutdown: everything is written.
    os._exit(0)
