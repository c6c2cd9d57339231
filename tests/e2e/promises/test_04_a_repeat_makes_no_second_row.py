"""A repeat makes no second row. Span, enqueue, settle, reward, step: each has an idempotency key, written in its
docstring.

Each write goes through the real doors of two replicas, one time after another and then many times at once.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from sqlalchemy import func, select

from leyden.libs.contracts.states import OutcomeKind
from leyden.libs.queue import leases
from leyden.libs.queue.leases import Outcome
from leyden.libs.queue.stream import RolloutQueue
from leyden.libs.service import serving
from leyden.libs.store import tables, training
from leyden.libs.store.database import Database, Refused
from leyden.libs.store.runs.admission import NewGroup, admit_groups
from leyden.services.api import app as api
from leyden.services.api.settings import Settings as ApiSettings
from leyden.services.collector.app import create_collector
from leyden.services.collector.settings import Settings as CollectorSettings
from leyden.services.credit.worker import credit_pending
from tests.contract.collector.test_otlp import body as spans_of
from tests.contract.credit.test_worker import add_complete_group
from tests.fakes.gateway import scene
from tests.support import builders, queues

T = TypeVar("T")
AT_ONCE = 8
TOKEN = "secret-of-tests"


async def again_and_again(write: Callable[[], Awaitable[T]]) -> list[T]:
    """The answers of a write: twice one after another, then many at once."""
    return [await write(), await write(), *await asyncio.gather(*(write() for _ in range(AT_ONCE)))]


async def at_once_and_again(write: Callable[[], Awaitable[T]]) -> list[T]:
    """The answers of a write: many at once, none before them, then once more."""
    return [*await asyncio.gather(*(write() for _ in range(AT_ONCE))), await write()]


REPEATED = pytest.mark.parametrize("repeat", [again_and_again, at_once_and_again])
Repeat = Callable[[Callable[[], Awaitable[Any]]], Awaitable[list[Any]]]


async def count(database: Database, *kinds: type[tables.Base]) -> list[int]:
    """Rows of each table."""
    async with database.read() as session:
        return [await session.scalar(select(func.count()).select_from(kind)) or 0 for kind in kinds]


@pytest.fixture
async def replicas(database: Database) -> AsyncIterator[list[httpx.AsyncClient]]:
    """Two processes' worth of the API, each with its own connections."""
    async with AsyncExitStack() as stack:
        clients = []
        for _ in range(2):
            settings = ApiSettings(database_url=database.dsn, admin_token=TOKEN)  # type: ignore[arg-type]
            port = await stack.enter_async_context(serving(api.create_app(settings), shutdown_seconds=2))
            headers = {"authorization": f"Bearer {TOKEN}"}
            client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60)
            clients.append(await stack.enter_async_context(client))
        yield clients


@REPEATED
async def test_a_dataset_is_stored_once(database: Database, replicas: list[httpx.AsyncClient], repeat: Repeat) -> None:
    turn, rows = cycle(replicas), b'{"number": 1}\n{"number": 2}\n'
    answers = await repeat(lambda: next(turn).post("/v1/datasets", params={"name": "questions"}, content=rows))
    assert Counter(answer.status_code for answer in answers) == {201: 1, 200: len(answers) - 1}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert await count(database, tables.Dataset, tables.Task) == [1, 2]


@REPEATED
@pytest.mark.parametrize("kind", ["run", "evaluation", "token"])
async def test_a_create_with_a_key_happens_once(
    database: Database, replicas: list[httpx.AsyncClient], repeat: Repeat, kind: str
) -> None:
    await builders.add_dataset(database)
    run = await builders.add_run(database)
    documents: dict[str, tuple[str, type[tables.Base], dict[str, Any]]] = {
        "run": ("/v1/runs", tables.Run, builders.run_document()),
        "evaluation": (f"/v1/runs/{run.id}/evaluations", tables.Evaluation, {"dataset": run.dataset_id}),
        "token": ("/v1/tokens", tables.ApiToken, {"name": "of a test", "scopes": ["read"]}),
    }
    path, table, document = documents[kind]
    [before] = await count(database, table)
    turn = cycle(replicas)
    answers = await repeat(lambda: next(turn).post(path, json=document, headers={"idempotency-key": "one"}))
    assert {answer.status_code for answer in answers} == {201}, [answer.text for answer in answers]
    assert [answer.json() for answer in answers] == [answers[0].json()] * len(answers)
    assert await count(database, table) == [before + 1]


@REPEATED
async def test_an_external_reward_is_stored_once(
    database: Database, replicas: list[httpx.AsyncClient], repeat: Repeat
) -> None:
    _, [rollout, _] = await builders.add_group(database, await builders.add_run(database))
    turn, given = cycle(replicas), {"key": "of a person", "value": 1.0}
    answers = await repeat(lambda: next(turn).post(f"/v1/rollouts/{rollout.id}/rewards", json=given))
    assert Counter(answer.status_code for answer in answers) == {201: 1, 200: len(answers) - 1}
    assert await count(database, tables.ExternalReward) == [1]


