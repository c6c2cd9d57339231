"""The cell of an attempt: whom its agent becomes, and what of the disk it finds. `walls.py` builds it.

Where the runner is root, an agent becomes a user of its own, in a view of the disk without the platform's folders and
without other attempts. Elsewhere it stays the runner's user, and Landlock keeps it out of those.
"""
# Paths are text here, as the keeper and the system calls want them:
# ruff: noqa: PTH112, PTH113, PTH114, PTH115, PTH117, PTH118, PTH119, PTH120, PTH123

from __future__ import annotations

import fcntl
import os
import pwd
import secrets
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import leyden
from leyden.libs.service.errors import Misconfigured
from leyden.libs.telemetry import logger
from leyden.services.runner.folder import AttemptFolder
from leyden.services.runner.settings import Settings, open_work_folder
from leyden.services.runner.walls import USABLE_LANDLOCK, Walls, landlock_abi

log = logger()

ROOT = str(Path(leyden.__file__).resolve().parents[1])
UIDS = 20_000
"""User ids that attempts take in turn: long before one comes again, nothing of its last attempt is left."""
UIDS_FROM = 1_900_000_000
UIDS_FROM_IN_A_NAMESPACE = 30_000
NOBODY = (UIDS_FROM, UIDS_FROM)
"""Stands for every user to whom nothing was given."""
REMEDIES = (
    "let other users pass (chmod o+x) or put it elsewhere, or set RUNNER_AGENT_USER=same, or run the runner as an "
    "ordinary user"
)


@dataclass(frozen=True)
class Tenant:
    """Whom an agent becomes: (uid, gid), None to stay the runner's user; and the lock on a uid of its own."""

    user: tuple[int, int] | None = None
    lock: int | None = None


class OwnUsers:
    """User ids that belong to nobody, each lent to one attempt at a time, among all runners of this machine.

    Args: first: the lowest; locks: a file whose byte at an id's position is locked while the id is lent. The lock is
        held by whoever has the descriptor, the keeper too, so that a killed runner's agents keep theirs.
    """

    def __init__(self, first: int, locks: Path) -> None:
        self._first = first
        self._locks = str(locks)
        self._next = secrets.randbelow(UIDS)

    @contextmanager
    def lend(self) -> Iterator[Tenant]:
        """A user id that no living attempt has.

        Raises: OSError: every one is lent
        """
        lock = os.open(self._locks, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            uid = self._lock_one(lock)
            yield Tenant((uid, uid), lock)
        finally:
            os.close(lock)

    def _lock_one(self, lock: int) -> int:
        for _ in range(UIDS):
            uid = self._first + self._next
            self._next = (self._next + 1) % UIDS
            try:
                wanted = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, uid, 1, 0)
                fcntl.fcntl(lock, fcntl.F_OFD_SETLK, wanted)
            except BlockingIOError:
                continue
            return uid
        raise OSError(f"each of the {UIDS} user ids from {self._first} is in use by an attempt")


