"""Serves the attempts of one run inside their shared pod: one connection for each, as user of its own.

The runner sends the orders as a line of JSON, and the connection is the attempt's life: it carries the report back, and
its end kills the attempt. A forked supervisor serves it; before the report, nothing of the attempt is left, neither a
process nor a file. The pod's image needs Python 3.11; `python -m leyden.libs.sandbox.pod_server copy FOLDER` in an init
container of Leyden's own image puts these modules into a volume, so they use the standard library alone.
"""
# The image of the agents has no `leyden`, and may have another Python:
# ruff: noqa: TID251, PTH101, PTH102, PTH104, PTH106, PTH108, PTH109, PTH120, PTH123, S103, S108

from __future__ import annotations

import base64
import contextlib
import hmac
import json
import os
import random
import resource
import select
import signal
import socket
import sys
import time

from . import sandbox, supervisor
from .system_calls import can_filter

if sandbox.TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from .supervisor import Orders, Report

    class PodReport(Report):
        """The end of an agent in a shared pod. `left` says what could not be removed; None where nothing is left."""

        left: str | None


PORT = 8010
FOLDER = "/var/run/leyden-attempts"
"""The workspaces; a volume of the pod."""
SHARED_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")  # swept after each attempt
TOKEN, ATTEMPTS, IDLE_SECONDS = "LEYDEN_POD_TOKEN", "LEYDEN_POD_ATTEMPTS", "LEYDEN_POD_IDLE_SECONDS"
"""Variables of the server that agents do not get."""
UIDS_FROM, UIDS = 30_000, 20_000
"""Below 65,536, which a pod in a user namespace has."""
PROGRAM = ("__init__.py", "output.py", "pod_server.py", "sandbox.py", "supervisor.py", "system_calls.py", "view.py")
START = "import sys; sys.path.append(sys.argv[1]); from sandbox.pod_server import main; main()"
"""Started from the folder with PROGRAM, where `leyden` is unknown."""
MAX_ORDERS_BYTES = 64 << 20
ORDERS_SECONDS = 20.0


def main() -> None:
    """Serves until no attempt has run for a while, or SIGTERM."""
    token, attempts, idle_seconds = os.environ.pop(TOKEN), int(os.environ.pop(ATTEMPTS)), os.environ.pop(IDLE_SECONDS)
    # An agent could otherwise read the token in this process's first environment.
    supervisor.be_undumpable()
    supervisor.become_subreaper()
    for folder in SHARED_FOLDERS:
        with contextlib.suppress(OSError):
            # A volume lacks the sticky bit: one user could rename the files of another.
            os.chmod(folder, 0o1777)
    os.chmod(FOLDER, 0o711)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", PORT), family=family, backlog=1024, dualstack_ipv6=both) as listener:
        Server(listener, token, attempts, float(idle_seconds)).run()


