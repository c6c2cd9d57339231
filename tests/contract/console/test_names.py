"""Names of runs and datasets in place of their ids."""

from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import expect

from leyden.libs.store.database import Database
from tests.contract.console.conftest import Insert
from tests.support import builders
from tests.support.browser import Visitor


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
