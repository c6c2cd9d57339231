"""The platform on one machine: a supervisor that starts every service, keeps it running, and stops it in order.

`leyden up`, the demo and the tests use one class: `Platform(home).start()`, `.ready()`, `.stop()`. All services are
children of one thread of this process, or forks of such a child, and die with it, even by SIGKILL. Postgres and Redis
outlive the supervisor; the next supervisor of the home finds them, and kills the services that a dead one left.
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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import IO, Literal

import httpx

from leyden.libs.cli.errors import CommandError, Exit
from leyden.libs.cli.local import fork_server
from leyden.libs.cli.local.fork_server import ForkedProcess, ForkServer
from leyden.libs.cli.local.managed_service import ManagedService, ServiceProcess, Termination
from leyden.libs.cli.local.record import (
    PlatformRecord,
    ServiceRecord,
    process,
    read_record,
    write_private,
    write_record,
)
from leyden.libs.cli.local.services import (
    ADMIN_TOKEN,
    ENGINE_ADMIN_KEY,
    ENGINE_KEY,
    HURRY_SECONDS,
    KEYS,
    LOGS,
    SERVICES,
    STOP_ORDER,
    WITHOUT_STORE,
    Facts,
    Listeners,
    Sglang,
    environment,
    inherited_by,
    listens,
    open_listeners,
)
from leyden.libs.cli.settings import Settings, grader_roots, inherited_environment, provider_names
from leyden.libs.embedded.launch import tied

LOG_BYTES = 20 * 2**20
TICK_SECONDS = 0.1
CAN_FORK = sys.platform == "linux"
"""Elsewhere services are processes of their own: a fork without a new program is not safe there."""
CHECK_SECONDS = 2.0
"""Interval of the checks of servers and logs."""
HURRY_AFTER_SECONDS = 3.0
"""Seconds between the first and the second SIGTERM of services that `HURRY_SECONDS` does not name."""


class PlatformError(CommandError):
    """The platform did not start; the message says why and what to do."""


class AlreadyRunning(PlatformError):
    """Another supervisor holds this home."""

    def __init__(self, message: str) -> None:
        super().__init__(message, Exit.REFUSED)


@dataclass(frozen=True)
class Options:
    """Differences from the default platform.

    Args: environment: further variables by service name (`trainer` reaches the controller's trainers)
        model_path: Hugging Face folder of the base model; null converts the bundled one
        free_ports: any free ports instead of the preferred ones
        restart: whether a service starts again after a crash
        services: the services to start, in this order
        database_url, redis_url: servers of your own; null starts embedded ones
        engine_urls: engines of your own; without any, the service `engine` starts one
        sglang: what that service runs; null runs the CPU engine
        agents: folders below which a run's `agent.directory` may lie
        graders: folders below which the `directory` of a grader may lie
    """

    environment: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    model_path: Path | None = None
    free_ports: bool = False
    restart: bool = True
    services: tuple[str, ...] = SERVICES
    database_url: str | None = None
    redis_url: str | None = None
    engine_urls: tuple[str, ...] = ()
    sglang: Sglang | None = None
    agents: tuple[Path, ...] = ()
    graders: tuple[Path, ...] = ()


def platform_options(
    settings: Settings,
    *,
    free_ports: bool,
    engine_urls: tuple[str, ...] = (),
    sglang: Sglang | None = None,
    agents: tuple[Path, ...] = (),
    graders: tuple[Path, ...] = (),
) -> Options:
    """The options of `leyden up` and `leyden demo`: the servers and the model that the settings name."""
    return Options(
        model_path=settings.model_path,
        free_ports=free_ports,
        services=tuple(name for name in SERVICES if name != "engine" or not engine_urls),
        database_url=settings.database_url,
        redis_url=settings.redis_url,
        engine_urls=engine_urls,
        sglang=sglang,
        agents=agents,
        graders=graders,
    )


def make_home(home: Path) -> None:
    """Makes the home, open to its owner alone, where it is missing."""
    home.mkdir(parents=True, exist_ok=True, mode=0o700)


class Platform:
    """One platform in one home.

    Args: report: receives a few words about each event, from the supervising thread or one beside it
    """

    def __init__(
        self, home: Path, options: Options = Options(), *, report: Callable[[str], None] = lambda _: None
    ) -> None:
        self.home = home.resolve()
        self.options = options
        self.failure: Exception | None = None
        """The error that ended the supervisor."""
        self._report = report = _harmless(report)
        self._facts: Facts | None = None
        self._services = {
            name: ManagedService(name, self._spawn, report, restart=options.restart) for name in options.services
        }
        self._listeners: dict[str, Listeners] = {}
        self._fork_server: ForkServer | None = None
        self._outdated: Termination | None = None
        self._state: Literal["starting", "ready", "stopping", "stopped"] = "starting"
        self._stopping, self._hurry = threading.Event(), threading.Event()
        self._ready = threading.Event()
        self._next_check = 0.0
        self._is_record_old = False
        self._lock: IO[str] | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Locks the home and begins to start everything; `ready()` waits for it.

        Raises: AlreadyRunning
        """
        make_home(self.home)
        self._lock = _lock_home(self.home)
        _kill_orphans(self.home)
        self._thread = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
        self._thread.start()

    def ready(self, timeout_seconds: float = 300.0) -> PlatformRecord:
        """Waits until every service is ready and returns the record.

        Raises: PlatformError: it failed, was stopped, or took longer
        """
        deadline = time.monotonic() + timeout_seconds
        while not self._ready.wait(0.05):
            if self.failure is not None:
                raise PlatformError(str(self.failure)) from self.failure
            if self._stopping.is_set():
                raise PlatformError("the platform was stopped while it started")
            if time.monotonic() > deadline:
                raise PlatformError(f"not ready after {timeout_seconds:g} s: {self._problems()}")
        return self.record()

    def stop(self) -> None:
        """Stops every service in order, then Postgres and Redis; returns when they have ended."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def request_stop(self) -> None:
        """Begins to stop and returns at once; a second call kills. For signal handlers."""
        if self._stopping.is_set():
            self._hurry.set()
        self._stopping.set()

    def wait(self) -> None:
        """Returns when the platform has ended."""
        assert self._thread is not None
        self._thread.join()

    @property
    def stopping(self) -> bool:
        """Whether a stop was requested."""
        return self._stopping.is_set()

    @property
    def facts(self) -> Facts:
        """Addresses and files, once `ready()` has returned."""
        assert self._facts is not None
        return self._facts

    @property
    def token(self) -> str:
        """The first administrator's token."""
        return (self.home / ADMIN_TOKEN).read_text().strip()

    def pids(self) -> dict[str, int]:
        """Pids of the running services by name."""
        running = {name: service.current for name, service in self._services.items()}
        return {name: one.popen.pid for name, one in running.items() if one is not None and one.popen.poll() is None}

    def record(self) -> PlatformRecord:
        """The platform's state now."""
        record = PlatformRecord(state=self._state, supervisor=process(os.getpid()), embedded=self._embedded())
        facts = self._facts
        if facts is None:
            return record
        services = {
            name: ServiceRecord(
                url=facts.url(name) if name in facts.ports else None,
                internal_url=facts.internal_url(name),
                process=service.identity,
                restarts=service.restarts,
            )
            for name, service in self._services.items()
        }
        servers = {"database_url": facts.database_url, "redis_url": facts.redis_url}
        return record.model_copy(update={"services": services, "model_path": str(facts.model_path), **servers})

    def _write_record(self) -> None:
        """Writes the record; on a full disk a later tick does."""
        try:
            write_record(self.home, self.record())
        except OSError as error:
            self._is_record_old = True
            self._report(f"the platform's state could not be written: {error}")
        else:
            self._is_record_old = False

    def _embedded(self) -> list[str]:
        urls = {"postgres": self.options.database_url, "redis": self.options.redis_url}
        return [name for name, url in urls.items() if url is None]

    def _supervise(self) -> None:
        try:
            self._prepare()
            while not self._stopping.wait(TICK_SECONDS):
                for step in (self._check_now_and_then, self._poll_services, self._note_ready):
                    try:
                        step()
                    except OSError as error:
                        # A full disk, for example: running services go on, and the next round tries again.
                        self._report(f"{error}: trying again")
                        self._stopping.wait(CHECK_SECONDS)
        # `ready()` and `wait()` report any error, and nothing stays behind.
        except Exception as error:  # noqa: BLE001
            self.failure = error
        finally:
            self._end()

    def _check_now_and_then(self) -> None:
        if time.monotonic() >= self._next_check:
            self._next_check = time.monotonic() + CHECK_SECONDS
            self._check_logs_and_servers()
            if self._is_record_old:
                self._write_record()

    def _note_ready(self) -> None:
        if self._state == "starting" and not self._problems():
            self._state = "ready"
            self._write_record()
            self._ready.set()

    def _prepare(self) -> None:
        last = read_record(self.home)
        if last is not None and (left := set(last.embedded) - set(self._embedded())):
            # Those of a supervisor that was killed: the record that names them ends here.
            stop_servers(self.home, sorted(left))
        self._write_record()
        (self.home / LOGS).mkdir(exist_ok=True)
        if CAN_FORK and set(self.options.services) - {"engine"}:
            # Its imports run beside the start of Postgres.
            self._started_fork_server()
        with ThreadPoolExecutor(1) as beside:
            starting = beside.submit(self._start_servers)
            model_path = self.options.model_path or self._convert_model()
            database_url, redis_url = starting.result()
        self._listeners = open_listeners(self.options.services, last, free=self.options.free_ports)
        self._facts = Facts(
            self.home,
            *_ports(self._listeners),
            database_url,
            redis_url,
            model_path.resolve(),
            self.options.engine_urls,
            self.options.sglang,
            grader_roots(self.options.graders, self.options.environment.get("grader", {})),
            provider_names("GRADER_PROVIDERS", self.options.environment.get("grader", {})),
            provider_names("GATEWAY_PROVIDERS", self.options.environment.get("gateway", {})),
        )
        if self.options.sglang is not None:
            self._listeners["engine"] = self._listeners["engine"].without_public()
        make_secrets(self.home)
        self._poll_services(WITHOUT_STORE)
        self._report("migrating the database")
        self._run_module("leyden.libs.store.migrate", "migrate", {"LEYDEN_DATABASE_URL": database_url})
        self._report("starting services")
        self._poll_services()

    def _start_servers(self) -> tuple[str, str]:
        # Imported late: the REST client needs no database driver.
        from leyden.libs.embedded.servers import EmbeddedPostgres, EmbeddedRedis

        if self._embedded():
            self._report(f"starting embedded {' and '.join(self._embedded())}")
        database_url = self.options.database_url or EmbeddedPostgres(self.home / "postgres").start()
        return database_url, self.options.redis_url or EmbeddedRedis(self.home / "redis").start()

    def _convert_model(self) -> Path:
        self._report("looking for the bundled model (converted once, about half a minute)")
        return Path(self._run_module("leyden.services.engine.convert", "convert", {}).strip().splitlines()[-1])

    def _run_module(self, module: str, name: str, variables: Mapping[str, str]) -> str:
        """The output of a module that ends by itself; its errors go to the log of this name."""
        path = self.home / LOGS / f"{name}.log"
        with path.open("ab") as log:
            earlier = log.tell()
            command = self._launch(module, variables, stdout=subprocess.PIPE, stderr=log)
        with command:
            while True:
                try:
                    output = command.communicate(timeout=TICK_SECONDS)[0].decode()
                    break
                except subprocess.TimeoutExpired:
                    if self._stopping.is_set():
                        command.kill()
        if self._stopping.is_set():
            raise PlatformError("the platform was stopped while it started")
        if command.returncode != 0:
            tail = path.read_bytes()[earlier:][-3000:].decode(errors="replace")
            raise PlatformError(f"`python -m {module}` failed:\n{tail}")
        return output

    def _launch(
        self,
        module: str,
        variables: Mapping[str, str],
        *,
        service: str = "",
        stdin: int = subprocess.DEVNULL,
        stdout: int | IO[bytes],
        stderr: int | IO[bytes],
        descriptors: Mapping[str, int] = MappingProxyType({}),
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            # -P: modules of the home must not shadow others.
            tied(sys.executable, "-P", "-m", module),
            env=self._variables(service, variables) | {name: str(number) for name, number in descriptors.items()},
            cwd=self.home,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=tuple(descriptors.values()),
            # A terminal's Ctrl-C reaches the supervisor alone, which stops services in order.
            start_new_session=True,
        )

    def _variables(self, service: str, own: Mapping[str, str]) -> dict[str, str]:
        inherited = inherited_by(service, inherited_environment(self.options.agents))
        return inherited | {"PYTHONUNBUFFERED": "1"} | dict(own)

    def _spawn(self, name: str) -> ServiceProcess:
        variables = environment(name, self.facts) | dict(self.options.environment.get(name, {}))
        if name == "controller":
            variables |= dict(self.options.environment.get("trainer", {}))
        with (self.home / LOGS / f"{name}.log").open("ab") as log, contextlib.ExitStack() as undo:
            read_end, write_end = os.pipe()
            undo.callback(os.close, read_end)
            descriptors = self._listeners[name].descriptors(name) | {f"{name.upper()}_READY_FD": write_end}
            try:
                process = self._start_service(name, variables, log, descriptors)
            finally:
                os.close(write_end)
            undo.pop_all()
        return ServiceProcess(process, read_end)

    def _start_service(
        self, name: str, variables: Mapping[str, str], log: IO[bytes], descriptors: Mapping[str, int]
    ) -> subprocess.Popen[bytes] | ForkedProcess:
        module = f"leyden.services.{name}"
        if name == "engine" or not CAN_FORK:
            module += ".sglang" if name == "engine" and self.options.sglang is not None else ""
            errors = subprocess.STDOUT
            return self._launch(module, variables, service=name, stdout=log, stderr=errors, descriptors=descriptors)
        server = self._started_fork_server()
        return server.start(module, self._variables(name, variables), log.fileno(), descriptors)

    def _started_fork_server(self) -> ForkServer:
        """The running fork server; a new one where it has ended."""
        if self._fork_server is not None and self._fork_server.popen.poll() is not None:
            self._fork_server.close()
            self._fork_server = None
        if self._fork_server is None:
            ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
            with theirs, (self.home / LOGS / fork_server.LOG).open("ab") as log:
                module = fork_server.__name__
                popen = self._launch(module, {}, stdin=theirs.fileno(), stdout=log, stderr=subprocess.STDOUT)
            self._fork_server = ForkServer(popen, ours)
        return self._fork_server

    def _poll_services(self, names: Collection[str] | None = None) -> None:
        if self._outdated is not None and self._outdated.is_over():
            self._outdated = None
        now = time.monotonic()
        changed = False
        for name, service in self._services.items():
            if names is None or name in names:
                changed |= service.poll(now)
        if changed:
            self._write_record()

    def _check_logs_and_servers(self) -> None:
        for log in (self.home / LOGS).glob("*.log"):
            rotate_log(log)
        if self._embedded() and not (listens(self.facts.database_url) and listens(self.facts.redis_url)):
            self._restart_servers()

    def _restart_servers(self) -> None:
        from leyden.libs.embedded.servers import EmbeddedError

        try:
            addresses = self._start_servers()
        except EmbeddedError as error:
            # Services wait for their servers, and the next check tries again.
            self._report(str(error))
            return
        facts = self.facts
        if addresses != (facts.database_url, facts.redis_url):
            # Another process has taken the port: the services need processes with the new address.
            self._facts = replace(facts, database_url=addresses[0], redis_url=addresses[1])
            self._outdated = Termination(self._running(self._services), hurry_seconds=HURRY_AFTER_SECONDS)

    def _running(self, names: Iterable[str]) -> list[ServiceProcess]:
        return [one for name in names if (one := self._services[name].current) is not None]

    def _problems(self) -> str:
        """The services that cannot work yet, with the reasons; empty when all can."""
        if self._facts is None:
            return "services have not been started"
        problems = {name: service.problem() for name, service in self._services.items()}
        return "; ".join(f"{name}: {problem}" for name, problem in problems.items() if problem)

    def _end(self) -> None:
        self._state = "stopping"
        self._write_record()
        for wave in STOP_ORDER:
            self._end_services([name for name in wave if name in self._services])
        if self._fork_server is not None:
            self._fork_server.close()
        if self._embedded():
            self._report(f"stopping embedded {' and '.join(self._embedded())}")
            stop_servers(self.home, self._embedded())
        self._state = "stopped"
        self._write_record()

    def _end_services(self, names: Sequence[str]) -> None:
        terminations = []
        for name in names:
            if running := self._running([name]):
                self._report(f"stopping {name}")
                terminations.append(Termination(running, hurry_seconds=HURRY_SECONDS.get(name, HURRY_AFTER_SECONDS)))
        while terminations:
            terminations = [one for one in terminations if not one.is_over(kill=self._hurry.is_set())]
            time.sleep(0.02)
        for name in names:
            # Connections that wait in the kernel are refused now: no process will accept them.
            if name in self._listeners:
                self._listeners.pop(name).close()


@contextlib.contextmanager
def exclusive_home(home: Path) -> Iterator[None]:
    """Locks the home of a dead supervisor, after killing the services that it left.

    Raises: AlreadyRunning
    """
    with _lock_home(home):
        _kill_orphans(home)
        yield


def make_secrets(home: Path) -> None:
    """Writes the key ring, the engine's two keys and an administrator's token where they are missing."""
    (home / KEYS).parent.mkdir(exist_ok=True, mode=0o700)
    if not (home / KEYS).exists():
        # Imported late: it loads much of the service library.
        from leyden.libs.capability import write_keys

        write_keys(home / KEYS)
    for file, prefix in ((ENGINE_KEY, ""), (ENGINE_ADMIN_KEY, ""), (ADMIN_TOKEN, "leyden_")):
        if not (home / file).exists():
            write_private(home / file, f"{prefix}{secrets.token_urlsafe(32)}\n")


def readiness(service: ServiceRecord) -> dict[str, str]:
    """The results of a service's readiness checks by name; the error under an empty name when it does not answer."""
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
    """Stops Postgres and Redis of a home, whichever process started them."""
    from leyden.libs.embedded.servers import EmbeddedPostgres, EmbeddedRedis

    if "redis" in embedded:
        EmbeddedRedis(home / "redis").stop()
    if "postgres" in embedded:
        EmbeddedPostgres(home / "postgres").stop()


def rotate_log(path: Path, limit: int = LOG_BYTES) -> None:
    """Copies a log beyond the limit to `.1` and empties it; its writers append, so that they continue at the beginning.

    Lines that a service writes between the copy and the truncation are lost.
    """
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > limit:
            copy = path.with_name(f"{path.name}.1")
            try:
                shutil.copyfile(path, copy)
            except OSError:
                # The disk is full: both make room.
                copy.unlink(missing_ok=True)
            os.truncate(path, 0)


def _harmless(report: Callable[[str], None]) -> Callable[[str], None]:
    """The same function, for whose full log no supervisor dies."""

    def harmless(message: str) -> None:
        with contextlib.suppress(OSError):
            report(message)

    return harmless


def _lock_home(home: Path) -> IO[str]:
    """A lock that the kernel frees when its holder dies."""
    lock = (home / "supervisor.lock").open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        message = f"a platform already runs in {home}: see `leyden status`, or stop it with `leyden down`"
        raise AlreadyRunning(message) from None
    return lock


def _kill_orphans(home: Path) -> None:
    """Kills services of a dead supervisor where the kernel did not."""
    record = read_record(home)
    for service in record.services.values() if record else ():
        if service.process is not None and service.process.started_ticks and service.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(service.process.pid, signal.SIGKILL)


def _ports(listeners: Mapping[str, Listeners]) -> tuple[dict[str, int], dict[str, int]]:
    """Public and internal ports by service."""
    public = {name: one.public.getsockname()[1] for name, one in listeners.items() if one.public is not None}
    return public, {name: one.internal.getsockname()[1] for name, one in listeners.items()}
