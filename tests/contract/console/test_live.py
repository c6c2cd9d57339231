"""A run's page follows the stream of its events, and asks every few seconds where none comes through."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from playwright.sync_api import expect

from leyden.libs.store import tables
from leyden.libs.store.database import Database
from tests.contract.console.conftest import Insert
from tests.support import builders
from tests.support.browser import Visitor


async def new_run(database: Database) -> str:
    return (await builders.add_run(database)).id


def add_step(run: str) -> Callable[[Database], object]:
    async def work(database: Database) -> str:
        async with database.session() as session:
            moment = datetime.now(tz=UTC)
            session.add(tables.Step(run_id=run, number=1, metrics={}, checkpoint="", started_at=moment))
        return run

    return work


def test_a_page_asks_again_for_what_the_stream_names(insert: Insert[str], open_page: Callable[[str], Visitor]) -> None:
    run = insert(new_run)
    visitor = open_page("/")
    page = visitor.page
    expect(page.get_by_role("link", name="test run")).to_be_visible()
    with page.expect_response(lambda answer: "/v1/events?" in answer.url) as stream:
        page.get_by_role("link", name="test run").click()
    assert stream.value.status == 200
    expect(page.get_by_text("0 of")).to_be_visible()
    insert(add_step(run))
    expect(page.get_by_text("1 of")).to_be_visible()


def test_a_page_without_a_stream_asks_every_few_seconds(
    insert: Insert[str], open_page: Callable[[str], Visitor]
) -> None:
    run = insert(new_run)
    visitor = open_page("/")
    visitor.page.route("**/v1/events?*", lambda route: route.abort())
    visitor.page.get_by_role("link", name="test run").click()
    expect(visitor.page.get_by_text("0 of")).to_be_visible()
    insert(add_step(run))
    expect(visitor.page.get_by_text("1 of")).to_be_visible()
    visitor.complaints[:] = [one for one in visitor.complaints if "ERR_FAILED" not in one]
