"""Re-rolls of a group's siblings, on its page, on their own, and in the file of rollouts."""

from __future__ import annotations

import csv
from collections.abc import Callable

from playwright.sync_api import expect

from leyden.libs.store import tables
from leyden.libs.store.database import Database
from tests.contract.console.conftest import Insert
from tests.support import builders
from tests.support.browser import Visitor


async def rerolled(database: Database) -> tuple[str, str]:
    """A sibling and two re-rolls of it from its second call; returns the run and the group."""
    credit = {"baseline": {"type": "monte_carlo"}, "rule": {"type": "identical"}}
    run = await builders.add_run(database, config=builders.run_document(credit=credit))
    group, rollouts = await builders.add_group(database, run, size=4)
    for rollout, reward in zip(rollouts, (1.0, 0.0, 0.5, 0.0), strict=True):
        await builders.finish_rollout(database, rollout, reward=reward)
    async with database.session() as session:
        for rollout in rollouts[2:]:
            row = await session.get_one(tables.Rollout, rollout.id)
            row.rerolls_of, row.from_call = rollouts[0].id, 1
    return run.id, group.id


def test_rerolls_name_the_sibling_and_the_call_from_which_they_go_on(
    insert: Insert[tuple[str, str]], open_page: Callable[[str], Visitor]
) -> None:
    run, group = insert(rerolled)
    visitor = open_page(f"/groups/{group}")
    page = visitor.page
    table = page.get_by_role("region", name="Re-rolls")
    expect(table.locator("tbody tr")).to_have_count(2)
    expect(table.locator("tbody tr").first.get_by_role("cell")).to_have_text(
        ["Sibling 0", "call 2", "finished", "0.500", "succeeded"]
    )
    expect(page.get_by_role("region", name="Siblings").get_by_role("columnheader")).to_have_count(2)
    assert visitor.violations() == []

    table.get_by_role("link", name=f"{group}.2").click()
    expect(page.get_by_text(f"{group}.0, from call 2")).to_be_visible()
    expect(page.get_by_text("it is a re-roll, which measures the value of a call and never trains")).to_be_visible()
    assert visitor.violations() == []

    page.evaluate(f"location.hash = '#/runs/{run}/rollouts'")
    expect(page.get_by_text("re-roll")).to_have_count(2)
    with page.expect_download() as download:
        page.get_by_role("button", name="Download as CSV").click()
    with download.value.path().open(newline="") as file:
        rows = {row["id"]: (row["rerolls_of"], row["from_call"]) for row in csv.DictReader(file)}
    own = ("", "")
    again = (f"{group}.0", "1")
    assert rows == {f"{group}.{number}": again if number > 1 else own for number in range(4)}
