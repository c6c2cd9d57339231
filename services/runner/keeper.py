"""One process per attempt that starts the agent, bounds it, and leaves nothing of it behind.

Sits between runner and agent, standard library only, because 64 of these start at once. `main` is what they are forked
from: one process of a runner, with this code loaded and nothing of any attempt, that gets a message per attempt on
stdin, a socket, and ends when the runner does. The message carries descriptors: the keeper's orders (`marshal`, see
`process._orders_of`), where it is to write its one report, the lifeline (a pipe whose other end only the runner holds:
when the runner dies, even by SIGKILL, it closes), and perhaps a lock that it only holds open: it tells other runners
that this attempt's user still has processes. A keeper is a subreaper: children that daemonise or open a session of
their own become its children and die with the attempt.
"""
# pathlib costs more start-up time than everything else here:
# ruff: noqa: PTH123, PTH208

from __future__ import annotations

# The public modules build enums, and what is not there need not be forked.
import _signal  # type: ignore[import-not-found]
import _socket
import ctypes
import fcntl
import gc
import marshal
import os
import resource
import select
import struct
import time

# `os.execvpe` imports it, behind walls that may hide the standard library.
import warnings  # noqa: F401

from leyden.services.runner import walls

if walls.TYPE_CHECKING:
    from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
SIGKILL, SIGTERM, SIGPIPE, SIGCHLD = 9, 15, 13, 17
DESCRIPTORS = 4
STARTED = struct.Struct("i")
"""The answer to a message: the keeper's pid, with a pidfd beside it; or the number of the error, negative."""
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
        _libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
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
    """Forks a keeper for each message on stdin, until the runner is gone."""
    # Nobody may look into this process or into keepers, as an agent of the same user else could where there is no
    # Landlock.
    _libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    gc.freeze()
    gc.disable()
    runner, woken = _socket.socket(fileno=os.dup(0)), _woken_by_deaths()
    poll = select.poll()
    for descriptor in (runner.fileno(), woken):
        poll.register(descriptor, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == woken:
                os.read(woken, CHUNK_BYTES)
                _reap()
            else:
                _obey(runner)


def _woken_by_deaths() -> int:
    """A pipe that can be read when a child has ended."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    _signal.set_wakeup_fd(wake)
    _signal.signal(SIGCHLD, lambda *_: None)
    return woken


def _reap() -> None:
    """Buries keepers that have ended. Their CPU time, and that of what they kept, becomes this process's children's."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass
    except ChildProcessError:
        return


def _obey(runner: Any) -> None:
    """Forks the keeper that a message asks for; ends this process when the runner is gone."""
    message, ancillary, *_ = runner.recvmsg(1, _socket.CMSG_SPACE(DESCRIPTORS * STARTED.size))
    if not message:
        os._exit(0)
    descriptors = [number for _, _, packed in ancillary for (number,) in STARTED.iter_unpack(packed)]
    try:
        _answer(runner, descriptors)
    except BrokenPipeError:
        os._exit(0)
    for descriptor in descriptors:
        os.close(descriptor)


def _answer(runner: Any, descriptors: list[int]) -> None:
    try:
        pid = os.fork()
    except OSError as error:
        runner.send(STARTED.pack(-(error.errno or 1)))
        return
    if pid == 0:
        # Held by a keeper, it would look open when the process before this line is gone.
        runner.close()
        _keep(*descriptors)
    pidfd = os.pidfd_open(pid)
    runner.sendmsg([STARTED.pack(pid)], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, STARTED.pack(pidfd))])
    os.close(pidfd)


def _keep(orders: int, reports: int, *kept: int) -> NoReturn:
    """In the forked child: runs one agent as ordered and reports how it ended. Nothing returns from here."""
    try:
        _signal.set_wakeup_fd(-1)
        _signal.signal(SIGCHLD, _signal.SIG_DFL)
        os.setsid()
        os.dup2(orders, 0)
        os.dup2(reports, 1)
        for descriptor in (orders, reports):
            os.close(descriptor)
        for descriptor in kept:
            os.set_inheritable(descriptor, False)
        with open(0, "rb") as file:
            report = _kept(marshal.load(file), lifeline=kept[0])  # noqa: S302  # from our own runner
        with open(1, "wb") as out:
            out.write(marshal.dumps(report))
    finally:
        # Skips the interpreter's own end. Without a report the runner, if it is there, knows that something broke.
        os._exit(0)


def _kept(orders: dict[str, Any], *, lifeline: int) -> dict[str, Any]:
    """The report of one agent, which has ended with everything that it started."""
    become_subreaper()
    started = time.monotonic()
    agent = Agent(orders)
    tails = {descriptor: Tail(orders["output_bytes"]) for descriptor in (agent.stdout, agent.stderr)}
    end = watch(agent, lifeline, orders, tails)
    clean = agent.kill()
    drain(tails)
    contained = agent.user is not None or walls.holds_signals(orders["walls"])
    return {
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
