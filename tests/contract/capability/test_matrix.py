"""The access matrix: every route of every service with every kind of key, and the content of each refusal.

The routes are read from the applications themselves: one that no row names fails the first test.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.routing import Route

from leyden.libs.capability import KeyRing, sign, write_keys
from leyden.libs.contracts.api.tokens import ApiScope
from leyden.libs.contracts.capability import Capability, Scope
from leyden.libs.service import Checks, create_internal_app
from leyden.libs.store import access, tables
from leyden.libs.store.database import Database
from leyden.services.api.app import create_app as create_api
from leyden.services.api.settings import Settings as ApiSettings
from leyden.services.collector.app import create_collector
from leyden.services.collector.settings import Settings as CollectorSettings
from leyden.services.engine.app import create_engine_app
from leyden.services.engine.settings import Settings as EngineSettings
from leyden.services.gateway.app import create_app as create_gateway
from leyden.services.gateway.settings import Settings as GatewaySettings
from tests.fakes.chat_model import EOS
from tests.fakes.scripted_engine import ScriptedEngine, running
from tests.support import builders

AGENTS = ("nobody", "garbage", "expired", "other attempt", "other run", "own")
PEOPLE = ("read", "write", "admin", "attempts")
ENGINES = ("engine", "engine admin")
CALLERS = (*AGENTS, *PEOPLE, *ENGINES)
PROMPT = {"model": "m", "prompt": "hi", "max_tokens": 2}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
RESPONSE = {"model": "m", "input": "hi", "max_output_tokens": 2}

Statuses = dict[str, int]
Request = tuple[str, str]
"""Method and path with placeholders, as the application names them."""


@dataclass(frozen=True)
class Row:
    """The expected status for each kind of key at a route, and the request to send."""

    statuses: Statuses
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)


def everyone(status: int) -> Statuses:
    return dict.fromkeys(CALLERS, status)


def for_people(read: int, write: int, admin: int, attempts: int = 403) -> Statuses:
    return everyone(401) | {"read": read, "write": write, "admin": admin, "attempts": attempts}


def for_agents(own: int) -> Statuses:
    return everyone(401) | {"other attempt": 403, "other run": 403, "own": own}


def for_engine(**opens: int) -> Statuses:
    return everyone(401) | {name.replace("_", " "): status for name, status in opens.items()}


READ = Row(for_people(200, 200, 200))
REWARD = {"components": [{"name": "short", "grader": {"type": "length", "at_most": 9}}]}
JUDGE = {"name": "better", "grader": {"type": "relative_model", "provider": "judge", "model": "m", "rubric": "Why?"}}
DUEL = {
    "evaluation": "run-a.e1",
    "against": "run-a.e0",
    "reward": {"components": [JUDGE]},
    "pairs": [{"rollout": "a", "against": "b", "values": {"better": 1}}],
}
TOKEN = {"name": "ci", "scopes": ["read"]}
API = {
    ("GET", "/openapi.json"): Row(everyone(200)),
    ("GET", "/docs"): Row(everyone(200)),
    ("GET", "/docs/swagger-ui-bundle.js"): Row(everyone(200)),
    ("GET", "/docs/swagger-ui.css"): Row(everyone(200)),
    ("GET", "/docs/favicon.png"): Row(everyone(200)),
    # The console's page, without any data.
    ("GET", "/"): Row(everyone(200)),
    ("GET", "/assets/{name}"): Row(everyone(404)),
    # The body holds the token, and the header none.
    ("POST", "/v1/session"): Row(everyone(401), {"token": "unknown"}),
    ("DELETE", "/v1/session"): Row(everyone(204)),
    ("GET", "/v1/session"): READ,
    ("GET", "/v1/datasets"): READ,
    ("POST", "/v1/datasets"): Row(for_people(403, 422, 422)),
    ("GET", "/v1/datasets/{dataset_id}"): READ,
    ("GET", "/v1/datasets/{dataset_id}/tasks"): READ,
    ("DELETE", "/v1/datasets/{dataset_id}"): Row(for_people(403, 403, 409)),
    ("GET", "/v1/runs"): READ,
    ("POST", "/v1/runs"): Row(for_people(403, 404, 404), builders.run_document(dataset="nowhere")),
    ("GET", "/v1/runs/{run_id}"): READ,
    ("POST", "/v1/runs/{run_id}/pause"): Row(for_people(403, 200, 200)),
    ("POST", "/v1/runs/{run_id}/resume"): Row(for_people(403, 200, 200)),
    # The run's agents are the platform's to start, and it has no such attempt.
    ("POST", "/v1/runs/{run_id}/attempts"): Row(for_people(403, 409, 409, 409), {}),
    ("POST", "/v1/runs/{run_id}/attempts/{attempt_id}/heartbeat"): Row(for_people(403, 404, 404, 404)),
    ("POST", "/v1/runs/{run_id}/attempts/{attempt_id}/end"): Row(
        for_people(403, 409, 409, 409), {"outcome": "succeeded"}
    ),
    # This API knows no gateway.
    ("POST", "/v1/runs/{run_id}/playground"): Row(for_people(403, 409, 409), {"user": "hi"}),
    ("POST", "/v1/runs/{run_id}/cancel"): Row(for_people(403, 200, 200)),
    ("POST", "/v1/runs/{run_id}/prune"): Row(for_people(403, 403, 409)),
    ("DELETE", "/v1/runs/{run_id}"): Row(for_people(403, 403, 409)),
    ("GET", "/v1/runs/{run_id}/evaluations"): READ,
    ("POST", "/v1/runs/{run_id}/evaluations"): Row(for_people(403, 404, 404), {"dataset": "nowhere"}),
    ("GET", "/v1/runs/{run_id}/evaluations/{number}"): Row(for_people(404, 404, 404)),
    ("GET", "/v1/runs/{run_id}/causes"): READ,
    ("GET", "/v1/runs/{run_id}/duels"): READ,
    # The rollouts are none of these evaluations.
    ("POST", "/v1/runs/{run_id}/duels"): Row(for_people(403, 422, 422), DUEL),
    ("GET", "/v1/runs/{run_id}/steps"): READ,
    ("GET", "/v1/runs/{run_id}/metrics"): READ,
    ("GET", "/v1/runs/{run_id}/agents"): READ,
    ("GET", "/v1/runs/{run_id}/alarms"): READ,
    ("GET", "/v1/runs/{run_id}/policies"): READ,
    ("GET", "/v1/runs/{run_id}/tasks"): READ,
    ("GET", "/v1/runs/{run_id}/policies/{number}/files"): Row(for_people(404, 404, 404)),
    ("GET", "/v1/runs/{run_id}/policies/{number}/weights"): Row(for_people(404, 404, 404)),
    ("GET", "/v1/alarms"): READ,
    ("GET", "/v1/feedback"): READ,
    ("GET", "/v1/platform"): READ,
    ("GET", "/v1/runs/{run_id}/samples"): READ,
    ("GET", "/v1/rollouts"): READ,
    ("GET", "/v1/rollouts/{rollout_id}"): READ,
    ("GET", "/v1/rollouts/{rollout_id}/calls"): READ,
    ("GET", "/v1/rollouts/{rollout_id}/spans"): READ,
    ("GET", "/v1/rollouts/{rollout_id}/artifacts/{path}"): Row(for_people(404, 404, 404)),
    ("GET", "/v1/rollouts/{rollout_id}/trajectory"): READ,
    ("GET", "/v1/rollouts/{rollout_id}/calls/{call_id}/tokens"): Row(for_people(404, 404, 404)),
    ("GET", "/v1/groups/{group_id}"): READ,
    # A run must be named.
    ("GET", "/v1/comparison"): Row(for_people(422, 422, 422)),
    ("GET", "/v1/curves"): Row(for_people(422, 422, 422)),
    ("GET", "/v1/events"): Row(for_people(422, 422, 422)),
    ("POST", "/v1/rollouts/{rollout_id}/rewards"): Row(for_people(403, 201, 200), {"key": "k", "value": 1.0}),
    ("POST", "/v1/rollouts/{rollout_id}/feedback"): Row(
        for_people(403, 422, 422), {"key": "k", "component": "thumbs", "value": 1.0}
    ),
    ("POST", "/v1/rollouts/{rollout_id}/grades"): Row(for_people(403, 404, 404), {"reward": REWARD}),
    ("POST", "/v1/rollouts/{rollout_id}/regrades"): Row(for_people(403, 404, 404), {"reward": REWARD}),
    ("GET", "/v1/health"): READ,
    ("GET", "/v1/engines"): READ,
    ("GET", "/v1/pools"): READ,
    ("GET", "/v1/recipes"): READ,
    ("GET", "/v1/tokens"): Row(for_people(403, 403, 200)),
    ("POST", "/v1/tokens"): Row(for_people(403, 403, 201), TOKEN),
    ("POST", "/v1/tokens/{token_id}/rotate"): Row(for_people(403, 403, 201), {"grace_seconds": 3600}),
    ("DELETE", "/v1/tokens/{token_id}"): Row(for_people(403, 403, 204)),
    ("GET", "/v1/audit"): Row(for_people(403, 403, 200)),
}
GATEWAY = {
    ("POST", "/r/{rollout}/{attempt}/v1/chat/completions"): Row(for_agents(200), CHAT),
    ("POST", "/r/{rollout}/{attempt}/v1/chat/completions/"): Row(for_agents(200), CHAT),
    ("POST", "/r/{rollout}/{attempt}/v1/responses"): Row(for_agents(200), RESPONSE),
    ("POST", "/r/{rollout}/{attempt}/v1/responses/"): Row(for_agents(200), RESPONSE),
    ("POST", "/r/{rollout}/{attempt}/v1/responses/input_tokens"): Row(for_agents(200), RESPONSE),
    ("POST", "/r/{rollout}/{attempt}/v1/responses/compact"): Row(for_agents(200), RESPONSE),
    ("GET", "/r/{rollout}/{attempt}/v1/responses/{response_id}"): Row(for_agents(404)),
    ("DELETE", "/r/{rollout}/{attempt}/v1/responses/{response_id}"): Row(for_agents(404)),
    ("POST", "/r/{rollout}/{attempt}/v1/conversations"): Row(for_agents(200), {}),
    **{
        (method, "/r/{rollout}/{attempt}/v1/conversations/{conversation_id}" + path): Row(for_agents(404))
        for method, path in [
            *((method, "") for method in ("GET", "POST", "DELETE")),
            *((method, "/items") for method in ("GET", "POST")),
            *((method, "/items/{item_id}") for method in ("GET", "DELETE")),
        ]
    },
    ("GET", "/r/{rollout}/{attempt}/v1/responses/{response_id}/input_items"): Row(for_agents(404)),
    ("POST", "/r/{rollout}/{attempt}/v1/responses/{response_id}/cancel"): Row(for_agents(404)),
    ("POST", "/r/{rollout}/{attempt}/v1/completions"): Row(for_agents(200), PROMPT),
    ("POST", "/r/{rollout}/{attempt}/v1/completions/"): Row(for_agents(200), PROMPT),
    ("POST", "/r/{rollout}/{attempt}/v1/messages"): Row(for_agents(200), CHAT),
    ("POST", "/r/{rollout}/{attempt}/v1/messages/"): Row(for_agents(200), CHAT),
    ("POST", "/r/{rollout}/{attempt}/v1/messages/count_tokens"): Row(for_agents(200), CHAT),
    ("POST", "/r/{rollout}/{attempt}/v1/embeddings"): Row(for_agents(400), {}),
    ("POST", "/r/{rollout}/{attempt}/v1/embeddings/"): Row(for_agents(400), {}),
    ("GET", "/r/{rollout}/{attempt}/v1/models"): Row(for_agents(200)),
    ("GET", "/r/{rollout}/{attempt}/v1/models/"): Row(for_agents(200)),
    ("GET", "/r/{rollout}/{attempt}/v1/models/{name}"): Row(for_agents(200)),
}


def by_key_alone(table: Mapping[Request, Row], base: str) -> dict[Request, Row]:
    """The same routes without an attempt in the path: every valid key opens its own attempt's."""
    rows = {}
    for (method, path), row in table.items():
        own = row.statuses["own"]
        rows[method, path.removeprefix(base)] = Row(
            {**row.statuses, "other attempt": own, "other run": own}, row.body, row.headers
        )
    return rows


