"""The services of a platform on one machine: what each is told, and in which order they end."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SERVICES = ("engine", "api", "credit", "gateway", "controller", "collector", "runner")
"""In the order that they start, and are replaced: the engine takes longest; who reads records of calls is new before
those who write them."""

WITHOUT_STORE = frozenset({"engine"})
"""Started while the database is still being migrated."""

PORTS = {"engine": 30000, "api": 8000, "gateway": 8001, "collector": 8003}
"""Preferred ports of those with a door."""

INTERNAL_PORTS = {name: 8010 + number for number, name in enumerate(SERVICES)}
"""Preferred ports of health and metrics."""

STOP_ORDER = (("runner",), ("controller",), ("credit", "gateway", "collector", "api"), ("engine",))
"""Those who make work end before those who serve it."""

HURRY_SECONDS = {"runner": 1.0, "controller": 20.0}
"""Beyond which a second SIGTERM follows the first, when the platform stops; 3 for the others. On a laptop a stop should
be quick: what is cut short is repeated at the next start."""

ROLL_SECONDS = 660.0
"""The same in a restart, where the successor works already and there is no haste."""

KILL_SECONDS = 15.0
"""From there to SIGKILL."""


@dataclass(frozen=True)
class Facts:
    """What services must know of the platform."""

    home: Path
    ports: Mapping[str, int]
    internal_ports: Mapping[str, int]
    database_url: str
    redis_url: str
    model_path: Path

    def url(self, service: str) -> str:
        """The door of a service."""
        return f"http://127.0.0.1:{self.ports[service]}"

    def internal_url(self, service: str) -> str:
        """Where a service tells of its health."""
        return f"http://127.0.0.1:{self.internal_ports[service]}"

    @property
    def keys_file(self) -> Path:
        """The key ring that signs agents' capabilities."""
        return self.home / "secrets" / "capability-keys.json"

    @property
    def token_file(self) -> Path:
        """The first administrator's bearer token."""
        return self.home / "secrets" / "admin-token"

    @property
    def engine_key_file(self) -> Path:
        """What opens the engine's inference routes: for the gateway, and for the controller's looks."""
        return self.home / "secrets" / "engine-api-key"

    @property
    def engine_admin_key_file(self) -> Path:
        """What opens the engine's control routes: for the controller alone."""
        return self.home / "secrets" / "engine-admin-key"

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
    }
    return shared | _own(service, facts)


def _own(service: str, facts: Facts) -> dict[str, str]:
    match service:
        case "api":
            return {"API_ADMIN_TOKEN_FILE": str(facts.token_file)}
        case "engine":
            return {
                "ENGINE_MODEL_PATH": str(facts.model_path),
                "ENGINE_API_KEY_FILE": str(facts.engine_key_file),
                "ENGINE_ADMIN_API_KEY_FILE": str(facts.engine_admin_key_file),
            }
        case "gateway":
            return {
                "GATEWAY_MODEL_PATH": str(facts.model_path),
                "GATEWAY_ENGINE_API_KEY_FILE": str(facts.engine_key_file),
            }
        case "runner":
            return {
                "RUNNER_GATEWAY_URL": facts.url("gateway"),
                "RUNNER_COLLECTOR_URL": facts.url("collector"),
                "RUNNER_WORK_FOLDER": str(facts.home / "attempts"),
                # Secrets, Postgres, Redis, weights and logs.
                "RUNNER_HIDDEN_PATHS": json.dumps([str(facts.home)]),
                # As long as a restart waits for attempts; a stop asks twice.
                "RUNNER_DRAIN_SECONDS": str(ROLL_SECONDS - 60),
                "RUNNER_SHUTDOWN_SECONDS": str(ROLL_SECONDS - 30),
            }
        case "controller":
            return {
                "CONTROLLER_ENGINE_URLS": json.dumps([facts.url("engine")] if "engine" in facts.ports else []),
                "CONTROLLER_ENGINE_API_KEY_FILE": str(facts.engine_key_file),
                "CONTROLLER_ENGINE_ADMIN_KEY_FILE": str(facts.engine_admin_key_file),
                "CONTROLLER_LOG_FOLDER": str(facts.logs),
                # The controller's trainers inherit these.
                "TRAINER_MODEL_PATH": str(facts.model_path),
                "TRAINER_FOLDER": str(facts.home / "weights"),
            }
        case _:
            return {}


def port_is_free(port: int) -> bool:
    """Whether a service could listen there now."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
