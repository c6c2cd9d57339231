"""A run's page follows the stream of its events, and asks every few seconds where none comes through."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from playwright.sync_api import Route, expect

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


PROXIES: dict[str, Callable[[Route], object]] = {
    "cuts it": lambda route: route.abort(),
    "keeps it": lambda _: None,
    "does not know it": lambda route: route.fulfill(status=404),
    "ends it at once": lambda route: route.fulfill(status=200, content_type="text/event-stream", body=""),
    "ends it after an event": lambda route: route.fulfill(
        status=200, content_type="text/event-stream", body='id: 1\ndata: ["run"]\n\n'
    ),
    "answers a page": lambda route: route.fulfill(status=200, content_type="text/html", body="<p>no</p>"),
}


@pytest.mark.parametrize("what", PROXIES)
def test_a_page_behind_a_proxy_without_streams_asks_every_few_seconds(
    insert: Insert[str], open_page: Callable[[str], Visitor], what: str
) -> None:
    run = insert(new_run)
    visitor = open_page("/")
    visitor.page.route("**/v1/events?*", PROXIES[what])
    visitor.page.get_by_role("link", name="test run").click()
    expect(visitor.page.get_by_text("0 of")).to_be_visible()
    insert(add_step(run))
    expect(visitor.page.get_by_text("1 of")).to_be_visible()
    # The browser reports each failed request and stream as an error of its own.
    visitor.complaints[:] = [one for one in visitor.complaints if not one.startswith(("Failed", "EventSource"))]
