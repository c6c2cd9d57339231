"""The services of a platform on one machine: their sockets, their variables, and the order in which they stop.

The supervisor owns the sockets, so that they outlive every process: while a service starts again, the kernel queues its
connections and refuses none.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from leyden.libs.cli.local.record import PlatformRecord
from leyden.libs.containers.client import CONTAINER_PROGRAM, ContainerClient

SERVICES = ("engine", "api", "credit", "gateway", "controller", "collector", "runner", "grader")
"""In the order of starts: the engine takes longest."""

WITHOUT_STORE = frozenset({"engine"})
"""Started while the database is still being migrated."""

PORTS = {"engine": 30000, "api": 8000, "gateway": 8001, "collector": 8003}
"""Preferred ports of the services that have an endpoint."""

INTERNAL_PORTS = {name: 8010 + number for number, name in enumerate(SERVICES)}
"""Preferred ports of health and metrics."""

STOP_ORDER = (("runner",), ("controller",), ("credit", "grader", "gateway", "collector", "api"), ("engine",))
"""Services that create work stop before the services that handle it."""

STORE_VARIABLES = ("LEYDEN_DATABASE_", "LEYDEN_REDIS_", "LEYDEN_CAPABILITY_", "LEYDEN_TOKEN", "API_ADMIN_")
"""Beginnings of the names of variables that open Postgres, Redis, agents' addresses or the API."""

HURRY_SECONDS = {"runner": 1.0, "controller": 20.0}
"""Seconds between the first and the second SIGTERM when the platform stops; 3 for the other services. A stop on a
laptop should be quick, and the next start repeats any work that it cut short."""

KILL_SECONDS = 15.0
"""Seconds between the second SIGTERM and SIGKILL."""

BACKLOG = 2048

LOGS = "logs"
"""Folder in the home with one file for each service."""
KEYS = "secrets/capability-keys.json"
"""The key ring that signs agents' capabilities."""
ADMIN_TOKEN = "secrets/admin-token"  # noqa: S105  # the name of a file
"""The first administrator's bearer token."""
ENGINE_KEY = "secrets/engine-api-key"
"""The key of the engine's inference routes, for gateway and controller."""
ENGINE_ADMIN_KEY = "secrets/engine-admin-key"
"""The key of the engine's control routes, for the controller alone."""


@dataclass(frozen=True)
class Listeners:
    """The listening sockets of one service."""

    public: socket.socket | None
    """None for a worker, which has no endpoint."""
    internal: socket.socket

    def sockets(self) -> list[socket.socket]:
        """Both, or the internal one alone."""
        return [self.internal] if self.public is None else [self.public, self.internal]

    def descriptors(self, service: str) -> dict[str, int]:
        """The descriptors that a service inherits, by the variables that name them."""
        prefix = service.upper()
        public = {} if self.public is None else {f"{prefix}_LISTEN_FD": self.public.fileno()}
        return public | {f"{prefix}_INTERNAL_FD": self.internal.fileno()}

    def without_public(self) -> Listeners:
        """Closes the public socket: a process that cannot inherit it binds its port itself."""
        assert self.public is not None
        self.public.close()
        return Listeners(None, self.internal)

    def close(self) -> None:
        """Refuses connections from now on."""
        for sock in self.sockets():
            sock.close()


def open_listeners(services: Iterable[str], last: PlatformRecord | None, *, free: bool) -> dict[str, Listeners]:
    """Listens for each service: on the port of the last start, else on the preferred one, else on any free one.

    Args: free: prefer no port, so that several platforms can run beside each other
    """
    opened: dict[str, Listeners] = {}
    with contextlib.ExitStack() as undo:
        for service in services:
            before = last.services.get(service) if last else None
            public = _listen(before.url if before else None, PORTS, service, free) if service in PORTS else None
            internal = _listen(before.internal_url if before else None, INTERNAL_PORTS, service, free)
            opened[service] = Listeners(public, internal)
            undo.callback(opened[service].close)
        undo.pop_all()
    return opened


def _listen(before: str | None, preferred: Mapping[str, int], service: str, free: bool) -> socket.socket:
    candidates = [int(before.rpartition(":")[2])] if before else []
    candidates += [] if free else [preferred[service]]
    for port in candidates:
        with contextlib.suppress(OSError):
            return _bound(port)
    return _bound(0)


def _bound(port: int) -> socket.socket:
    return socket.create_server(("127.0.0.1", port), backlog=BACKLOG)


def port_is_free(port: int) -> bool:
    """Whether a service could listen there now."""
    with contextlib.suppress(OSError):
        _bound(port).close()
        return True
    return False


def listens(url: str) -> bool:
    """Whether a server accepts connections at the address; true for a Unix socket, which has no host."""
    address = urlsplit(url)
    if address.hostname is None:
        return True
    with contextlib.suppress(OSError):
        socket.create_connection((address.hostname, address.port or 0), timeout=5).close()
        return True
    return False