OLLAMA = ("POST", "/r/{rollout}/{attempt}/api/chat")
AZURE = "/r/{rollout}/{attempt}/openai"
OPENAI = {request: row for request, row in GATEWAY.items() if "/messages" not in request[1]}
GATEWAY |= {
    (method, path.replace("/r/{rollout}/{attempt}/v1", base)): row
    for base in (AZURE, f"{AZURE}/v1")
    for (method, path), row in OPENAI.items()
}
GATEWAY |= {
    ("POST", f"{AZURE}/deployments/{{deployment}}/chat/completions"): Row(for_agents(200), CHAT),
    ("POST", f"{AZURE}/deployments/{{deployment}}/completions"): Row(for_agents(200), PROMPT),
    ("POST", f"{AZURE}/deployments/{{deployment}}/embeddings"): Row(for_agents(400), {}),
}
GATEWAY[OLLAMA] = Row(for_agents(200), {**CHAT, "options": {"num_predict": 2}})
CONTENT = {"contents": [{"parts": [{"text": "hi"}]}], "generationConfig": {"maxOutputTokens": 2}}
GATEWAY |= {
    ("POST", f"/r/{{rollout}}/{{attempt}}/{{version}}/models/{{model}}:{action}"): Row(for_agents(200), CONTENT)
    for action in ("generateContent", "streamGenerateContent", "countTokens")
}
EMBED = [":embedContent", ":batchEmbedContents"]
GATEWAY |= {
    ("POST", f"/r/{{rollout}}/{{attempt}}/{path}"): Row(for_agents(400), {})
    for path in ("api/embed", *(f"{{version}}/models/{{model}}{action}" for action in EMBED))
}
GATEWAY |= by_key_alone(GATEWAY, "/r/{rollout}/{attempt}")
# A key of an attempt opens it as little, whatever its scopes.
GATEWAY["POST", "/playground"] = Row(for_agents(403), CHAT)
PROTOBUF = {"content-type": "application/x-protobuf"}
COLLECTOR = {
    ("POST", "/r/{rollout_id}/{attempt}/v1/traces"): Row(for_agents(200), b"", PROTOBUF),
    ("POST", "/r/{rollout_id}/{attempt}/v1/logs"): Row(for_agents(200), b"", PROTOBUF),
    ("POST", "/r/{rollout_id}/{attempt}/reward"): Row(for_agents(200), {"value": 1.0}),
}
LANGSMITH = "/r/{rollout_id}/{attempt}/langsmith"
FORM = {"content-type": "multipart/form-data; boundary=b"}
COLLECTOR |= {
    ("GET", f"{LANGSMITH}/info"): Row(for_agents(200)),
    ("POST", f"{LANGSMITH}/runs/multipart"): Row(for_agents(202), b"--b--", FORM),
    ("POST", f"{LANGSMITH}/runs/batch"): Row(for_agents(202), {}),
    ("POST", f"{LANGSMITH}/runs"): Row(for_agents(202), {}),
    ("PATCH", f"{LANGSMITH}/runs/{{run_id}}"): Row(for_agents(202), {}),
}
COLLECTOR |= by_key_alone(COLLECTOR, "/r/{rollout_id}/{attempt}")
GENERATE = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
INFERENCE, CONTROL, OPEN = Row(for_engine(engine=200)), Row(for_engine(engine_admin=200), {}), Row(everyone(200))
ENGINE = {
    **dict.fromkeys(
        [("GET", path) for path in ("/health", "/health_generate", "/readyz", "/metrics", "/healthz")], OPEN
    ),
    ("POST", "/generate"): Row(for_engine(engine=200), GENERATE),
    **dict.fromkeys(
        [("GET", f"/{get}{what}") for get in ("", "get_") for what in ("model_info", "server_info")], INFERENCE
    ),
    **dict.fromkeys([("GET", "/v1/loads"), ("GET", "/v1/models")], INFERENCE),
    **dict.fromkeys([("GET", "/flush_cache"), ("POST", "/flush_cache")], CONTROL),
    **dict.fromkeys(
        [("POST", f"/{name}") for name in ("abort_request", "pause_generation", "continue_generation")], CONTROL
    ),
    ("POST", "/update_weights_from_disk"): Row(for_engine(engine_admin=400), {"model_path": "/nowhere"}),
    ("POST", "/load_lora_adapter"): Row(for_engine(engine_admin=400), {"lora_name": "a", "lora_path": "/nowhere"}),
    ("POST", "/unload_lora_adapter"): Row(for_engine(engine_admin=400), {"lora_name": "a"}),
    ("POST", "/update_weight_version"): Row(for_engine(engine_admin=200), {"new_version": "run-a:1"}),
}
INTERNAL = dict.fromkeys([("GET", "/healthz"), ("GET", "/readyz"), ("GET", "/metrics")], OPEN)
# The API comes last: it cancels the run, which ends the attempts that the endpoints serve.
TABLES: dict[str, dict[Request, Row]] = {
    "gateway": GATEWAY, "collector": COLLECTOR, "engine": ENGINE, "internal": INTERNAL, "api": API
}  # fmt: skip