class Cells:
    """Makes the cells of one runner.

    Raises: Misconfigured: RUNNER_AGENT_USER or RUNNER_AGENT_UIDS_FROM cannot be followed
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._own = OwnUsers(first_uid(settings), _locks()) if is_own(settings) else None
        self._named = _named(settings.agent_user)
        self.mounts = os.geteuid() == 0 and may_mount()
        self.own_processes = self.mounts and may_cover_processes()
        self.work_folder = self._reachable(settings.work_folder)
        self._private = [os.path.realpath(path) for path in (*settings.hidden_paths, self.work_folder)]
        self.landlock = landlock_abi() >= USABLE_LANDLOCK
        if not self.landlock:
            log.warning(
                "this kernel has no usable Landlock (5.19 or later): agents can look into processes of their own user",
                own_users=self._own is not None,
            )

    def _reachable(self, folder: Path) -> Path:
        """The work folder, or an open one where agents' users could neither pass to it nor be shown it."""
        if self.mounts or self._own is None or closed_above(os.path.realpath(folder.parent), NOBODY) is None:
            return folder
        log.warning("work folder is closed to agents' users", work_folder=str(folder), instead=str(open_work_folder()))
        return open_work_folder()

    @contextmanager
    def lend(self) -> Iterator[Tenant]:
        """Whom the agent of one attempt becomes, for as long as anything of it exists."""
        if self._own is None:
            yield Tenant(self._named)
        else:
            with self._own.lend() as tenant:
                yield tenant

    def check_directory(self, directory: str | None) -> None:
        """An agent's files may not be the platform's.

        Raises: PermissionError: the folder is one of the private ones, lies in one or holds one
        """
        real = os.path.realpath(directory) if directory is not None else None
        if real is not None and any(within(real, path) or within(path, real) for path in self._private):
            raise PermissionError(f"{directory} belongs to the platform: keep the agent's files in a folder of its own")

    def walls(self, argv: Sequence[str], folder: AttemptFolder, tenant: Tenant) -> Walls:
        """What the keeper is to build around one agent.

        Raises: OSError: what the agent needs cannot be reached by the user that it becomes
        """
        root = os.path.realpath(folder.root)
        links, files = ways(argv, self._settings.agent_path, os.path.realpath(folder.work))
        hidden = [path for path in self._private if os.path.isdir(path)]
        closed = _closed([root, *links, *files], tenant.user)
        covers = outermost([*hidden, *closed]) if self.mounts else ["/"]
        needed = [*(link for link in links if _in_bin(link)), *files]
        shown = outermost(filter(None, (self._shown(path, covers) for path in needed)))
        walls = Walls(
            user=tenant.user,
            own_user=tenant.lock is not None,
            covers=covers if self.mounts else [],
            links=[pair for pair in links.items() if self._may_show(pair[0], covers)],
            shows=[*((path, False) for path in shown), (root, True)],
            own_processes=self.own_processes,
            hidden=[] if self.mounts else hidden,
            landlock=self.landlock,
        )
        if closed and not self.mounts:
            raise PermissionError(f"{closed[0]} is closed to the user that agents become: {REMEDIES}")
        return walls

    def _shown(self, path: str, covers: list[str]) -> str | None:
        """The widest folder that a file needs and that may be shown; None when it is in sight, or private."""
        parent = os.path.dirname(path)
        wanted = [path] if os.path.isdir(path) else [os.path.dirname(parent), parent, path]
        if not _in_bin(path):
            wanted = [candidate for candidate in wanted if candidate != os.path.dirname(parent)]
        return next((candidate for candidate in wanted if self._may_show(candidate, covers)), None)

    def _may_show(self, path: str, covers: list[str]) -> bool:
        covered = any(within(path, cover) and path != cover for cover in covers)
        return covered and not any(within(path, private) or within(private, path) for private in self._private)


def is_own(settings: Settings) -> bool:
    """Whether each attempt gets a user of its own."""
    return settings.agent_user == "own" and os.geteuid() == 0


def first_uid(settings: Settings) -> int:
    """The lowest user id for attempts.

    Raises: Misconfigured: this user namespace does not have that id and those after it
    """
    mapped = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    chosen = settings.agent_uids_from
    for first in (UIDS_FROM, UIDS_FROM_IN_A_NAMESPACE) if chosen is None else (chosen,):
        if any(inside <= first and first + UIDS <= inside + count for inside, _, count in mapped):
            return first
    raise Misconfigured(
        f"this user namespace does not have the {UIDS} user ids that attempts take: set RUNNER_AGENT_UIDS_FROM to the "
        "first of as many that nobody has, or RUNNER_AGENT_USER=same"
    )


def _named(name: str) -> tuple[int, int] | None:
    if name in {"own", "same"}:
        return None
    try:
        entry = pwd.getpwnam(name)
    except KeyError as error:
        raise Misconfigured(
            f"RUNNER_AGENT_USER is {name!r}: write `own`, `same`, or a user that this machine has"
        ) from error
    if os.geteuid() != 0:
        raise Misconfigured(
            f"RUNNER_AGENT_USER is {name!r}, which only a runner that runs as root can make agents: leave it unset"
        )
    return entry.pw_uid, entry.pw_gid


