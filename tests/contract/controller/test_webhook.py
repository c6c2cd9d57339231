"""Events of runs reach the operator's webhook at least once, each with one id, whenever the controller is killed."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from sqlalchemy import select

from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.services.controller.upkeep.alarms import judge_all
from leyden.services.controller.upkeep.webhook import MOST_TRIES, deliver_due
from tests.contract.controller.test_kills import Case
from tests.fakes.scripted_engine import ScriptedEngine, running
from tests.fakes.webhook import Webhook, running_webhook
from tests.support import builders
from tests.support.alarms import add_alarm
from tests.support.waiting import eventually

POINTS = ("controller.alarm_raised", "controller.alarm_committed", "controller.event_posted")
TROUBLE = {"algorithm": {"type": "gspo", "correction": {"type": "bypass"}}}
"""A setting that is an alarm from the first judgement on."""


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with running_webhook() as made:
        yield made


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


async def test_the_end_of_an_alarm_is_posted_once_with_the_alarm_and_that_of_one_that_lasted_is_the_runs(
    database: Database, webhook: Webhook
) -> None:
    run = await builders.add_run(database, config=builders.run_document(**TROUBLE))
    await add_alarm(database, run.id, "kl_high", number=7)
    async with httpx.AsyncClient() as http:
        await judge_all(database, with_events=True)
        async with database.session() as session:
            # Its rule does not hold; nor has it for longer than a pause.
            (await session.get_one(tables.Alarm, (run.id, 7))).seen_at -= timedelta(minutes=5)
        for _ in range(2):
            await judge_all(database, with_events=True)
            await deliver_due(http, webhook.url, database)
        await builders.end_run(database, run)
        await judge_all(database, with_events=True)
        await deliver_due(http, webhook.url, database)
    assert webhook.ids() == [f"{run.id}.alarm.8", f"{run.id}.alarm.7.ended", f"{run.id}.completed"]
    ended = webhook.received[1]
    assert (ended["event"], ended["alarm"]["name"], ended["alarm"]["number"]) == ("alarm_ended", "kl_high", 7)
    assert ended["alarm"]["ended_at"] is not None and ended["alarm"]["reason"] == "kl_high holds"


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
