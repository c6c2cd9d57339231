"""The pages of datasets: their tasks page by page, and the runs that train on them or evaluate a version on them."""

from __future__ import annotations

import re
from collections.abc import Callable

from playwright.sync_api import expect

from leyden.libs.contracts import ids
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from tests.contract.console.conftest import HOSTILE, SHOWN, Insert
from tests.support import builders
from tests.support.browser import Visitor


async def used_dataset(database: Database) -> str:
    """A dataset of 30 tasks, the last one hostile, with a run that trains on it and one that evaluates on it."""
    tasks: list[dict[str, object]] = [{"question": f"{number}+1"} for number in range(29)]
    dataset = await builders.add_dataset(database, [*tasks, {"question": HOSTILE + "x" * 100_000}], name="sums")
    await builders.add_run(database, dataset_id=dataset.id, config=builders.run_document(name="trains"))
    other = await builders.add_run(database, config=builders.run_document(name="evaluates"))
    await builders.add_run(database, config=builders.run_document(name="neither"))
    async with database.session() as session:
        values = {"dataset_id": dataset.id, "policy_version": 0, "rollouts_per_task": 1}
        session.add(tables.Evaluation(id=ids.evaluation_id(other.id, 1), run_id=other.id, number=1, **values))
    return dataset.id


def test_a_dataset_shows_its_runs_and_its_tasks_by_pages(
    insert: Insert[str], open_page: Callable[[str], Visitor]
) -> None:
    insert(used_dataset)
    visitor = open_page("/")
    page = visitor.page
    page.get_by_role("link", name="Datasets").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("region", name="Datasets").get_by_role("link", name="sums")).to_be_visible()
    assert visitor.violations() == []
    page.get_by_role("link", name="sums").focus()
    page.keyboard.press("Enter")
    runs = page.get_by_role("region", name="Runs").locator("tbody tr")
    expect(runs).to_have_count(2)
    expect(runs.nth(0)).to_contain_text("evaluation (tasks of")
    expect(runs.nth(1)).to_contain_text("training (tasks of")
    expect(page.locator("summary")).to_have_count(25)
    page.get_by_role("button", name="Next page").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_text("26 to 30")).to_be_visible()
    last = page.locator("summary").last
    # The task is JSON: a control character is an escape, and its backslash stands.
    expect(last).to_contain_text(SHOWN.replace("\\x1b", "\\u001b")[:40])
    last.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Show all 100,")).to_be_visible()
    assert visitor.violations() == []


def test_long_numbers_of_tasks_keep_their_digits(insert: Insert[str], open_page: Callable[[str], Visitor]) -> None:
    async def numbered(database: Database) -> str:
        dataset = await builders.add_dataset(database, [{"id": 1712345678901234567, "share": 0.25}])
        run = await builders.add_run(database, dataset_id=dataset.id)
        _, [rollout, _] = await builders.add_group(database, run)
        await builders.finish_rollout(database, rollout)
        return rollout.id

    rollout = insert(numbered)
    page = open_page(f"/rollouts/{rollout}").page
    page.locator("summary", has_text=re.compile("^Task$")).click()
    expect(page.locator("details[open]", has_text="1712345678901234567")).to_be_visible()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export as JSON").click()
    assert '"id": 1712345678901234567' in download.value.path().read_text()
    for link in ("Side by side", "questions"):
        page.get_by_role("link", name=link).first.click()
        page.locator("summary", has_text=re.compile("^Task$|^0: ")).first.click()
        expect(page.locator("details[open]", has_text="1712345678901234567").last).to_be_visible()


def test_without_a_dataset_the_page_names_the_command(open_page: Callable[[str], Visitor]) -> None:
    visitor = open_page("/datasets")
    expect(visitor.page.get_by_text("leyden dataset upload tasks.jsonl")).to_be_visible()
    assert visitor.violations() == []
    visitor.page.evaluate("location.hash = '#/datasets/none'")
    expect(visitor.page.get_by_role("alert")).to_contain_text("none")
    # The browser reports the answer 404 as an error of its own.
    visitor.complaints[:] = [one for one in visitor.complaints if "404" not in one]