def _locks() -> Path:
    folder = next((path for path in ("/run", "/var/run") if os.access(path, os.W_OK)), tempfile.gettempdir())
    return Path(folder) / "leyden-agent-users"


def may_mount() -> bool:
    """Whether this process may give a child a view of the disk of its own."""
    return _works("walls.cover(['/'], [], [])")


def may_cover_processes() -> bool:
    """Whether that view may have a /proc of its own: not where parts of this one are masked, as in containers."""
    mounted = (line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())
    masked = any(point.startswith("/proc/") and point != "/proc/sys/fs/binfmt_misc" for point in mounted)
    return not masked and _works("walls.cover(['/'], [], []); walls.cover_processes()")


def _works(code: str) -> bool:
    code = f"import sys; sys.path.append(sys.argv[1]); from leyden.services.runner import walls; {code}"
    tried = subprocess.run([sys.executable, "-I", "-S", "-c", code, ROOT], check=False, stderr=subprocess.DEVNULL)
    return tried.returncode == 0


def within(path: str, folder: str) -> bool:
    """Whether a path is a folder or lies in it; both without links."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def outermost(paths: Iterable[str]) -> list[str]:
    """The paths that lie in no other, sorted."""
    unique = sorted(set(paths))
    return [path for path in unique if not any(within(path, other) for other in unique if other != path)]


def closed_above(path: str, user: tuple[int, int] | None) -> str | None:
    """The first folder on the way into a folder that a user cannot pass; None when it can, as the runner's own does."""
    for folder in (*reversed(Path(path).parents), Path(path)) if user is not None else ():
        if folder.exists() and not _passes(folder.stat(), user):
            return str(folder)
    return None


def _closed(paths: Iterable[str], user: tuple[int, int] | None) -> list[str]:
    """Every folder on the way to these that a user cannot pass, sorted."""
    found = {closed_above(folder, user) for folder in {os.path.dirname(path) for path in paths}}
    return sorted(filter(None, found))


def _passes(found: os.stat_result, user: tuple[int, int] | None) -> bool:
    if user is None:
        return True
    shift = 6 if found.st_uid == user[0] else 3 if found.st_gid == user[1] else 0
    return bool(found.st_mode >> shift & 1)


def _in_bin(path: str) -> bool:
    return os.path.basename(os.path.dirname(path)) == "bin"


def ways(argv: Sequence[str], search: str, folder: str) -> tuple[dict[str, str], list[str]]:
    """The links, with their targets, and the files that a command names: program, interpreter, absolute arguments.

    Args: folder: where the command starts; what lies in it is not told
    """
    links: dict[str, str] = {}
    files: list[str] = []
    program = _found(argv[0], search, folder)
    interpreter = [_found(word, search, folder) for word in _shebang(program)] if program is not None else []
    for path in (program, *interpreter, *(word for word in argv[1:] if os.path.isabs(word))):
        if path is not None and os.path.lexists(path):
            passed, end = trail(path)
            links |= passed
            files.append(end)
    return (
        {link: target for link, target in links.items() if not within(link, folder)},
        [file for file in files if not within(file, folder)],
    )


def trail(path: str) -> tuple[dict[str, str], str]:
    """Each symbolic link on the way to a path, with its target, and where the way ends."""
    links: dict[str, str] = {}
    end, steps = "/", deque(path.split("/"))
    while steps:
        step = os.path.normpath(os.path.join(end, steps.popleft()))
        # A second time on the same link is a circle, which nobody can open.
        if not os.path.islink(step) or step in links:
            end = step
            continue
        links[step] = os.readlink(step)
        end = "/" if links[step].startswith("/") else end
        steps.extendleft(reversed(links[step].split("/")))
    return links, end


def _found(program: str, search: str, folder: str) -> str | None:
    """Where a program lies; None for one that is nowhere."""
    return os.path.join(folder, program) if "/" in program else shutil.which(program, path=search)


def _shebang(path: str) -> list[str]:
    """The interpreter of a script, and what `env` is to look for."""
    if not os.path.isfile(path):
        return []
    with open(path, "rb") as file:
        first = file.readline(256)
    return first[2:].decode(errors="replace").split()[:2] if first.startswith(b"#!") else []
