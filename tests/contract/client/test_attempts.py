"""`with client.attempt(run)`: the agent runs in this process, and its end is the platform's to count."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from leyden import Attempt, Client, Conflict, NoTask, RunEnded
from leyden.libs.capability import write_keys
from leyden.libs.client import attempts
from leyden.libs.contracts.api.attempts import LeasedAttempt
from leyden.libs.contracts.api.tokens import ApiScope
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.services.api.app import create_app
from leyden.services.api.settings import Settings
from tests.contract.api.test_attempts import endpoints, waiting_run
from tests.fakes.served import served
from tests.support import builders
from tests.support.waiting import until

__all__ = ["endpoints"]

ENDS = "SELECT kind, reward, stdout_tail, detail FROM outcomes ORDER BY created_at"
LOOP_THREADS = 2
LEASED = {
    **{"id": "a", "run_id": "r", "rollout_id": "r.0.0", "number": 1, "dataset_id": "d", "task_number": 0, "task": {}},
    **{"base_url": "http://g/v1", "api_key": "k", "environment": {}, "takes_reward": True},
    **{"lease_seconds": 3.0, "timeout_seconds": 300.0},
}
COMPLETE = "UPDATE run_status SET phase = 'completed' WHERE run_id = %s"


@pytest.fixture
def leyden(postgres_dsn: str, redis_url: str, tmp_path: Path, endpoints: str) -> Iterator[Client]:
    """A client that may lease attempts, and nothing else."""
    write_keys(tmp_path / "keys.json")
    settings = Settings(
        database_url=postgres_dsn,
        redis_url=redis_url,
        admin_token="secret-of-tests",
        capability_keys_file=tmp_path / "keys.json",
        gateway_url=endpoints,
        collector_url=endpoints,
    )
    with served(create_app(settings)) as url, Client(url, "secret-of-tests", patience_seconds=0.0) as admin:
        token = admin.create_token("notebook", [ApiScope.ATTEMPTS]).token
        with Client(url, token, patience_seconds=0.0) as client:
            yield client


def waiting(dsn: str, size: int = 2, **changes: Any) -> str:
    """The id of a run with due rollouts."""

    async def add() -> tables.Run:
        database = Database(dsn)
        try:
            return (await waiting_run(database, size, **changes))[0]
        finally:
            await database.close()

    return asyncio.run(add()).id


def ends(dsn: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn) as connection:
        return connection.execute(
            "SELECT kind, reward, stdout_tail, detail FROM outcomes ORDER BY created_at"
        ).fetchall()


def test_a_block_ends_its_attempt_with_what_it_set(leyden: Client, postgres_dsn: str) -> None:
    run = waiting(postgres_dsn)
    with leyden.attempt(run, worker="nb") as attempt:
        assert attempt.task == {"question": "2+2"} and attempt.environment["OPENAI_API_KEY"] == attempt.api_key
        attempt.output, attempt.reward = "4", 1.0
    assert attempt.ended is not None and (attempt.ended.kind, attempt.stopped) == ("succeeded", None)
    with pytest.raises(ZeroDivisionError), leyden.attempt(run):
        _ = 1 / 0
    failure = "ZeroDivisionError: division by zero"
    assert ends(postgres_dsn) == [("succeeded", 1.0, "4", None), ("agent_error", None, "", failure)]
    with pytest.raises(NoTask, match="no task that is due"), leyden.attempt(run, wait_seconds=0.0):
        raise AssertionError("there is no task")


def test_an_interrupt_gives_the_attempt_back(leyden: Client, postgres_dsn: str) -> None:
    run = waiting(postgres_dsn)
    with pytest.raises(KeyboardInterrupt), leyden.attempt(run):
        raise KeyboardInterrupt
    assert [kind for kind, *_ in ends(postgres_dsn)] == ["infra_error"]


def test_an_attempt_block_works_in_an_event_loop_and_a_cancelled_task_gives_it_back(
    leyden: Client, postgres_dsn: str
) -> None:
    run = waiting(postgres_dsn)

    async def agent(begun: asyncio.Event) -> None:
        async with leyden.attempt(run):
            begun.set()
            await asyncio.Event().wait()

    async def both() -> None:
        begun = asyncio.Event()
        task = asyncio.create_task(agent(begun))
        await begun.wait()
        async with leyden.attempt(run) as attempt:
            attempt.rewards = {"a": 0.5, "b": 0.25}
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(both())
    assert [(kind, reward) for kind, reward, *_ in ends(postgres_dsn)] == [("succeeded", 0.75), ("infra_error", None)]


def test_heartbeats_keep_an_attempt_and_say_that_its_run_was_cancelled(leyden: Client, postgres_dsn: str) -> None:
    run = waiting(postgres_dsn, runner={"type": "external", "lease_seconds": 5.0})
    with leyden.attempt(run) as attempt, psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute("UPDATE runs SET intent = 'cancelled' WHERE id = %s", [run])
        until(lambda: attempt.stopped, "the heartbeat tells it", 60)
    assert attempt.stopped == "cancelled" and attempt.ended is not None and attempt.ended.kind == "cancelled"


def test_a_heartbeat_that_gets_no_answer_is_followed_by_another_one() -> None:
    beats, over = list[str](), threading.Event()

    async def lease(_: Request) -> Response:
        return JSONResponse(LEASED)

    async def beat(request: Request) -> Response:
        beats.append(request.url.path)
        while len(beats) == 1 and not over.is_set():
            await asyncio.sleep(0.05)
        return JSONResponse({"lease_expires_at": "2026-01-01T00:00:00Z", "stop": None, "reason": None})

    async def end(_: Request) -> Response:
        ended = {"id": "a", "rollout_id": "r.0.0", "number": 1, "kind": "succeeded", "reward": None, "detail": None}
        return JSONResponse(ended)

    paths = {"": lease, "/a/heartbeat": beat, "/a/end": end}
    routes = [Route(f"/v1/runs/r/attempts{path}", answer, methods=["POST"]) for path, answer in paths.items()]
    with served(Starlette(routes=routes)) as url, Client(url) as client:
        try:
            with client.attempt("r"):
                until(lambda: len(beats) > 1, "another heartbeat comes", 30)
        finally:
            over.set()


def test_a_wait_for_a_task_may_be_longer_than_the_clients_timeout() -> None:
    asked = list[object]()

    async def lease(request: Request) -> Response:
        document = await request.json()
        asked.append(document["key"])
        await asyncio.sleep(document["wait_seconds"])
        return Response(status_code=204)

    app = Starlette(routes=[Route("/v1/runs/r/attempts", lease, methods=["POST"])])
    with (
        served(app) as url,
        Client(url, timeout_seconds=1.0, patience_seconds=0.0) as client,
        pytest.raises(NoTask),
        client.attempt("r", wait_seconds=1.5),
    ):
        raise AssertionError("there is no task")
    assert asked


def test_an_attempt_that_was_lost_raises_nothing_and_counts_for_nothing(leyden: Client, postgres_dsn: str) -> None:
    run = waiting(postgres_dsn)
    with leyden.attempt(run) as attempt, psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute("UPDATE attempts SET state = 'expired', finished_at = now()")
        attempt.reward = 1.0
    assert (attempt.stopped, attempt.ended, ends(postgres_dsn)) == ("lease_lost", None, [])


def test_a_function_works_until_the_run_has_ended(leyden: Client, postgres_dsn: str) -> None:
    run = waiting(postgres_dsn, 6)
    results = iter([1.0, "four", {"reward": 0.5, "facts": {"turns": 2}}, None])

    def agent(attempt: Attempt) -> Any:
        done = len(ends(postgres_dsn))
        if done == 4:
            with psycopg.connect(postgres_dsn, autocommit=True) as connection:
                connection.execute(COMPLETE, [run])
            raise ValueError("the last one fails")
        return next(results)

    assert leyden.work(run, agent) == 5
    found = [(kind, reward, output) for kind, reward, output, _ in ends(postgres_dsn)]
    assert found == [
        ("succeeded", 1.0, ""),
        ("succeeded", None, "four"),
        ("succeeded", 0.5, ""),
        ("succeeded", None, ""),
        ("agent_error", None, ""),
    ]


def test_several_threads_share_the_tasks(leyden: Client, postgres_dsn: str) -> None:
    run = waiting(postgres_dsn, 6)

    def agent(_: Attempt) -> float:
        with psycopg.connect(postgres_dsn, autocommit=True) as connection:
            # Ends with the last task, once all are leased.
            connection.execute(
                "UPDATE run_status SET phase = 'completed' WHERE (SELECT count(*) FROM attempts) = 6 AND run_id = %s",
                [run],
            )
        return 1.0

    assert leyden.work(run, agent, at_once=3) == 6 and len(ends(postgres_dsn)) == 6


def test_a_run_of_the_platforms_own_agents_is_refused(leyden: Client, postgres_dsn: str) -> None:
    async def add() -> str:
        database = Database(postgres_dsn)
        try:
            return (await builders.add_run(database)).id
        finally:
            await database.close()

    with pytest.raises(Conflict, match="the platform's to start"), leyden.attempt(asyncio.run(add())):
        raise AssertionError("nothing was leased")


def test_an_end_in_an_event_loop_is_sent_while_others_wait_for_a_task(leyden: Client, postgres_dsn: str) -> None:
    run = waiting(postgres_dsn, 1)

    async def waiter() -> None:
        with pytest.raises(RunEnded):
            await leyden.attempt(run).__aenter__()

    async def play() -> Attempt:
        async with leyden.attempt(run) as attempt:
            for _ in range(2 * LOOP_THREADS):
                waiters.append(asyncio.create_task(waiter()))
            attempt.reward = 1.0
            await asyncio.sleep(0)
        return attempt

    async def both() -> Attempt:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(LOOP_THREADS))
        try:
            return await asyncio.wait_for(play(), 60)
        finally:
            with psycopg.connect(postgres_dsn, autocommit=True) as connection:
                connection.execute(COMPLETE, [run])
            await asyncio.gather(*waiters)

    waiters: list[asyncio.Task[None]] = []
    ended = asyncio.run(both()).ended
    assert ended is not None and ended.kind == "succeeded"


def test_a_task_cancelled_while_it_waits_keeps_no_attempt(
    leyden: Client, postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = waiting(postgres_dsn, 1)
    monkeypatch.setattr(attempts, "WAIT_SECONDS", 1.0)
    asked = threading.Event()

    class Telling(Attempt):
        def _lease(self) -> LeasedAttempt:
            asked.set()
            return super()._lease()

    async def cancelled() -> None:
        with leyden.attempt(run):
            waiter = Telling(leyden._http, run, agent_name=None, worker="nb", wait_seconds=None)
            entering = asyncio.create_task(waiter.__aenter__())
            await asyncio.to_thread(asked.wait, 60)
            entering.cancel()
            await asyncio.wait([entering])
            assert entering.cancelled()
            # Its task is due again when the block ends.
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(cancelled())
    until(lambda: not [one for one in threading.enumerate() if one.name.startswith("attempt")], "the wait ends", 60)
    with psycopg.connect(postgres_dsn) as connection:
        assert connection.execute("SELECT count(*) FROM attempts WHERE state = 'running'").fetchone() == (0,)
