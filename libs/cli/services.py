"""The services of a platform on one machine: what each is told, and in which order they end."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from libs.cli.record import PlatformRecord

PORTS = {
    "engine": 30000,
    "api": 8000,
    "gateway": 8001,
    "controller": 8002,
    "collector": 8003,
    "credit": 8004,
    "runner": 8005,
}
"""Preferred ports, in the order that services start: the engine takes longest."""

STOP_ORDER = (("runner",), ("controller",), ("credit", "gateway", "collector", "api"), ("engine",))
"""Those who make work end before those who serve it."""

STOP_SECONDS = {"runner": 20.0, "controller": 30.0}
"""Beyond which SIGTERM is followed by SIGKILL; 10 for the others."""


@dataclass(frozen=True)
class Facts:
    """What services must know of the platform."""

    home: Path
    ports: Mapping[str, int]
    database_url: str
    redis_url: str
    model_path: Path

    def url(self, service: str) -> str:
        """Where a service listens."""
        return f"http://127.0.0.1:{self.ports[service]}"

    @property
    def keys_file(self) -> Path:
        """The key ring that signs agents' capabilities."""
        return self.home / "secrets" / "capability-keys.json"

    @property
    def token_file(self) -> Path:
        """The first administrator's bearer token."""
        return self.home / "secrets" / "admin-token"

    @property
    def logs(self) -> Path:
        """One file a service."""
        return self.home / "logs"


def environment(service: str, facts: Facts) -> dict[str, str]:
    """The variables of one service, beside those it inherits."""
    shared = {
        # Services share the cores: a thread that spins while it waits slows down the others many times.
        "OMP_WAIT_POLICY": "passive",
        "LEYDEN_DATABASE_URL": facts.database_url,
        "LEYDEN_REDIS_URL": facts.redis_url,
        "LEYDEN_CAPABILITY_KEYS_FILE": str(facts.keys_file),
        f"{service.upper()}_HOST": "127.0.0.1",
        f"{service.upper()}_PORT": str(facts.ports[service]),
    }
    return shared | _own(service, facts)


def _own(service: str, facts: Facts) -> dict[str, str]:
    match service:
        case "api":
            return {"API_ADMIN_TOKEN_FILE": str(facts.token_file)}
        case "engine":
            return {"ENGINE_MODEL_PATH": str(facts.model_path)}
        case "gateway":
            return {"GATEWAY_MODEL_PATH": str(facts.model_path)}
        case "runner":
            return {
                "RUNNER_GATEWAY_URL": facts.url("gateway"),
                "RUNNER_COLLECTOR_URL": facts.url("collector"),
                "RUNNER_WORK_FOLDER": str(facts.home / "attempts"),
                # Secrets, Postgres, Redis, weights and logs.
                "RUNNER_HIDDEN_PATHS": json.dumps([str(facts.home)]),
                # On a laptop a stop should be quick; what is cut short is repeated at the next start.
                "RUNNER_DRAIN_SECONDS": "1",
            }
        case "controller":
            return {
                "CONTROLLER_ENGINE_URLS": json.dumps([facts.url("engine")]),
                "CONTROLLER_LOG_FOLDER": str(facts.logs),
                # The controller's trainers inherit these.
                "TRAINER_MODEL_PATH": str(facts.model_path),
                "TRAINER_FOLDER": str(facts.home / "weights"),
            }
        case _:
            return {}


def ready_path(service: str) -> str:
    """Where a service tells that it can work; the engine speaks SGLang's protocol."""
    return "/health" if service == "engine" else "/readyz"


def choose_ports(last: PlatformRecord | None, *, free: bool) -> dict[str, int]:
    """A port for each service: that of the last start, else the preferred one, else any free one.

    Args: free: whether any free ports will do at once, for platforms beside each other
    """
    chosen: dict[str, int] = {}
    for service, preferred in PORTS.items():
        before = last.services.get(service) if last else None
        candidates = [int(before.url.rpartition(":")[2])] if before else []
        candidates += [] if free else [preferred]
        usable = [port for port in candidates if port not in chosen.values() and port_is_free(port)]
        chosen[service] = usable[0] if usable else _free_port(set(chosen.values()))
    return chosen


def port_is_free(port: int) -> bool:
    """Whether a service could listen there now."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _free_port(taken: set[int]) -> int:
    while True:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = int(listener.getsockname()[1])
        if port not in taken:
            return port