@REPEATED
async def test_spans_and_rewards_of_an_agent_are_stored_once(
    database: Database, tmp_path: Path, repeat: Repeat
) -> None:
    async with AsyncExitStack() as stack:
        found = await stack.enter_async_context(scene(tmp_path, database))
        urls = []
        for _ in range(2):
            settings = CollectorSettings(database_url=database.dsn, capability_keys_file=tmp_path / "keys.json")
            port = await stack.enter_async_context(serving(create_collector(settings), shutdown_seconds=2))
            urls.append(f"http://127.0.0.1:{port}/r/{found.rollout_id}/1")
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=60))
        turn = cycle(urls)

        async def send(path: str, content: bytes, kind: str, scope: str) -> int:
            key = found.gateway.key(found.rollout_id, scope=scope)  # type: ignore[arg-type]
            headers = {"authorization": f"Bearer {key}", "content-type": kind}
            return (await http.post(next(turn) + path, content=content, headers=headers)).status_code

        batch, given = spans_of({}, {"name": "b"}, {"name": "c"}), json.dumps({"value": 0.5, "key": "mine"}).encode()
        sent = await repeat(lambda: send("/v1/traces", batch, "application/x-protobuf", "telemetry"))
        rewarded = await repeat(lambda: send("/reward", given, "application/json", "reward"))
        assert (set(sent), set(rewarded)) == ({200}, {200})
        assert await count(database, tables.Span, tables.Reward) == [3, 1]


async def test_a_model_call_that_an_sdk_repeats_is_sampled_once(database: Database, tmp_path: Path) -> None:
    """At once at one gateway, and later at another, which knows it from the store alone."""
    async with scene(tmp_path, database) as found, found.another_gateway() as other:

        async def ask(gateway: Any) -> str:
            async with gateway.client(found.rollout_id) as client:
                answer = await client.chat.completions.create(
                    model="any",
                    messages=[{"role": "user", "content": "hi"}],
                    extra_headers={"idempotency-key": "one question"},
                )
            return str(answer.id)

        ids = await again_and_again(lambda: ask(found.gateway)) + await again_and_again(lambda: ask(other))
        assert (len(set(ids)), len(found.engine.requests)) == (1, 1)
        assert await count(database, tables.ModelCall) == [1]


async def test_a_rollout_is_admitted_enqueued_leased_and_settled_once(database: Database, redis_url: str) -> None:
    run = await builders.add_run(database)
    admitted = NewGroup(f"{run.id}.7", run.id, None, 7, run.dataset_id, 0, 1, 0)
    [rollout] = admitted.rollout_ids

    async def admit() -> None:
        async with database.session() as session:
            await admit_groups(session, [admitted], {})

    async def lease() -> leases.Lease | None:
        async with database.session() as session:
            return await queues.lease_rollout(session, rollout, "a runner", 60)

    queue = RolloutQueue(redis_url)
    await again_and_again(admit)
    assert sum(await again_and_again(lambda: queue.enqueue([rollout]))) == 1
    assert (await queue.depth(), len(await queue.deliver("a runner", 10, 0.01))) == (1, 1)
    assert sum(await again_and_again(lambda: queue.enqueue([rollout]))) == 0
    await queue.close()
    [got] = [found for found in await at_once_and_again(lease) if found is not None]

    async def settle() -> bool:
        async with database.session() as session:
            return await queues.settle(session, got, Outcome(OutcomeKind.SUCCEEDED, reward=1.0, exit_code=0))

    assert sum(await at_once_and_again(settle)) == 1
    assert await count(database, tables.Group, tables.Rollout, tables.Attempt, tables.Outcome) == [1, 1, 1, 1]


async def test_a_group_is_credited_once(database: Database) -> None:
    group = await add_complete_group(database, await builders.add_run(database))
    credited = await at_once_and_again(lambda: credit_pending(database, 8))
    assert [ids for ids in credited if ids] == [[group.id]]
    assert await count(database, tables.GroupCredit) == [1]
    made: Sequence[int] = await count(database, tables.Sample, tables.CallCredit)
    await credit_pending(database, 8)
    assert await count(database, tables.Sample, tables.CallCredit) == made


async def test_a_step_is_recorded_once(database: Database) -> None:
    run = await builders.add_run(database)
    group, [rollout, _] = await builders.add_group(database, run)
    sample = await builders.add_sample(database, rollout)
    await builders.add_credited_group(database, group)
    await builders.add_policy_version(database, run, 0)
    version = training.Version(1, "versions/1", "a" * 64, 1)
    record = training.StepRecord(run.id, 1, {}, "1", datetime.now(UTC), [group.id], [], [sample.id], version)

    async def commit() -> bool:
        try:
            async with database.session() as session:
                await training.commit_step(session, record)
        except Refused:
            return False
        return True

    assert sum(await at_once_and_again(commit)) == 1
    kinds = (tables.Step, tables.StepGroup, tables.StepSample, tables.PolicyVersion)
    assert await count(database, *kinds) == [1, 1, 1, 2]