def routes(app: FastAPI) -> set[Request]:
    """Every method and path that an application answers."""
    routes = [route for route in app.routes if isinstance(route, Route)]
    assert routes == app.routes
    found = {(method, route.path.replace(":path", "")) for route in routes for method in route.methods or ()}
    return {(method, path) for method, path in found if method != "HEAD"}


@dataclass
class Stage:
    """Every service's application in this process, keys of every kind, and what the paths name."""

    apps: dict[str, FastAPI]
    keys: dict[str, str | None]
    names: dict[str, str]
    clients: dict[str, httpx.AsyncClient]

    async def ask(self, service: str, request: Request, caller: str, names: Mapping[str, str] = {}) -> httpx.Response:
        row, (method, path) = TABLES[service][request], request
        headers = dict(row.headers)
        if self.keys[caller] is not None:
            headers["authorization"] = f"Bearer {self.keys[caller]}"
        content = {"content": row.body} if isinstance(row.body, bytes) else {"json": row.body}
        url = path.format(**{**self.names, **names})
        return await self.clients[service].request(
            method, url, headers=headers, **(content if row.body is not None else {})
        )


@pytest.fixture
async def stage(database: Database, redis_url: str, tmp_path: Path, tiny_model: Path) -> AsyncIterator[Stage]:
    write_keys(tmp_path / "keys.json")
    ring = KeyRing(tmp_path / "keys.json")
    runs = [await builders.add_run(database) for _ in range(2)]
    rollouts = []
    for run in runs:
        _, siblings = await builders.add_group(database, run)
        rollouts += siblings
    for rollout in rollouts:
        await builders.add_attempt(database, rollout)
    own, sibling, stranger, _ = rollouts
    keys = {
        "nobody": None,
        "garbage": "no.such.key",
        "expired": key(ring, own, seconds=-60),
        "other attempt": key(ring, sibling),
        "other run": key(ring, stranger),
        "own": key(ring, own),
        **{str(scope): await token(database, scope) for scope in ApiScope},
        "engine": "e" * 32,
        "engine admin": "f" * 32,
    }
    names = {
        "dataset_id": runs[0].dataset_id,
        "run_id": runs[0].id,
        "rollout_id": own.id,
        "path": "missing.txt",
        "group_id": own.group_id,
        "call_id": "c-none",
        "rollout": own.id,
        "attempt": "1",
        "number": "1",
        "name": "any",
        "deployment": "any",
        "version": "v1beta",
        "model": "any",
        "response_id": "resp_none",
        "conversation_id": "conv_none",
        "item_id": "msg_none",
        "token_id": "token-of-read",
        "attempt_id": "lease-none",
    }
    shared: dict[str, Any] = {
        "database_url": database.dsn, "redis_url": redis_url, "capability_keys_file": ring_file(tmp_path)
    }  # fmt: skip
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(running(_engine(run.id))) for run in runs]
        engine_urls = [engine.url for engine in engines]
        apps = {
            "api": create_api(ApiSettings(**shared)),
            "gateway": create_gateway(GatewaySettings(model_path=tiny_model, engine_urls=engine_urls, **shared)),
            "collector": create_collector(CollectorSettings(**shared)),
            "engine": create_engine_app(
                EngineSettings(model_path=tiny_model, threads=1, api_key="e" * 32, admin_api_key="f" * 32)
            ),
            "internal": create_internal_app(Checks()),
        }
        clients = {name: await stack.enter_async_context(client_of(app)) for name, app in apps.items()}
        yield Stage(apps, keys, names, clients)


