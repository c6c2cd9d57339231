"""The questions that pages share: names of runs and datasets, and the count of alarms."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from playwright.sync_api import Route, expect

from leyden.libs.store.database import Database
from tests.contract.console.conftest import Insert
from tests.support import builders
from tests.support.browser import Visitor

PAUSE = 3_000
"""Milliseconds between two questions of a page."""


def test_a_name_that_does_not_load_says_so_and_is_asked_again(
    insert: Insert[str], open_page: Callable[[str], Visitor]
) -> None:
    async def one_group(database: Database) -> str:
        run = await builders.add_run(database)
        return (await builders.add_group(database, run))[0].id

    group = insert(one_group)
    visitor = open_page("/rate")
    page = visitor.page
    expect(page.get_by_role("heading", name="Rate")).to_be_visible()
    run, datasets = f"**/v1/runs/{group.rpartition('.')[0]}", "**/v1/datasets/*"
    page.route(run, lambda route: route.fulfill(status=500, json={"detail": "the store is away"}))
    page.route(datasets, lambda route: route.fulfill(status=404, json={"detail": "no such dataset"}))
    page.evaluate(f"location.hash = '#/groups/{group}'")
    failed = page.get_by_text("(its name does not load)")
    expect(failed).to_have_attribute("title", "the store is away")
    expect(page.get_by_text("(deleted)")).to_be_visible()
    assert visitor.violations() == []
    page.unroute(run)
    expect(page.get_by_role("link", name="test run")).to_be_visible()
    expect(failed).to_have_count(0)
    # The browser reports each failure as an error of its own.
    visitor.complaints[:] = [one for one in visitor.complaints if "500" not in one and "404" not in one]


def test_a_tab_that_hears_the_count_of_alarms_from_another_one_does_not_ask(
    open_page: Callable[[str], Visitor],
) -> None:
    page = open_page("/platform").page
    asked = list[str]()

    def answer(route: Route) -> None:
        asked.append(route.request.url)
        route.fulfill(json={"items": [], "names": {"stalled": 5}})

    page.route("**/v1/alarms?*", answer)
    page.evaluate("""() => {
        window.others = new BroadcastChannel(`alarms ${location.pathname}`);
        window.others.onmessage = ({ data }) => { document.title = `told ${data}`; };
    }""")
    expect(page.get_by_role("link", name="Alarms (5)", exact=True)).to_be_visible()
    expect(page).to_have_title("told 5")
    page.clock.install()
    page.clock.pause_at(datetime.now(tz=UTC) + timedelta(hours=1))
    with page.expect_response("**/v1/alarms?*"):
        page.clock.run_for(PAUSE + 1_000)
    page.evaluate("window.others.postMessage(7)")
    expect(page.get_by_role("link", name="Alarms (7)", exact=True)).to_be_visible()
    before = len(asked)
    page.clock.run_for(PAUSE - 1_000)
    page.evaluate("fetch('.').then((answer) => answer.text())")
    assert len(asked) == before
    with page.expect_response("**/v1/alarms?*"):
        page.clock.run_for(2 * PAUSE)
    expect(page.get_by_role("link", name="Alarms (5)", exact=True)).to_be_visible()
