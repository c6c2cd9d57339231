"""The platform on one machine: a supervisor that starts every service, keeps it running, and ends it in order.

`Platform(home).start()`, `.ready()`, `.stop()` are what `leyden up` does; tests and the demo use the same class. All
services are children of one thread of this process and die with it, even by SIGKILL. The sockets that they listen on
are the supervisor's: while a service is started again or replaced, its clients wait. Postgres and Redis outlive the
supervisor and are found again. Whatever a killed one left is ended by the next start in the same home.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Literal
from urllib.parse import urlsplit

import httpx

from leyden.libs.cli import control_files
from leyden.libs.cli.listeners import Listeners, open_listeners
from leyden.libs.cli.managed_service import Child, Ending, Kept, RollFailed
from leyden.libs.cli.record import (
    PlatformRecord,
    ServiceRecord,
    process,
    read_record,
    write_private,
    write_record,
)
from leyden.libs.cli.services import HURRY_SECONDS, SERVICES, STOP_ORDER, WITHOUT_STORE, Facts, environment
from leyden.libs.cli.settings import Settings, inherited_environment

LOG_BYTES = 20 * 2**20
TICK_SECONDS = 0.1
LOOK_SECONDS = 2.0
"""Pause between two looks at servers and logs."""
HURRY_AFTER_SECONDS = 3.0
"""Between the first and the second SIGTERM of services that `HURRY_SECONDS` does not name."""


class PlatformError(RuntimeError):
    """The platform did not start; the message says why and what to do."""


class AlreadyRunning(PlatformError):
    """Another supervisor has this home."""


@dataclass(frozen=True)
class Options:
    """How a platform differs from the default.

    Args: environment: further variables by service name (`trainer` reaches the controller's trainers)
        model_path: Hugging Face folder of the base model; the bundled one is converted when null
        free_ports: any free ports instead of the preferred ones
        restart: whether a service that dies is started again
        services: which to start, in this order
        database_url, redis_url: servers of your own; embedded when null
    """

    environment: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    model_path: Path | None = None
    free_ports: bool = False
    restart: bool = True
    services: tuple[str, ...] = SERVICES
    database_url: str | None = None
    redis_url: str | None = None


def platform_options(settings: Settings, *, free_ports: bool) -> Options:
    """The options of `leyden up` and `leyden demo`: the servers and the model that the settings name."""
    return Options(
        model_path=settings.model_path,
        free_ports=free_ports,
        database_url=settings.database_url,
        redis_url=settings.redis_url,
    )


class Platform:
    """One platform in one home.

    Args: report: told in a few words what happens, from the supervising thread or one beside it
    """

    def __init__(
        self, home: Path, options: Options = Options(), *, report: Callable[[str], None] = lambda _: None
    ) -> None:
        self.home = home.resolve()
        self.options = options
        self._report = report
        self._facts: Facts | None = None
        self._kept = {name: Kept(name, self._spawn, report, restart=options.restart) for name in options.services}
        self._listeners: dict[str, Listeners] = {}
        self._rolling: Iterator[None] = iter(())
        self._misled: Ending | None = None
        self._state: Literal["starting", "ready", "stopping", "stopped"] = "starting"
        self._stopping, self._hurry = threading.Event(), threading.Event()
        self._ready = threading.Event()
        self._failure: Exception | None = None
        self._lock: IO[str] | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Takes the home and begins to start everything; `ready()` waits for it.

        Raises: AlreadyRunning
        """
        self.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = _take(self.home)
        _end_leftovers(self.home)
        self._thread = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
        self._thread.start()

    def ready(self, timeout_seconds: float = 300.0) -> PlatformRecord:
        """What runs where, once every service says that it can work.

        Raises: PlatformError: it failed, was stopped, or took longer
        """
        deadline = time.monotonic() + timeout_seconds
        while not self._ready.wait(0.05):
            if self._failure is not None:
                raise PlatformError(str(self._failure)) from self._failure
            if self._stopping.is_set():
                raise PlatformError("the platform was stopped while it started")
            if time.monotonic() > deadline:
                raise PlatformError(f"not ready after {timeout_seconds:g} s: {self._unready()}")
        return self.record()

    def roll(self, *services: str) -> None:
        """Replaces services one after another, all when none is named, without a refused connection.

        Raises: PlatformError: one could not be replaced; those after it were left as they are
        """
        assert self._thread is not None
        order = control_files.place(self.home, services or self.options.services)
        try:
            for progress in control_files.follow(self.home, order, self._thread.is_alive):
                if progress.state == "failed":
                    raise PlatformError(f"{progress.service}: {progress.detail}")
        except EOFError as error:
            raise PlatformError(str(error)) from error

    def stop(self, *, hurry: bool = False) -> None:
        """Ends every service in order, then Postgres and Redis; returns when they are gone.

        Args: hurry: SIGKILL at once
        """
        if hurry:
            self._hurry.set()
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def request_stop(self) -> None:
        """Begins to stop and returns at once; asked again, it kills. For signal handlers."""
        if self._stopping.is_set():
            self._hurry.set()
        self._stopping.set()

    @staticmethod
    @contextlib.contextmanager
    def alone(home: Path) -> Iterator[None]:
        """Holds the home of a supervisor that is gone, after ending what it left.

        Raises: AlreadyRunning
        """
        with _take(home):
            _end_leftovers(home)
            yield

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Whether the platform ended within this time; for ever when null."""
        assert self._thread is not None
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    @property
    def stopping(self) -> bool:
        """Whether somebody asked it to stop."""
        return self._stopping.is_set()

    @property
    def failure(self) -> Exception | None:
        """Why the supervisor gave up."""
        return self._failure

    @property
    def facts(self) -> Facts:
        """Addresses and files, known once `ready()` has returned."""
        assert self._facts is not None
        return self._facts

    @property
    def token(self) -> str:
        """The first administrator's token."""
        return self.facts.token_file.read_text().strip()

    def pids(self) -> dict[str, int]:
        """Pid by service, of those that run."""
        running = {name: kept.child for name, kept in self._kept.items()}
        return {name: child.popen.pid for name, child in running.items() if child is not None and child.ended() is None}

    def record(self) -> PlatformRecord:
        """The platform as it is now."""
        begun = PlatformRecord(state=self._state, supervisor=process(os.getpid()), embedded=self._embedded())
        facts = self._facts
        if facts is None:
            return begun
        services = {
            name: ServiceRecord(
                url=facts.url(name) if name in facts.ports else None,
                internal_url=facts.internal_url(name),
                process=kept.known_as,
                restarts=kept.restarts,
            )
            for name, kept in self._kept.items()
        }
        known = {"database_url": facts.database_url, "redis_url": facts.redis_url, "model_path": str(facts.model_path)}
        return begun.model_copy(update={"services": services, **known})

    def _embedded(self) -> list[str]:
        given = {"postgres": self.options.database_url, "redis": self.options.redis_url}
        return [name for name, url in given.items() if url is None]

    def _supervise(self) -> None:
        try:
            self._prepare()
            next_look = 0.0
            while not self._stopping.wait(TICK_SECONDS):
                self._keep_running()
                self._obey()
                if self._state == "starting" and not self._unready():
                    self._be_ready()
                if time.monotonic() >= next_look:
                    next_look = time.monotonic() + LOOK_SECONDS
                    self._look_after()
        # Whatever it is, the caller of `ready` or `wait` is told, and nothing stays behind.
        except Exception as error:  # noqa: BLE001
            self._failure = error
        finally:
            self._end()

    def _prepare(self) -> None:
        last = read_record(self.home)
        write_record(self.home, self.record())
        (self.home / "logs").mkdir(exist_ok=True)
        control_files.clear(self.home)
        with ThreadPoolExecutor(1) as beside:
            servers = beside.submit(self._start_servers)
            model_path = self.options.model_path or self._convert_model()
            database_url, redis_url = servers.result()
        self._listeners = open_listeners(self.options.services, last, free=self.options.free_ports)
        self._facts = Facts(self.home, *_ports(self._listeners), database_url, redis_url, model_path.resolve())
        make_secrets(self._facts)
        self._keep_running(WITHOUT_STORE)
        self._report("migrating the database")
        self._run_to_end("migrate", ["leyden.libs.store.migrate"], {"LEYDEN_DATABASE_URL": database_url})
        self._report("starting services")
        self._keep_running()

    def _start_servers(self) -> tuple[str, str]:
        # Only here, so that the REST client needs no database driver.
        from leyden.libs.store.embedded import EmbeddedPostgres, EmbeddedRedis

        if self._embedded():
            self._report(f"starting embedded {' and '.join(self._embedded())}")
        database_url = self.options.database_url or EmbeddedPostgres(self.home / "postgres").start()
        return database_url, self.options.redis_url or EmbeddedRedis(self.home / "redis").start()

    def _convert_model(self) -> Path:
        self._report("looking for the bundled model (converted once, about half a minute)")
        return Path(self._run_to_end("convert", ["leyden.services.engine.convert"], {}).strip().splitlines()[-1])

    def _run_to_end(self, name: str, arguments: list[str], variables: Mapping[str, str]) -> str:
        log = self.home / "logs" / f"{name}.log"
        with log.open("ab") as output:
            command = subprocess.Popen(
                self._launched(arguments),
                env=self._environment() | dict(variables),
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
            )
        with command:
            said = self._answer_of(command)
        if self._stopping.is_set():
            raise PlatformError("the platform was stopped while it started")
        if command.returncode != 0:
            raise PlatformError(f"`python -m {' '.join(arguments)}` failed:\n{_tail(log)}")
        return said

    def _answer_of(self, command: subprocess.Popen[bytes]) -> str:
        while True:
            try:
                return command.communicate(timeout=TICK_SECONDS)[0].decode()
            except subprocess.TimeoutExpired:
                if self._stopping.is_set():
                    command.kill()

    def _launched(self, arguments: list[str]) -> list[str]:
        launcher = str(Path(__file__).with_name("launch.py"))
        # -P: its own folder is no place to import from.
        return [sys.executable, "-P", launcher, str(os.getpid()), *arguments]

    def _environment(self) -> dict[str, str]:
        return inherited_environment() | {"PYTHONUNBUFFERED": "1"}

    def _keep_running(self, names: Collection[str] | None = None) -> None:
        if self._misled is not None and self._misled.is_over():
            self._misled = None
        now = time.monotonic()
        changed = [name for name, kept in self._kept.items() if (names is None or name in names) and kept.keep(now)]
        if changed:
            write_record(self.home, self.record())

    def _spawn(self, name: str) -> Child:
        variables = self._environment() | environment(name, self.facts) | dict(self.options.environment.get(name, {}))
        if name == "controller":
            variables |= dict(self.options.environment.get("trainer", {}))
        listeners = self._listeners[name]
        told, telling = os.pipe()
        with (self.facts.logs / f"{name}.log").open("ab") as log:
            popen = subprocess.Popen(
                self._launched([f"leyden.services.{name}"]),
                env=variables | listeners.environment(name) | {f"{name.upper()}_READY_FD": str(telling)},
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(*listeners.descriptors, telling),
                # A terminal's Ctrl-C is for the supervisor, which ends services in order.
                start_new_session=True,
            )
        os.close(telling)
        return Child(popen, told)

    def _obey(self) -> None:
        """One step of what another command asked for, or the beginning of it."""
        if next(self._rolling, self) is self and (order := control_files.take(self.home)) is not None:
            self._rolling = self._roll(order)

    def _roll(self, order: control_files.Order) -> Iterator[None]:
        for name in order.services:
            try:
                yield from self._roll_one(order, name)
            except RollFailed as error:
                self._report(f"{name} not replaced: {error}")
                control_files.tell(
                    self.home, order, control_files.Progress(state="failed", service=name, detail=str(error))
                )
                break
            write_record(self.home, self.record())
            control_files.tell(self.home, order, control_files.Progress(state="done", service=name))
        control_files.tell(self.home, order, control_files.Progress(state="ended"))

    def _roll_one(self, order: control_files.Order, name: str) -> Iterator[None]:
        if name not in self._kept:
            raise RollFailed(f"no such service; there are: {', '.join(self._kept)}")
        last = None
        for stage in self._kept[name].roll():
            if stage != last:
                self._report(f"restarting {name}: {stage}")
                control_files.tell(self.home, order, control_files.Progress(state=stage, service=name))
                write_record(self.home, self.record())
            last = stage
            yield

    def _look_after(self) -> None:
        """What needs no tenth of a second: servers, logs."""
        for log in (self.home / "logs").glob("*.log"):
            bound_log(log)
        if self._embedded() and not (_listens(self.facts.database_url) and _listens(self.facts.redis_url)):
            self._revive_servers()

    def _be_ready(self) -> None:
        self._state = "ready"
        write_record(self.home, self.record())
        self._ready.set()

    def _revive_servers(self) -> None:
        from leyden.libs.store.embedded import EmbeddedError

        try:
            found = self._start_servers()
        except EmbeddedError as error:
            # Services wait for their servers; the next look tries again.
            self._report(str(error))
            return
        facts = self.facts
        if found != (facts.database_url, facts.redis_url):
            # Another process took the port: services must learn the new address.
            self._facts = replace(facts, database_url=found[0], redis_url=found[1])
            misled = [child for kept in self._kept.values() for child in kept.processes()]
            self._misled = Ending(misled, hurry_seconds=HURRY_AFTER_SECONDS)

    def _unready(self) -> str:
        """Services that cannot work yet, with their causes; empty when all can."""
        if self._facts is None:
            return "services have not been started"
        causes = {name: kept.causes() for name, kept in self._kept.items()}
        return "; ".join(f"{name}: {cause}" for name, cause in causes.items() if cause)

    def _end(self) -> None:
        self._state = "stopping"
        write_record(self.home, self.record())
        for wave in STOP_ORDER:
            self._end_wave([name for name in wave if name in self._kept])
        if self._embedded():
            self._report(f"stopping embedded {' and '.join(self._embedded())}")
            stop_servers(self.home, self._embedded())
        self._state = "stopped"
        write_record(self.home, self.record())

    def _end_wave(self, names: Sequence[str]) -> None:
        endings = []
        for name in names:
            if running := self._kept[name].processes():
                self._report(f"stopping {name}")
                endings.append(Ending(running, hurry_seconds=HURRY_SECONDS.get(name, HURRY_AFTER_SECONDS)))
        while endings:
            endings = [ending for ending in endings if not ending.is_over(kill=self._hurry.is_set())]
            time.sleep(0.02)
        for name in names:
            # Nobody will come any more: who waits is refused.
            if name in self._listeners:
                self._listeners.pop(name).close()


def make_secrets(facts: Facts) -> None:
    """A key ring, the engine's two keys and an administrator's token, once."""
    facts.keys_file.parent.mkdir(exist_ok=True, mode=0o700)
    if not facts.keys_file.exists():
        # Only here: it loads much of what services are made of.
        from leyden.libs.capability import write_keys

        write_keys(facts.keys_file)
    for path in (facts.engine_key_file, facts.engine_admin_key_file):
        if not path.exists():
            write_private(path, f"{secrets.token_urlsafe(32)}\n")
    if not facts.token_file.exists():
        write_private(facts.token_file, f"leyden_{secrets.token_urlsafe(32)}\n")


def readiness(service: ServiceRecord) -> dict[str, str]:
    """What a service says of itself, check by check; the cause under an empty name when it says nothing."""
    try:
        with httpx.Client(trust_env=False, timeout=5.0) as client:
            response = client.get(f"{service.internal_url}/readyz")
        checks: dict[str, str] = response.json()["checks"]
    except httpx.TransportError:
        return {"": f"no answer at {service.internal_url}"}
    except (ValueError, KeyError, TypeError):
        return {"": f"status {response.status_code}"}
    return checks


def stop_servers(home: Path, embedded: list[str]) -> None:
    """Ends Postgres and Redis of a home, whoever started them."""
    from leyden.libs.store.embedded import EmbeddedPostgres, EmbeddedRedis

    if "redis" in embedded:
        EmbeddedRedis(home / "redis").stop()
    if "postgres" in embedded:
        EmbeddedPostgres(home / "postgres").stop()


def bound_log(path: Path, limit: int = LOG_BYTES) -> None:
    """Keeps a log below twice the limit: beyond it, what is there moves to `.1` and the file begins anew.

    Writers append, so the file can be emptied under them; the lines of that very moment may be lost.
    """
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > limit:
            shutil.copyfile(path, path.with_name(f"{path.name}.1"))
            os.truncate(path, 0)


def _take(home: Path) -> IO[str]:
    """The home's lock, which the kernel frees when its holder dies."""
    lock = (home / "supervisor.lock").open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise AlreadyRunning(
            f"a platform already runs in {home}: see `leyden status`, or end it with `leyden down`"
        ) from None
    return lock


def _end_leftovers(home: Path) -> None:
    """Kills services of a supervisor that was killed where the kernel did not; asked by pid and start time."""
    record = read_record(home)
    for service in record.services.values() if record else ():
        if service.process is not None and service.process.started_ticks and service.process.lives():
            with contextlib.suppress(ProcessLookupError):
                os.kill(service.process.pid, signal.SIGKILL)


def _listens(url: str) -> bool:
    address = urlsplit(url)
    if address.hostname is None:
        return True
    try:
        with socket.create_connection((address.hostname, address.port or 0), timeout=5):
            return True
    except OSError:
        return False


def _tail(path: Path) -> str:
    return path.read_bytes()[-3000:].decode(errors="replace")


def _ports(listeners: Mapping[str, Listeners]) -> tuple[dict[str, int], dict[str, int]]:
    doors = {name: one.door.getsockname()[1] for name, one in listeners.items() if one.door is not None}
    return doors, {name: one.internal.getsockname()[1] for name, one in listeners.items()}