class Server:
    """The supervisors of one pod. Args: attempts: the most at once"""

    def __init__(self, listener: socket.socket, token: str, attempts: int, idle_seconds: float) -> None:
        self._listener = listener
        self._token = token
        self._attempts = attempts
        self._idle_seconds = idle_seconds
        self._uids: dict[int, int] = {}
        self._next = random.randrange(UIDS)  # noqa: S311  # pods of one node seldom meet

    def run(self) -> None:
        """Accepts connections until none has been open for `idle_seconds`."""
        used = time.monotonic()
        while True:
            self._reap()
            if self._uids:
                used = time.monotonic()
            elif time.monotonic() - used > self._idle_seconds:
                return
            if len(self._uids) < self._attempts and select.select([self._listener], [], [], 0.2)[0]:
                self._serve()
            elif len(self._uids) >= self._attempts:
                time.sleep(0.02)

    def _serve(self) -> None:
        connection, (peer, *_) = self._listener.accept()
        with connection:
            if is_inside(peer, connection.getsockname()[0]):
                return
            uid = self._free_uid()
            try:
                pid = os.fork()
            except OSError:
                # Agents have used up the processes of the pod: it takes no more of them, and those that it has go on.
                time.sleep(0.2)
                return
            if pid == 0:
                self._listener.close()
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                _supervise(connection, self._token, uid)
            self._uids[pid] = uid

    def _free_uid(self) -> int:
        """The next user that no attempt has: two of one user would end each other."""
        used = set(self._uids.values())
        while True:
            self._next = (self._next + 1) % UIDS
            if (uid := UIDS_FROM + self._next) not in used:
                return uid

    def _reap(self) -> None:
        """Collects supervisors. One that was killed leaves its agent to this process."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            uid = self._uids.pop(pid, None)
            if uid is not None and status != 0:
                with contextlib.suppress(OSError):
                    wipe(uid)


def is_inside(peer: str, own: str) -> bool:
    """Whether a connection comes from this pod, in which agents are, too. Args: peer, own: its two addresses"""
    return peer == own or peer == "::1" or peer.removeprefix("::ffff:").startswith("127.")


def watch_peer(connection: socket.socket) -> None:
    """Breaks the connection within a minute where the other end is gone with its node. Both ends call this."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 20), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _supervise(connection: socket.socket, token: str, uid: int) -> None:
    """Serves one attempt, and ends this process."""
    try:
        asked = _orders_of(connection, token)
        connection.settimeout(None)
        watch_peer(connection)
        # The supervisor watches its stdout for the end of the connection.
        os.dup2(connection.fileno(), supervisor.STDOUT)
        supervisor.become_subreaper()
        report = _report(asked, uid)
        connection.sendall(json.dumps(_as_json(report)).encode())
    except (OSError, ValueError, KeyError) as error:
        with contextlib.suppress(OSError):
            connection.sendall(json.dumps({"refused": f"{type(error).__name__}: {error}"}).encode())
        os._exit(1)
    os._exit(0 if report["left"] is None else 1)


def _report(asked: dict[str, Any], uid: int) -> PodReport:
    """Runs the agent. Its leftovers cost the pod and not the report: it could otherwise throw away its attempt.

    Raises: OSError: no workspace could be made
    """
    report = None
    try:
        with _workspace(uid, asked["task"]) as root:
            report = supervisor.supervise(_orders(asked, root, uid))
    except OSError as error:
        if report is None:
            raise
        return {**report, "left": str(error)}
    return {**report, "left": None}


def _orders_of(connection: socket.socket, token: str) -> dict[str, Any]:
    """Raises: ValueError: not a line of JSON with the token; OSError: it took too long, and kept a place meanwhile"""
    received, deadline = bytearray(), time.monotonic() + ORDERS_SECONDS
    while not received.endswith(b"\n"):
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(1 << 20)
        if not part or len(received) > MAX_ORDERS_BYTES:
            raise ValueError("the orders have no end")
        received += part
    asked: dict[str, Any] = json.loads(received)
    if not hmac.compare_digest(str(asked.pop("token", "")), token):
        raise ValueError("the token is another pod's")
    return asked


@contextlib.contextmanager
def _workspace(uid: int, task: object) -> Iterator[str]:
    """A folder with `work`, `tmp` and the task, whose owner is the attempt's user; later nothing of that user is left.

    Raises: OSError: also where something is left
    """
    root = f"{FOLDER}/{uid}"
    os.mkdir(root, 0o711)
    for name in ("work", "tmp"):
        os.mkdir(f"{root}/{name}", 0o700)
        os.chown(f"{root}/{name}", uid, uid)
    with open(f"{root}/task.json", "w", encoding="utf-8") as file:
        json.dump(task, file, ensure_ascii=False)
        os.fchmod(file.fileno(), 0o400)
        os.fchown(file.fileno(), uid, uid)
    try:
        yield root
    finally:
        wipe(uid)


def wipe(uid: int) -> None:
    """Ends every process of an attempt's user, and removes its files. Raises: OSError: something is left"""
    root = f"{FOLDER}/{uid}"
    as_user(uid, lambda: _wipe_as_user(root))
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{root}/task.json")
    for name in ("work", "tmp", ""):
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(f"{root}/{name}")
    for folder in SHARED_FOLDERS:
        # A sibling's file in a folder of this user, which neither may remove: a later attempt could read it.
        if left := _entries(folder, uid):
            raise OSError(f"{left[0].path} cannot be removed")