@dataclass(frozen=True)
class Sglang:
    """SGLang as the platform's engine, in place of the CPU engine.

    Args: python: of an environment that has SGLang; arguments: further ones of `sglang.launch_server`
    """

    python: Path
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """Addresses and files of a platform.

    Args: engine_urls: engines that somebody else runs; sglang: null runs the CPU engine; graders: folders of graders'
        code, which agents may not open; judges, providers: names of servers that graders and the gateway may ask
    """

    home: Path
    ports: Mapping[str, int]
    internal_ports: Mapping[str, int]
    database_url: str
    redis_url: str
    model_path: Path
    engine_urls: tuple[str, ...] = ()
    sglang: Sglang | None = None
    graders: tuple[Path, ...] = ()
    judges: tuple[str, ...] = ()
    providers: tuple[str, ...] = ()

    def url(self, service: str) -> str:
        """The endpoint of a service."""
        return f"http://127.0.0.1:{self.ports[service]}"

    def internal_url(self, service: str) -> str:
        """Health, readiness and metrics of a service."""
        return f"http://127.0.0.1:{self.internal_ports[service]}"


def inherited_by(service: str, variables: Mapping[str, str]) -> dict[str, str]:
    """The caller's variables that a service may have: the engine gets none that opens the store or the API."""
    if service != "engine":
        return dict(variables)
    return {name: value for name, value in variables.items() if not name.startswith(STORE_VARIABLES)}


def environment(service: str, facts: Facts) -> dict[str, str]:
    """The variables of one service, beside those that it inherits."""
    # Services share the cores: a waiting thread that spins slows down all others.
    shared = {"OMP_WAIT_POLICY": "passive"}
    if service == "engine":
        return shared | _own_environment(service, facts)
    shared |= {
        "LEYDEN_DATABASE_URL": facts.database_url,
        "LEYDEN_REDIS_URL": facts.redis_url,
        "LEYDEN_CAPABILITY_KEYS_FILE": str(facts.home / KEYS),
    }
    return shared | _own_environment(service, facts)


def _own_environment(service: str, facts: Facts) -> dict[str, str]:
    match service:
        case "api":
            return {
                "API_ADMIN_TOKEN_FILE": str(facts.home / ADMIN_TOKEN),
                "API_RUNNER_TYPES": json.dumps(_runner_types()),
                "API_ONE_MACHINE": "true",
                "API_GRADER_ROOTS": json.dumps([str(path) for path in facts.graders]),
                "API_JUDGES": json.dumps(facts.judges),
                "API_PROVIDERS": json.dumps(facts.providers),
                # A test's platform may lack these services.
                **{
                    f"API_{name.upper()}_URL": facts.url(name)
                    for name in ("gateway", "collector")
                    if name in facts.ports
                },
            }
        case "engine":
            return {
                "ENGINE_MODEL_PATH": str(facts.model_path),
                "ENGINE_API_KEY_FILE": str(facts.home / ENGINE_KEY),
                "ENGINE_ADMIN_API_KEY_FILE": str(facts.home / ENGINE_ADMIN_KEY),
                **_engine_kind(facts),
            }
        case "gateway":
            keys = {} if facts.engine_urls else {"GATEWAY_ENGINE_API_KEY_FILE": str(facts.home / ENGINE_KEY)}
            return {"GATEWAY_MODEL_PATH": str(facts.model_path), **keys}
        case "runner":
            return {
                "RUNNER_GATEWAY_URL": facts.url("gateway"),
                "RUNNER_COLLECTOR_URL": facts.url("collector"),
                "RUNNER_WORK_FOLDER": str(facts.home / "attempts"),
                # Secrets, Postgres, Redis, weights and logs; and the answers that graders know.
                "RUNNER_HIDDEN_PATHS": json.dumps([str(path) for path in (facts.home, *facts.graders)]),
            }
        case "grader":
            return {
                "GRADER_WORK_FOLDER": str(facts.home / "attempts"),
                "GRADER_HIDDEN_PATHS": json.dumps([str(facts.home)]),
                "GRADER_CODE_ROOTS": json.dumps([str(path) for path in facts.graders]),
            }
        case "controller":
            return {
                **_controller_engines(facts),
                "CONTROLLER_LOG_FOLDER": str(facts.home / LOGS),
                "CONTROLLER_TRAINER_FOLDER": str(facts.home / "weights"),
                # The controller's trainers inherit these.
                "TRAINER_MODEL_PATH": str(facts.model_path),
                "TRAINER_FOLDER": str(facts.home / "weights"),
            }
        case _:
            return {}


def _runner_types() -> list[str]:
    """Values of `runner.type` that this machine executes: containers where podman or docker is installed."""
    has_containers = ContainerClient(os.environ.get(CONTAINER_PROGRAM)).program is not None
    return ["process", "container"] if has_containers else ["process"]


def _engine_kind(facts: Facts) -> dict[str, str]:
    if facts.sglang is None:
        return {"ENGINE_INCREMENTAL_STREAMING_OUTPUT": "true"}
    return {
        "ENGINE_PYTHON": str(facts.sglang.python),
        "ENGINE_ARGS": json.dumps(facts.sglang.arguments),
        "ENGINE_PORT": str(facts.ports["engine"]),
    }


def _controller_engines(facts: Facts) -> dict[str, str]:
    """Engines and their keys; the keys of engines that somebody else runs come from the caller's own variables."""
    if facts.engine_urls:
        return {"CONTROLLER_ENGINE_URLS": json.dumps(facts.engine_urls)}
    return {
        "CONTROLLER_ENGINE_URLS": json.dumps([facts.url("engine")] if "engine" in facts.ports else []),
        "CONTROLLER_ENGINE_API_KEY_FILE": str(facts.home / ENGINE_KEY),
        "CONTROLLER_ENGINE_ADMIN_KEY_FILE": str(facts.home / ENGINE_ADMIN_KEY),
    }