def ring_file(folder: Path) -> Path:
    return folder / "keys.json"


def _engine(run_id: str) -> ScriptedEngine:
    return ScriptedEngine(lambda _: [40, EOS], lambda ids: "a" * len(ids), f"{run_id}:0")


@asynccontextmanager
async def client_of(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here", timeout=60) as client:
            yield client


def key(ring: KeyRing, rollout: tables.Rollout, *, seconds: int = 600) -> str:
    return sign(
        ring,
        Capability(
            run_id=rollout.run_id,
            rollout_id=rollout.id,
            attempt=1,
            scopes=frozenset(Scope),
            expires_at=int(time.time()) + seconds,
        ),
    )


async def token(database: Database, scope: ApiScope) -> str:
    secret = f"leyden_{scope}".ljust(40, "x")
    async with database.session() as session:
        await access.add_token(session, f"token-of-{scope}", str(scope), secret, [scope])
    return secret


async def test_every_route_of_every_service_has_a_row(stage: Stage) -> None:
    assert {name: routes(app) for name, app in stage.apps.items()} == {
        name: set(table) for name, table in TABLES.items()
    }


def _ordered(table: dict[Request, Row]) -> Iterator[Request]:
    """Sorts requests that end a run or revoke a token last, because all others need them."""
    yield from sorted(table, key=lambda request: (request[1].endswith("{token_id}"), request[1].endswith("/cancel")))


async def test_every_caller_gets_from_every_route_exactly_what_it_may(stage: Stage) -> None:
    got: dict[str, dict[Request, Statuses]] = {}
    for service, table in TABLES.items():
        got[service] = {}
        for request in _ordered(table):
            answers = {caller: await stage.ask(service, request, caller) for caller in CALLERS}
            got[service][request] = {caller: answer.status_code for caller, answer in answers.items()}
    wanted = {service: {request: row.statuses for request, row in table.items()} for service, table in TABLES.items()}
    assert _differences(got, wanted) == []


def _differences(got: dict[str, dict[Request, Statuses]], wanted: dict[str, dict[Request, Statuses]]) -> list[str]:
    return [
        f"{service} {' '.join(request)} for {caller}: {got[service][request][caller]}, not {status}"
        for service, table in wanted.items()
        for request, statuses in table.items()
        for caller, status in statuses.items()
        if got[service][request][caller] != status
    ]


NOWHERE = {
    "dataset_id": "dataset-nowhere",
    "run_id": "run-nowhere",
    "rollout_id": "run-nowhere.0.0",
    "rollout": "run-nowhere.0.0",
    "token_id": "token-nowhere",
}


def _refused(rows: Mapping[Request, Row]) -> Iterable[tuple[Request, str]]:
    for request, row in rows.items():
        yield from ((request, caller) for caller, status in row.statuses.items() if status in {401, 403})


async def test_a_refusal_is_the_same_whether_what_it_names_exists_or_not(stage: Stage) -> None:
    other = {**NOWHERE, "number": "7"}
    for service in ("api", "gateway", "collector"):
        for request, caller in _refused(TABLES[service]):
            there, nowhere = [await stage.ask(service, request, caller, names) for names in ({}, other)]
            assert (there.status_code, there.content) == (nowhere.status_code, nowhere.content), (request, caller)
            assert stage.names["run_id"] not in there.text, (request, caller)


async def test_an_agents_key_reveals_nothing_about_other_rollouts(stage: Stage, database: Database) -> None:
    async with database.read() as session:
        rollout = await session.get_one(tables.Rollout, stage.names["rollout_id"])
    sibling = dict.fromkeys(("rollout", "rollout_id"), rollout.id[:-1] + "1")
    later = {"attempt": "2"}
    for service in ("gateway", "collector"):
        for request in [one for one in TABLES[service] if "{attempt}" in one[1]]:
            answers = [await stage.ask(service, request, "own", names) for names in (sibling, NOWHERE, later)]
            assert {answer.status_code for answer in answers} == {403}, request
            assert len({answer.content for answer in answers}) == 1, request


async def test_a_clock_that_jumps_ahead_refuses_no_live_agent(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    right = time.time
    rewards = [request for request in TABLES["collector"] if request[1].endswith("{attempt}/reward")]
    assert [(await stage.ask("collector", request, "own")).status_code for request in rewards] == [200]
    monkeypatch.setattr(time, "time", lambda: right() + 86_400)
    assert [(await stage.ask("collector", request, "own")).status_code for request in rewards] == [200]
    assert [(await stage.ask("collector", request, "expired")).status_code for request in rewards] == [401]
