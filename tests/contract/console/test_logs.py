"""The output of a run's processes: trainers and attempts."""

from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import expect

from leyden.libs.store import tables
from leyden.libs.store.database import Database
from tests.contract.console.conftest import HOSTILE, SHOWN, Insert
from tests.support import builders
from tests.support.browser import Visitor


async def printed(database: Database) -> str:
    """Two finished rollouts, one of which failed, with a file; a trainer that ended."""
    run = await builders.add_run(database)
    _, (silent, loud) = await builders.add_group(database, run)
    await builders.finish_rollout(database, silent)
    await builders.finish_rollout(
        database, loud, reward=None, kind="agent_error", stdout_tail=f"one\n{HOSTILE}", stderr_tail="two\x07"
    )
    end = {"reason": "the machine ended it", "output": f"step 2\n{HOSTILE}"}
    async with database.session() as session:
        names = {"rollout_id": loud.id, "attempt": 1, "run_id": run.id}
        session.add(tables.Artifact(path="notes/a b.txt", size_bytes=3000, content=b"left\n", **names))
        session.add(tables.TrainerEnd(run_id=run.id, attempt=2, state="killed", step=1, **end))
    return run.id


def test_logs_show_what_trainers_and_attempts_printed(insert: Insert[str], open_page: Callable[[str], Visitor]) -> None:
    run = insert(printed)
    visitor = open_page(f"/runs/{run}")
    page = visitor.page
    page.get_by_role("link", name="Logs", exact=True).click()
    expect(page.get_by_role("list", name="Rollouts").get_by_role("listitem")).to_have_count(2)
    page.get_by_text("Unplanned ends of the trainer: 1, the last after step 1 (killed)").click()
    expect(page.get_by_text(f"step 2\n{SHOWN}")).to_be_visible()
    page.get_by_label("Rollouts that").select_option("failed")
    rollouts = page.get_by_role("list", name="Rollouts").get_by_role("listitem").filter(has_text="agent_error")
    expect(rollouts).to_have_count(1)
    rollouts.get_by_text("agent_error", exact=False).first.click()
    expect(rollouts.get_by_text(f"one\n{SHOWN}")).to_be_visible()
    expect(rollouts.get_by_text("two\\x07")).to_be_visible()
    expect(rollouts).to_contain_text("2.9 KiB, cut after 5 bytes")
    with page.expect_download() as download:
        rollouts.get_by_role("link", name="notes/a b.txt").click()
    assert download.value.path().read_bytes() == b"left\n"
    assert visitor.violations() == []
    assert "attempts=failed" in page.url


def test_logs_of_a_new_run_say_what_to_do(insert: Insert[str], open_page: Callable[[str], Visitor]) -> None:
    async def new(database: Database) -> str:
        return (await builders.add_run(database)).id

    visitor = open_page(f"/runs/{insert(new)}/logs")
    expect(visitor.page.get_by_text("No trainer of the run has ended without a plan.")).to_be_visible()
    expect(visitor.page.get_by_text("leyden logs trainer", exact=True)).to_be_visible()
    expect(visitor.page.get_by_text("leyden status", exact=True)).to_be_visible()
    assert visitor.violations() == []