def _wipe_as_user(root: str) -> None:
    sandbox.kill_all_of_this_user()
    for folder in (f"{root}/work", f"{root}/tmp"):
        with contextlib.suppress(FileNotFoundError):
            os.chmod(folder, 0o700)
            remove_content(folder)
    for folder in SHARED_FOLDERS:
        remove_content(folder, of=os.getuid())


def as_user(uid: int, act: Callable[[], object]) -> None:
    """Calls a function in a process of the user, and waits for its end."""
    pid = os.fork()
    if pid == 0:
        try:
            sandbox.become(uid)
            act()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def remove_content(folder: str, of: int | None = None) -> None:
    """Empties a folder, but for what cannot be removed. A tree may be deeper than any recursion: its folders move to
    the top.

    Args: of: removes only what this user has there
    """
    kept = set[str]()
    while entries := [one for one in _entries(folder, of) if one.name not in kept]:
        for entry in entries:
            try:
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                os.chmod(entry.path, 0o700)
                for inner in list(os.scandir(entry.path)):
                    if inner.is_dir(follow_symlinks=False):
                        os.chmod(inner.path, 0o700)
                        os.rename(inner.path, f"{folder}/{os.urandom(12).hex()}")
                    else:
                        os.unlink(inner.path)
                os.rmdir(entry.path)
            except OSError:
                kept.add(entry.name)


def _entries(folder: str, of: int | None) -> list[os.DirEntry[str]]:
    try:
        found = list(os.scandir(folder))
    except OSError:
        return []
    return [one for one in found if of in (None, _owner(one))]


def _owner(entry: os.DirEntry[str]) -> int | None:
    """None where it is gone: siblings remove their own files meanwhile."""
    try:
        return entry.stat(follow_symlinks=False).st_uid
    except FileNotFoundError:
        return None


def _orders(asked: dict[str, Any], root: str, uid: int) -> Orders:
    inherited = {name: os.environ[name] for name in os.environ if name not in asked["environment"]}
    task, work = f"{root}/task.json", f"{root}/work"
    own = {"HOME": work, "TMPDIR": f"{root}/tmp", "USER": "agent", "LOGNAME": "agent", "LEYDEN_TASK_FILE": task}
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limits = [
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_NOFILE, min(asked["max_open_files"], most), min(asked["max_open_files"], most)),
        (resource.RLIMIT_FSIZE, asked["max_file_bytes"], asked["max_file_bytes"]),
        (resource.RLIMIT_NPROC, asked["max_processes"], asked["max_processes"]),
    ]
    return {
        "command": asked["command"],
        "environment": {**inherited, **asked["environment"], **own},
        "stdin": task if asked["task_on_stdin"] else os.devnull,
        "folder": os.getcwd(),
        "timeout_seconds": asked["timeout_seconds"],
        "grace_seconds": asked["grace_seconds"],
        "output_bytes": asked["output_bytes"],
        "memory_bytes": asked["memory_bytes"],
        "memory_poll_seconds": asked["memory_poll_seconds"],
        "limits": [(number, soft, hard) for number, soft, hard in limits if hard is not None],
        "sandbox": {
            "uid": uid,
            "landlock": sandbox.landlock_abi() >= sandbox.USABLE_LANDLOCK,
            "hidden": [os.path.realpath(FOLDER)],
            "visible": os.path.realpath(root),
            "writable": None,
            "filter": can_filter(),
            "network": True,
            "view": None,
        },
    }


def _as_json(report: PodReport) -> dict[str, Any]:
    return {name: base64.b64encode(one).decode() if isinstance(one, bytes) else one for name, one in report.items()}


def copy(folder: str) -> None:
    """Puts this program into a folder."""
    os.mkdir(f"{folder}/sandbox")
    for name in PROGRAM:
        with (
            open(f"{os.path.dirname(__file__)}/{name}", "rb") as source,
            open(f"{folder}/sandbox/{name}", "wb") as made,
        ):
            made.write(source.read())


if __name__ == "__main__":
    copy(sys.argv[1])
