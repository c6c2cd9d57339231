"""The page of a run's tasks: verdicts, rewards by version, failures; sorted and filtered by the address."""

from __future__ import annotations

import re
from collections.abc import Callable

from playwright.sync_api import expect

from leyden.libs.store.database import Database
from tests.contract.api.test_run_tasks import five_tasks
from tests.contract.console.conftest import HOSTILE, SHOWN, Insert
from tests.support import builders
from tests.support.browser import Visitor


async def run_with_five_tasks(database: Database) -> str:
    return (await five_tasks(database)).id


def test_tasks_lead_from_a_run_to_groups_and_rollouts(insert: Insert[str], open_page: Callable[[str], Visitor]) -> None:
    run = insert(run_with_five_tasks)
    visitor = open_page(f"/runs/{run}")
    page = visitor.page
    page.get_by_role("link", name="Tasks").focus()
    page.keyboard.press("Enter")
    table = page.get_by_role("region", name="Tasks")
    rows = table.locator("tbody tr")
    expect(rows).to_have_count(5)
    expect(page.get_by_text("1 solved, 1 mixed, 1 unsolved, 2 unknown")).to_be_visible()
    expect(rows.nth(0)).to_contain_text("mixed0.625")
    strip = rows.nth(0).get_by_role("img")
    expect(strip).to_have_attribute("aria-label", "Mean reward, version 0: 0.250, version 1: 1.000")
    expect(rows.nth(4)).to_contain_text("unknown–")
    assert visitor.violations() == []

    page.get_by_label("Verdict").select_option("unknown")
    expect(rows).to_have_count(2)
    page.get_by_label("Sort").select_option("failure")
    expect(page).to_have_url(re.compile(rf"#/runs/{run}/tasks\?verdict=unknown&sort=failure$"))
    expect(
        page.get_by_text(f"leyden run tasks {run} --evaluation none --verdict unknown --sort failure")
    ).to_be_visible()
    rows.first.get_by_role("link", name="agent_error").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name=f"Rollout {run}.4.1")).to_be_visible()
    page.go_back()
    expect(rows).to_have_count(2)
    rows.first.get_by_role("link", name="newest of 1 groups of task 3").click()
    expect(page.get_by_role("heading", name=f"Group {run}.4")).to_be_visible()
    page.go_back()
    rows.first.get_by_role("link", name="3", exact=True).click()
    expect(page.get_by_text("1 to 2 of 2")).to_be_visible()


def test_tasks_without_a_rollout_name_the_next_command(
    insert: Insert[str], open_page: Callable[[str], Visitor]
) -> None:
    async def new_run(database: Database) -> str:
        return (await builders.add_run(database)).id

    visitor = open_page(f"/runs/{insert(new_run)}/tasks")
    expect(visitor.page.get_by_text("leyden status")).to_be_visible()
    assert visitor.violations() == []
    visitor.page.evaluate("location.hash = '#/runs/nobody/tasks'")
    expect(visitor.page.get_by_role("alert").first).to_contain_text("nobody")
    # The browser reports the answer 404 as an error of its own.
    visitor.complaints[:] = [one for one in visitor.complaints if "404" not in one]


def test_a_hostile_task_is_shown_as_text(insert: Insert[str], open_page: Callable[[str], Visitor]) -> None:
    async def hostile(database: Database) -> str:
        dataset = await builders.add_dataset(database, [{HOSTILE: "x" * 1_000_000}])
        run = await builders.add_run(database, dataset_id=dataset.id)
        await builders.add_group(database, run)
        return run.id

    visitor = open_page(f"/runs/{insert(hostile)}/tasks")
    # The task is JSON: a control character is an escape, and its backslash stands.
    expect(visitor.page.get_by_role("rowheader")).to_contain_text(SHOWN.replace("\\x1b", "\\u001b"))
    assert visitor.violations() == []
