"""Events of runs reach the operator's webhook at least once, each with one id, whenever the controller is killed."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.services.controller.upkeep.alarms import judge_all
from leyden.services.controller.upkeep.webhook import MOST_TRIES, deliver_due
from tests.contract.controller.test_kills import Case
from tests.fakes.scripted_engine import ScriptedEngine, running
from tests.support import builders
from tests.support.waiting import eventually

POINTS = ("controller.alarm_raised", "controller.alarm_committed", "controller.event_posted")
TROUBLE = {"algorithm": {"type": "gspo", "correction": {"type": "bypass"}}}
"""A setting that is an alarm from the first judgement on."""


class Webhook:
    """An operator's receiver. `status`: its answer; `received`: the bodies, in their order."""

    def __init__(self) -> None:
        self.status, self.received, self.keys = 204, list[dict[str, Any]](), list[str | None]()
        webhook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                webhook.received.append(json.loads(body))
                webhook.keys.append(self.headers["idempotency-key"])
                self.send_response(webhook.status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/events?key=secret"

    def ids(self) -> list[str]:
        return [one["id"] for one in self.received]


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    made = Webhook()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


async def rows(database: Database) -> list[tables.WebhookEvent]:
    async with database.read() as session:
        return list(await session.scalars(select(tables.WebhookEvent).order_by(tables.WebhookEvent.id)))


async def test_alarms_and_the_end_of_a_run_are_posted_with_what_they_tell(database: Database, webhook: Webhook) -> None:
    run = await builders.add_run(database, config=builders.run_document(**TROUBLE))
    async with httpx.AsyncClient() as http:
        for _ in range(2):
            await judge_all(database, with_events=True)
            await deliver_due(http, webhook.url, database)
        await builders.end_run(database, run, "failed")
        for _ in range(2):
            await judge_all(database, with_events=True)
            await deliver_due(http, webhook.url, database)
    assert webhook.ids() == webhook.keys == [f"{run.id}.alarm.1", f"{run.id}.failed"]
    alarm, failed = webhook.received
    assert (alarm["event"], alarm["run_name"], alarm["alarm"]["subject"]) == (
        "alarm",
        "test run",
        "algorithm.correction",
    )
    assert {"reason", "evidence", "remedy", "since"} <= alarm["alarm"].keys()
    assert (failed["event"], failed["phase"], failed["alarm"]) == ("failed", "failed", None)
    assert [(one.delivered_at is not None, one.due_at) for one in await rows(database)] == [(True, None)] * 2


async def test_no_event_is_written_without_a_webhook(database: Database) -> None:
    await builders.add_run(database, config=builders.run_document(**TROUBLE))
    await judge_all(database)
    assert await rows(database) == []


async def test_a_receiver_that_fails_gets_the_event_again_after_growing_pauses_and_not_for_ever(
    database: Database, webhook: Webhook
) -> None:
    run = await builders.add_run(database, config=builders.run_document(**TROUBLE))
    await judge_all(database, with_events=True)
    webhook.status = 500
    async with httpx.AsyncClient() as http:
        await deliver_due(http, webhook.url, database)
        await deliver_due(http, webhook.url, database)
        [event] = await rows(database)
        # The second delivery is not due yet.
        assert (len(webhook.received), event.tries, event.error) == (1, 1, "the webhook answers 500")
        assert event.due_at is not None and (event.due_at - event.created_at).total_seconds() > 4
        for _ in range(MOST_TRIES):
            async with database.session() as session:
                (await session.get_one(tables.WebhookEvent, event.id)).due_at = event.created_at
            await deliver_due(http, webhook.url, database)
            [event] = await rows(database)
            if event.due_at is None:
                break
        assert (event.tries, event.due_at, event.delivered_at) == (MOST_TRIES, None, None)
        await deliver_due(http, webhook.url, database)
        assert webhook.ids() == [f"{run.id}.alarm.1"] * MOST_TRIES
        # Another run's event is delivered once the receiver is back.
        webhook.status = 200
        other = await builders.add_run(database, config=builders.run_document(**TROUBLE))
        await judge_all(database, with_events=True)
        await deliver_due(http, "http://127.0.0.1:9/secret", database)
        [lost] = [one for one in await rows(database) if one.run_id == other.id]
        assert lost.error == "the webhook does not answer (ConnectError)"


async def test_a_controller_killed_between_alarm_and_delivery_raises_once_and_delivers_at_least_once(
    database: Database, redis_url: str, tmp_path: Path, webhook: Webhook
) -> None:
    async with running(ScriptedEngine()) as engine:
        case = Case(database, redis_url, engine.url, tmp_path)
        case.settings["CONTROLLER_WEBHOOK_URL"] = webhook.url
        run = await builders.add_run(database, config=builders.run_document(training={"steps": 9}, **TROUBLE))
        event = f"{run.id}.alarm.1"

        async def stored() -> tuple[list[int], list[str]]:
            async with database.read() as session:
                numbers = await session.scalars(select(tables.Alarm.number))
                return list(numbers), [one.id for one in await rows(database)]

        await case.killed_at("controller.alarm_raised")
        assert (await stored(), webhook.ids()) == (([], []), [])
        await case.killed_at("controller.alarm_committed")
        assert (await stored(), webhook.ids()) == (([1], [event]), [])
        await case.killed_at("controller.event_posted")
        assert (await stored(), webhook.ids()) == (([1], [event]), [event])

        async def is_delivered() -> bool:
            return (await rows(database))[0].delivered_at is not None

        async with case.controller():
            await eventually(is_delivered)
        assert await stored() == ([1], [event])
        assert webhook.ids() == [event] * 2
