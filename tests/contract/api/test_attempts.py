"""External agents: clients lease attempts of a run, renew them and report their ends, by the API alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select, update
from starlette.applications import Starlette

from leyden.libs.capability import KeyRing, verify, write_keys
from leyden.libs.contracts.capability import Scope
from leyden.libs.queue import leases
from leyden.libs.queue.notifications import Notifications
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.services.api.app import create_app
from leyden.services.api.attempts.context import attempt_context
from leyden.services.api.settings import Settings
from tests.fakes.served import served
from tests.support import builders
from tests.support.shared import refusing_port
from tests.support.waiting import eventually

EXTERNAL = {"type": "external", "lease_seconds": 30.0, "timeout_seconds": 100.0}


def external_document(**changes: Any) -> dict[str, Any]:
    document = {**builders.run_document(), "runner": EXTERNAL, **changes}
    return {name: value for name, value in document.items() if name != "agent" or "agent" in changes}


@pytest.fixture
def endpoints() -> Iterator[str]:
    """A process that answers in the place of gateway and collector."""
    with served(Starlette()) as url:
        yield url


@pytest.fixture
async def http(postgres_dsn: str, redis_url: str, tmp_path: Path, endpoints: str) -> AsyncIterator[httpx.AsyncClient]:
    async for client in api_of(postgres_dsn, redis_url, tmp_path, endpoints):
        yield client


async def api_of(dsn: str, redis_url: str, folder: Path, endpoints: str | None) -> AsyncIterator[httpx.AsyncClient]:
    write_keys(folder / "keys.json")
    app = create_app(
        Settings(
            database_url=dsn,
            redis_url=redis_url,
            admin_token="secret-of-tests",
            capability_keys_file=folder / "keys.json",
            gateway_url=endpoints,
            collector_url=endpoints,
        )
    )
    headers = {"authorization": "Bearer secret-of-tests"}
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://api", headers=headers, timeout=60) as client:
            yield client


async def waiting_run(database: Database, size: int = 2, **changes: Any) -> tuple[tables.Run, list[tables.Rollout]]:
    run = await builders.add_run(database, config=external_document(**changes))
    _, rollouts = await builders.add_group(database, run, size=size)
    return run, rollouts


async def lease(http: httpx.AsyncClient, run_id: str, **fields: Any) -> dict[str, Any]:
    answer = await http.post(f"/v1/runs/{run_id}/attempts", json=fields)
    assert answer.status_code == 200, answer.text
    leased: dict[str, Any] = answer.json()
    return leased


async def end(http: httpx.AsyncClient, leased: dict[str, Any], **fields: Any) -> httpx.Response:
    address = f"/v1/runs/{leased['run_id']}/attempts/{leased['id']}/end"
    return await http.post(address, json={"outcome": "succeeded", **fields})


async def beat(http: httpx.AsyncClient, leased: dict[str, Any]) -> dict[str, Any]:
    answer = await http.post(f"/v1/runs/{leased['run_id']}/attempts/{leased['id']}/heartbeat")
    assert answer.status_code == 200, answer.text
    said: dict[str, Any] = answer.json()
    return said


async def outcomes(database: Database) -> list[tables.Outcome]:
    async with database.read() as session:
        return list(await session.scalars(select(tables.Outcome).order_by(tables.Outcome.rollout_id)))


async def move(database: Database, leased: dict[str, Any], **moments: timedelta) -> None:
    """Moves moments of an attempt to the past."""
    table = tables.Attempt
    async with database.session() as session:
        values = {name: func.clock_timestamp() - age for name, age in moments.items()}
        await session.execute(update(table).where(table.lease_id == leased["id"]).values(values))


async def test_a_lease_has_the_task_and_the_variables_that_a_runner_gives(
    http: httpx.AsyncClient, database: Database, tmp_path: Path, endpoints: str
) -> None:
    agent = {"environment": {"QUESTION": "{task.question}"}}
    run, [rollout] = await waiting_run(database, 1, agent=agent)
    leased = await lease(http, run.id, worker="notebook", key="one")
    assert (leased["rollout_id"], leased["number"], leased["task"]) == (rollout.id, 1, {"question": "2+2"})
    assert leased["base_url"] == f"{endpoints}/v1"
    variables, place = leased["environment"], f"{endpoints}/r/{rollout.id}/1"
    assert variables["OPENAI_BASE_URL"] == f"{place}/v1" and variables["QUESTION"] == "2+2"
    assert variables["OPENAI_API_KEY"] == variables["ANTHROPIC_API_KEY"] == leased["api_key"]
    assert variables["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] == f"{place}/v1/traces"
    ring = KeyRing(tmp_path / "keys.json")
    named = verify(ring, leased["api_key"], rollout_id=None, attempt=None, scope=Scope.MODEL)
    assert (named.run_id, named.rollout_id, named.attempt) == (run.id, rollout.id, 1)
    [shown] = (await http.get(f"/v1/rollouts/{rollout.id}")).json()["attempts"]
    assert (shown["owner"], shown["state"]) == ("notebook/one", "running")


async def test_a_repeated_request_gets_the_same_attempt_and_another_one_another(
    http: httpx.AsyncClient, database: Database
) -> None:
    run, _ = await waiting_run(database)
    first, again = [await lease(http, run.id, key="a") for _ in range(2)]
    other = await lease(http, run.id, key="b")
    assert first["id"] == again["id"] != other["id"] and first["rollout_id"] != other["rollout_id"]
    empty = await http.post(f"/v1/runs/{run.id}/attempts", json={"key": "c"})
    assert (empty.status_code, empty.content) == (204, b"")
    entries = (await http.get("/v1/audit", params={"action": "lease_attempt"})).json()["items"]
    assert [(one["subject"], one["detail"]["attempt"]) for one in entries] == [(run.id, 1)] * 2


async def test_clients_that_ask_at_once_get_different_rollouts(http: httpx.AsyncClient, database: Database) -> None:
    run, rollouts = await waiting_run(database, 4)
    asked = [http.post(f"/v1/runs/{run.id}/attempts", json={"wait_seconds": 2.0}) for _ in range(6)]
    answers = await asyncio.gather(*asked)
    got = [answer.json()["rollout_id"] for answer in answers if answer.status_code == 200]
    assert sorted(got) == sorted(rollout.id for rollout in rollouts)
    assert sorted(answer.status_code for answer in answers) == [200] * 4 + [204] * 2


async def test_a_waiting_request_gets_a_task_that_becomes_due(http: httpx.AsyncClient, database: Database) -> None:
    run = await builders.add_run(database, config=external_document())
    asked = asyncio.create_task(lease(http, run.id, wait_seconds=30.0))
    await asyncio.sleep(0)
    _, [rollout] = await builders.add_group(database, run, size=1)
    assert (await asked)["rollout_id"] == rollout.id


async def test_an_end_counts_once_and_its_repeat_changes_nothing(http: httpx.AsyncClient, database: Database) -> None:
    run, [rollout] = await waiting_run(database, 1)
    leased = await lease(http, run.id)
    said = {"output": "4", "rewards": {"exact": 1.0, "short": 0.5}, "facts": {"turns": 3}}
    first, again = [await end(http, leased, **said) for _ in range(2)]
    assert first.status_code == again.status_code == 200 and first.json() == again.json()
    assert (first.json()["kind"], first.json()["reward"]) == ("succeeded", 1.5)
    [stored] = await outcomes(database)
    assert (stored.rollout_id, stored.attempt, stored.kind, stored.reward) == (rollout.id, 1, "succeeded", 1.5)
    assert stored.facts == {"turns": 3, "rewards": {"exact": 1.0, "short": 0.5}} and stored.stdout_tail == "4"
    another = await end(http, leased, output="5")
    assert (another.status_code, another.json()["cause"]) == (409, "ended")
    assert (await beat(http, leased))["stop"] == "ended"
    entries = (await http.get("/v1/audit", params={"action": "end_attempt"})).json()["items"]
    assert [one["detail"] for one in entries] == [{"rollout_id": rollout.id, "attempt": 1, "kind": "succeeded"}]


async def test_rewards_whose_sum_is_none_are_refused_and_the_attempt_goes_on(
    http: httpx.AsyncClient, database: Database
) -> None:
    run, _ = await waiting_run(database, 1)
    leased = await lease(http, run.id)
    rewards = {"exact": 1e6, "short": 1.0}
    refused = await end(http, leased, rewards=rewards)
    assert refused.status_code == 422 and "is beyond 1,000,000: send smaller ones" in refused.text
    assert (await beat(http, leased))["stop"] is None and await outcomes(database) == []
    assert (await end(http, leased, rewards=rewards, reward=2.0)).json()["reward"] == 2.0


async def test_a_heartbeat_extends_the_lease_and_a_late_end_counts_for_nothing(
    http: httpx.AsyncClient, database: Database
) -> None:
    run, [rollout] = await waiting_run(database, 1)
    leased = await lease(http, run.id)
    await move(database, leased, lease_expires_at=timedelta(seconds=1))
    said = await beat(http, leased)
    assert said["stop"] is None
    async with database.session() as session:
        assert await leases.expire_overdue(session) == []
    await move(database, leased, lease_expires_at=timedelta(seconds=1))
    async with database.session() as session:
        [expired] = await leases.expire_overdue(session)
    assert (expired.rollout_id, expired.attempt) == (rollout.id, 1)
    late = await end(http, leased, reward=1.0)
    assert (late.status_code, late.json()["cause"]) == (409, "lease_lost")
    assert "no heartbeat before its lease ended" in late.json()["detail"]
    assert (await beat(http, leased))["stop"] == "lease_lost" and await outcomes(database) == []


async def test_an_attempt_beyond_its_timeout_ends_as_one(http: httpx.AsyncClient, database: Database) -> None:
    run, _ = await waiting_run(database, runner={**EXTERNAL, "timeout_seconds": 1.0})
    late, silent = [await lease(http, run.id) for _ in range(2)]

    async def is_beyond() -> bool:
        return bool((await beat(http, silent))["stop"] == "timeout")

    await eventually(is_beyond)
    ended = await end(http, late, reward=1.0)
    assert (ended.status_code, ended.json()["kind"], ended.json()["reward"]) == (200, "timeout", None)
    # The client that never heard of the timeout ends its attempt as it found it.
    assert (await end(http, silent)).json()["kind"] == "timeout"
    assert [one.kind for one in await outcomes(database)] == ["timeout"] * 2


async def test_a_cancelled_run_stops_its_agents(http: httpx.AsyncClient, database: Database) -> None:
    run, _ = await waiting_run(database)
    told, ending = [await lease(http, run.id) for _ in range(2)]
    await http.post(f"/v1/runs/{run.id}/cancel")
    assert (await beat(http, told))["stop"] == "cancelled"
    assert (await end(http, ending, reward=1.0)).json()["kind"] == "cancelled"
    refused = await http.post(f"/v1/runs/{run.id}/attempts", json={})
    assert (refused.status_code, refused.json()["cause"]) == (409, "run_ended")


async def test_a_failure_is_the_agents_and_an_attempt_given_back_is_nobodys(
    http: httpx.AsyncClient, database: Database
) -> None:
    run, _ = await waiting_run(database)
    failed, back = [await lease(http, run.id) for _ in range(2)]
    assert (await end(http, failed, outcome="failed", reason="KeyError: 'x'")).json()["kind"] == "agent_error"
    assert (await end(http, back, outcome="given_back", reason="interrupted")).json()["kind"] == "infra_error"
    refused = await end(http, failed, outcome="failed", reward=1.0)
    assert refused.status_code == 422 and "has no reward" in refused.text


async def test_a_failure_while_an_endpoint_is_down_is_the_platforms(
    postgres_dsn: str, redis_url: str, tmp_path: Path, database: Database
) -> None:
    run, _ = await waiting_run(database)
    with refusing_port() as port:
        async for http in api_of(postgres_dsn, redis_url, tmp_path, f"http://127.0.0.1:{port}"):
            leased = await lease(http, run.id)
            ended = (await end(http, leased, outcome="failed", reason="APIConnectionError")).json()
            assert ended["kind"] == "infra_error" and "did not answer while the agent ran" in ended["detail"]


async def test_a_failure_that_began_before_the_api_is_nobodys(http: httpx.AsyncClient, database: Database) -> None:
    run, _ = await waiting_run(database)
    leased, late = [await lease(http, run.id) for _ in range(2)]
    await move(database, leased, started_at=timedelta(seconds=90))
    await move(database, late, started_at=timedelta(seconds=101))
    assert (await end(http, late)).json()["kind"] == "infra_error"
    ended = (await end(http, leased, outcome="failed", reason="APIConnectionError")).json()
    assert ended["kind"] == "infra_error" and "did not yet watch" in ended["detail"]


async def test_a_reward_that_the_run_does_not_take_is_refused(http: httpx.AsyncClient, database: Database) -> None:
    reward = {"components": [{"name": "short", "grader": {"type": "length", "at_most": 9}}]}
    run, _ = await waiting_run(database, reward=reward)
    leased = await lease(http, run.id)
    assert leased["takes_reward"] is False
    refused = await end(http, leased, reward=1.0)
    assert (refused.status_code, refused.json()["cause"]) == (422, "reward")
    assert (await end(http, leased, output="4")).json()["reward"] is None


async def test_a_task_without_a_field_of_the_environment_ends_as_ours(
    http: httpx.AsyncClient, database: Database
) -> None:
    run, _ = await waiting_run(database, 1, agent={"environment": {"X": "{task.missing}"}})
    assert (await http.post(f"/v1/runs/{run.id}/attempts", json={})).status_code == 204
    [stored] = await outcomes(database)
    assert stored.kind == "infra_error" and "missing" in str(stored.detail)


async def test_what_cannot_be_leased_says_why(
    http: httpx.AsyncClient, api_http: httpx.AsyncClient, database: Database
) -> None:
    ours = await builders.add_run(database)
    refused = await http.post(f"/v1/runs/{ours.id}/attempts", json={})
    assert (refused.status_code, refused.json()["cause"]) == (409, "runner_type")
    assert (await http.post("/v1/runs/none/attempts", json={})).status_code == 404
    assert (await http.post(f"/v1/runs/{ours.id}/attempts/none/heartbeat")).status_code == 404
    # This API knows no addresses for agents.
    created = await api_http.post("/v1/runs", json=external_document(dataset="nowhere"))
    assert (created.status_code, created.json()["cause"]) == (409, "not_configured")
    assert "API_GATEWAY_URL" in created.json()["detail"]


async def test_a_client_leases_the_rollouts_of_the_agent_that_it_plays(
    http: httpx.AsyncClient, database: Database
) -> None:
    agents = [{"name": "a", "environment": {"A": "1"}}, {"name": "b"}, {"name": "own", "command": ["x"], "runner": {}}]
    agents[2]["runner"] = {"type": "process"}
    run = await builders.add_run(database, config=external_document(agents=agents))
    groups = [
        await builders.add_group(database, run, number, size=1, agent=one["name"], runner_type=kind)
        for number, (one, kind) in enumerate(zip(agents, ("external", "external", "process"), strict=True))
    ]
    leased = await lease(http, run.id, agent="b")
    assert (leased["agent"], leased["rollout_id"]) == ("b", groups[1][1][0].id)
    empty = await http.post(f"/v1/runs/{run.id}/attempts", json={"agent": "b"})
    assert empty.status_code == 204
    leased = await lease(http, run.id, agent="a")
    assert (leased["agent"], leased["environment"]["A"]) == ("a", "1")
    assert (await end(http, leased, reward=1.0)).status_code == 200

    single, _ = await waiting_run(database)
    for run_id, agent, status, words in (
        (run.id, None, 422, "has the agents a, b, own: write the one that the client plays into agent"),
        (run.id, "c", 422, "no agent 'c': write one of a, b, own"),
        (run.id, "own", 409, "runner.type 'process': its agent 'own' is the platform's to start"),
        (single.id, "a", 422, "has one agent without a name: leave agent out"),
    ):
        refused = await http.post(f"/v1/runs/{run_id}/attempts", json={"agent": agent})
        assert refused.status_code == status
        assert words in refused.json()["detail"]


async def test_runners_leave_the_rollouts_of_clients_alone(http: httpx.AsyncClient, database: Database) -> None:
    run, rollouts = await waiting_run(database)
    ids = [rollout.id for rollout in rollouts]
    async with database.session() as session:
        for kind in ("process", "kubernetes"):
            assert await leases.deliverable_rollouts(session, runner_types=[kind]) == []
            assert await leases.lease_rollouts(session, ids, "runner", 30.0, [kind]) == []
    assert (await lease(http, run.id))["rollout_id"] in ids


async def test_a_store_that_others_keep_busy_is_not_down(
    postgres_dsn: str, redis_url: str, tmp_path: Path, endpoints: str
) -> None:
    """Ends of attempts hold all connections of the API while each asks whether the store answered."""
    write_keys(tmp_path / "keys.json")
    settings = Settings(
        database_url=postgres_dsn,
        admin_token="t",
        gateway_url=endpoints,
        collector_url=endpoints,
        capability_keys_file=tmp_path / "keys.json",
    )
    database = Database(postgres_dsn, pool_size=1)
    try:
        async with attempt_context(settings, database, Notifications(redis_url)) as context, AsyncExitStack() as stack:
            assert context is not None
            for _ in range(2):
                await (await stack.enter_async_context(database.session())).execute(select(1))
            await context.monitor.check()
            assert context.monitor.down_since(0.0) is None
    finally:
        await database.close()
