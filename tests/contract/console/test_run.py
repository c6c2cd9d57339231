"""The page of one run."""

from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import expect

from leyden.libs.contracts.call_counts import CallCounts
from leyden.libs.store.database import Database
from tests.contract.console.conftest import HOSTILE, SHOWN, Insert
from tests.support import builders
from tests.support.browser import Visitor


def test_the_model_calls_of_a_run_are_counted(insert: Insert[str], open_page: Callable[[str], Visitor]) -> None:
    counts = CallCounts(
        calls=12, malformed=3, overflows=1, untrainable={"nobody received the answer": 2}, tools={HOSTILE: {"error": 5}}
    )

    async def counted(database: Database) -> str:
        run = await builders.add_run(database)
        group, _ = await builders.add_group(database, run, size=1)
        await builders.add_credited_group(database, group, calls=counts.model_dump())
        return run.id

    visitor = open_page(f"/runs/{insert(counted)}")
    table = visitor.page.get_by_role("region", name="Model calls")
    for name, count in (
        ("all", 12),
        ("malformed", 3),
        ("beyond the context", 1),
        ("do not train: nobody received the answer", 2),
        (f"tool {SHOWN}: error", 5),
    ):
        row = table.get_by_role("row").filter(has=visitor.page.get_by_role("rowheader", name=name, exact=True))
        expect(row.get_by_role("cell")).to_have_text(str(count))
    expect(table.get_by_role("row")).to_have_count(6)
    assert visitor.violations() == []
