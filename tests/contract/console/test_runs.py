"""The list of runs: its count, its order, its columns, and the reward on held-out tasks beside that of training."""

from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import expect

from leyden.libs.store import tables
from leyden.libs.store.database import Database
from tests.contract.api.test_comparison import measured_run, trained_step
from tests.contract.console.conftest import Insert
from tests.support import builders
from tests.support.browser import Visitor


async def three_runs(database: Database) -> list[str]:
    """One without a step, one that failed after a step, and one that was measured."""
    plain = await builders.add_run(database)
    failed = await builders.add_run(database)
    await trained_step(database, failed, 1, [1.0, 0.5])
    measured = await measured_run(database, plain.dataset_id, 1e-6, [0.0, 1.0])
    async with database.session() as session:
        (await session.get_one(tables.RunStatus, failed.id)).phase = "failed"
    return [plain.id, failed.id, measured.id]


def test_runs_are_counted_sorted_and_filtered_by_the_api(
    insert: Insert[list[str]], open_page: Callable[[str], Visitor]
) -> None:
    plain, failed, measured = insert(three_runs)
    visitor = open_page("/")
    page = visitor.page
    rows = page.get_by_role("region", name="Runs").locator("tbody tr")
    links = rows.get_by_role("rowheader").get_by_role("link")
    expect(page.get_by_text("1 to 3 of 3")).to_be_visible()
    expect(links.first).to_have_attribute("href", f"#/runs/{measured}")
    page.get_by_label("Sort").select_option("highest")
    expect(links.first).to_have_attribute("href", f"#/runs/{failed}")
    page.get_by_label("Sort").select_option("oldest")
    expect(links.first).to_have_attribute("href", f"#/runs/{plain}")
    assert page.url.endswith("?sort=oldest")
    assert visitor.violations() == []
    page.get_by_label("State").select_option("failed")
    expect(page.get_by_text("1 to 1 of 1")).to_be_visible()
    page.get_by_label("State").select_option("cancelled")
    expect(page.get_by_text("No run matches the filter.")).to_be_visible()


def test_the_reward_on_held_out_tasks_stands_beside_that_of_training(
    insert: Insert[list[str]], open_page: Callable[[str], Visitor]
) -> None:
    insert(three_runs)
    rows = open_page("/").page.get_by_role("region", name="Runs").locator("tbody tr")
    expect(rows.nth(0)).to_contain_text("0.500, version 0")
    expect(rows.nth(0).get_by_role("img")).to_have_attribute(
        "aria-label", "Held out 0.500 at version 0, 0.500 at version 0, from 0.500 to 0.500"
    )
    expect(rows.nth(1)).to_contain_text("not measured")
    expect(rows.nth(1).get_by_role("img")).to_have_attribute(
        "aria-label", "Mean reward 0.750 at step 1, 0.750 at step 1, from 0.750 to 0.750"
    )
    expect(rows.nth(2)).to_contain_text("none yet")


def test_the_browser_keeps_the_choice_of_columns(
    insert: Insert[list[str]], open_page: Callable[[str], Visitor]
) -> None:
    insert(three_runs)
    visitor = open_page("/")
    page = visitor.page
    heads = page.get_by_role("columnheader")
    expect(heads.filter(has_text="Pool")).to_have_count(1)
    page.get_by_text("Columns", exact=True).click()
    page.get_by_label("Pool").uncheck()
    expect(heads.filter(has_text="Pool")).to_have_count(0)
    assert visitor.violations() == []
    page.reload()
    expect(heads.filter(has_text="Created")).to_have_count(1)
    expect(heads.filter(has_text="Pool")).to_have_count(0)
