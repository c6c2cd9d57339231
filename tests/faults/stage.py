"""A whole platform whose Postgres, Redis and engine stand behind proxies, training a bandit while they fail."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx
import psycopg
from psycopg import sql

from leyden.libs.cli.local.platform import Options, Platform
from leyden.libs.cli.local.services import LOGS
from leyden.libs.client import Client
from leyden.libs.contracts.api.runs import Run
from leyden.libs.embedded.servers import EmbeddedPostgres, EmbeddedRedis
from tests.campaigns.soak import bandit_run
from tests.faults.proxy import FaultProxy
from tests.invariants import lost_calls, violations
from tests.support.shared import open_to_agents
from tests.support.tiny_model import make_tiny_model
from tests.support.waiting import until

ROLE = "services"
ENDED = {"completed", "failed", "cancelled"}
PATIENCE_SECONDS = 240.0
SERVICES = ("api", "gateway", "controller", "collector", "credit", "runner")
EACH_ITS_OWN = {"lease expired"}
"""Warnings that speak of one rollout each, however many there are."""


@dataclass
class Stage:
    """Args: database: of the superuser, past the proxy; received: what agents were answered, one id a line"""

    platform: Platform
    client: Client
    servers: tuple[EmbeddedPostgres, EmbeddedRedis]
    database: str
    redis: str
    postgres_proxy: FaultProxy
    redis_proxy: FaultProxy
    engine_proxy: FaultProxy
    received: Path

    def execute(self, statement: str) -> None:
        """Runs SQL as the superuser, past the proxy, in a read-only database too."""
        writing = "-c default_transaction_read_only=off"
        with psycopg.connect(self.database, autocommit=True, options=writing) as connection:
            connection.execute(statement.encode())

    def train(self, steps: int) -> Run:
        """Begins a run of 16 rollouts a step; returns when its first rollouts have finished."""
        small = {"groups_per_step": 2}
        run = self.client.create_run(bandit_run(self.received, f"ordeal-{steps}", steps, sampling=small))
        self.wait_for_rollouts(run.id, 8)
        return run

    def wait_for_rollouts(self, run_id: str, more: int) -> None:
        """Until so many more rollouts have finished; a run that ends before is too short for the test."""
        goal = self._finished(run_id) + more
        until(lambda: self._finished(run_id) >= goal, f"{more} more rollouts of {run_id}")

    def _finished(self, run_id: str) -> int:
        run = self.client.run(run_id)
        assert run.phase not in ENDED, f"the run ended too early: {run.phase} {run.reason}"
        return run.progress.rollouts.get("finished", 0)

    def ended(self, run_id: str) -> Run:
        """The run, once it has ended."""
        until(lambda: self.client.run(run_id).phase in ENDED, f"the end of {run_id}")
        return self.client.run(run_id)

    def damage(self, run_id: str) -> dict[str, list[Any]]:
        """Everything that was lost or doubled."""
        lost = lost_calls(self.database, run_id, self.received)
        return violations(self.database, run_id) | ({"lost calls": lost} if lost else {})

    def readiness(self, service: str) -> tuple[int, dict[str, str]]:
        """Status and checks of a service's /readyz."""
        url = f"{self.platform.facts.internal_url(service)}/readyz"
        # Tests poll it, and loading the certificates of HTTPS would take 38 ms of CPU time for each poll.
        answer = httpx.get(url, timeout=30, trust_env=False, verify=False)
        return answer.status_code, answer.json()["checks"]

    def logs(self) -> str:
        """Everything that services have logged."""
        return "".join(file.read_text() for file in sorted((self.platform.home / LOGS).glob("*.log")))

    def repeated(self, times: int) -> dict[str, int]:
        """Warnings and errors of a service that were said more often than this, and how often."""
        said: Counter[str] = Counter()
        for file in (self.platform.home / LOGS).glob("*.log"):
            lines = [json.loads(line) for line in file.read_text().splitlines() if line.startswith("{")]
            loud = [line["event"] for line in lines if line["level"] in {"warning", "error"}]
            said.update(f"{file.stem}: {event}" for event in loud if event not in EACH_ITS_OWN)
        return {event: count for event, count in said.items() if count > times}


@contextmanager
def stage(folder: Path, environment: dict[str, dict[str, str]] | None = None) -> Iterator[Stage]:
    """The platform with its dependencies behind proxies; its Postgres role is an ordinary one, not the superuser.

    Beside the one engine it is told of another that never answers.

    Args: environment: further variables by service
    """
    with ExitStack() as stack:
        postgres, redis = EmbeddedPostgres(folder / "postgres", durable=False), EmbeddedRedis(folder / "redis")
        stack.callback(postgres.stop)
        stack.callback(redis.stop)
        database, cache = postgres.start(), redis.start()
        proxies = [FaultProxy.of(database), FaultProxy.of(cache), FaultProxy(), FaultProxy()]
        postgres_proxy, redis_proxy, engine_proxy, dead_engine = (stack.enter_context(proxy) for proxy in proxies)
        options = Options(
            model_path=make_tiny_model(folder / "tiny"),
            free_ports=True,
            environment=_variables([engine_proxy, dead_engine], environment or {}),
            database_url=postgres_proxy.url(_ordinary(database)),
            redis_url=redis_proxy.url(cache),
        )
        platform = Platform(folder / "home", options)
        platform.start()
        stack.callback(platform.stop)
        platform.ready(2 * PATIENCE_SECONDS)
        engine_proxy.target = ("127.0.0.1", platform.facts.ports["engine"])
        client = stack.enter_context(Client(platform.facts.url("api"), platform.token, patience_seconds=60))
        client.upload_dataset("bandit", [{"number": number} for number in range(16)])
        received, servers = open_to_agents(folder / "received.log"), (postgres, redis)
        yield Stage(platform, client, servers, database, cache, postgres_proxy, redis_proxy, engine_proxy, received)


def _variables(engines: Sequence[FaultProxy], further: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """By service: everything is noticed within seconds, so that a test need not wait longer."""
    quick = {"LEYDEN_DATABASE_ANSWER_SECONDS": "3", "LEYDEN_REDIS_ANSWER_SECONDS": "1"}
    variables = {service: dict(quick) for service in ("api", "collector", "credit", "trainer", "engine")}
    variables["gateway"] = quick | {"GATEWAY_ENGINE_SILENCE_SECONDS": "5"}
    variables["runner"] = quick | {"RUNNER_LEASE_SECONDS": "8"}
    variables["controller"] = quick | {
        "CONTROLLER_ENGINE_URLS": json.dumps([f"http://127.0.0.1:{proxy.port}" for proxy in engines]),
        "CONTROLLER_ENGINE_ANSWER_SECONDS": "2",
        "CONTROLLER_ENGINE_UPDATE_SECONDS": "20",
    }
    for service in ("engine", "trainer"):
        variables[service]["OMP_NUM_THREADS"] = "1"
    return variables | {service: variables[service] | more for service, more in further.items()}


def _ordinary(dsn: str) -> str:
    """The DSN of an ordinary role that owns the database."""
    parts = urlsplit(dsn)
    assert parts.password is not None
    database = sql.Identifier(parts.path.removeprefix("/"))
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(sql.Identifier(ROLE), sql.Literal(parts.password))
        )
        connection.execute(sql.SQL("ALTER DATABASE {} OWNER TO {}").format(database, sql.Identifier(ROLE)))
    return urlunsplit(parts._replace(netloc=f"{ROLE}:{parts.password}@{parts.hostname}:{parts.port}"))
