"""The page of a run's versions: evaluations, the best one, lineage, and the download of one."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import expect

from leyden.libs.store.database import Database
from tests.contract.api.test_comparison import measured_run
from tests.contract.api.test_weights import NAMES, add_version, make_version
from tests.contract.console.conftest import Insert
from tests.support import builders
from tests.support.browser import Visitor


def test_the_best_version_is_found_and_downloaded_by_keyboard(
    insert: Insert[tuple[str, str]], open_page: Callable[[str], Visitor], tmp_path: Path
) -> None:
    async def measured(database: Database) -> tuple[str, str]:
        parent = await builders.add_run(database)
        run = await measured_run(database, parent.dataset_id, 1e-6, [0.0, 1.0])
        async with database.session() as session:
            row = await session.get_one(type(run), run.id)
            row.parent_run_id, row.parent_version = parent.id, 3
        await add_version(database, run, make_version(tmp_path / "version"))
        await builders.add_policy_version(database, run, 1, path="/nowhere")
        await builders.add_policy_version(database, run, 2, pruned_at=run.created_at)
        return run.id, parent.id

    run, parent = insert(measured)
    visitor = open_page(f"/runs/{run}")
    page = visitor.page
    page.get_by_role("link", name="Versions").focus()
    page.keyboard.press("Enter")
    rows = page.get_by_role("region", name="Versions").locator("tbody tr")
    expect(rows).to_have_count(3)
    expect(rows.nth(0)).to_contain_text("0.500 [")
    expect(rows.nth(1)).to_contain_text("not measured")
    expect(rows.nth(2)).to_contain_text("removed")
    expect(page.get_by_role("link", name=parent)).to_have_attribute("href", f"#/runs/{parent}/versions")
    page.get_by_role("button", name="Files of version 1").click()
    expect(rows.nth(1)).to_contain_text("the API's machine has no folder /nowhere: run `leyden policy export`")
    page.get_by_role("button", name="Files of version 0").focus()
    page.keyboard.press("Enter")
    link = page.get_by_role("link", name="Download version 0")
    expect(rows.nth(0)).to_contain_text("(3 files, 3.0 MiB)")
    link.focus()
    with page.expect_download() as download:
        page.keyboard.press("Enter")
    assert download.value.suggested_filename == f"{run}-version-0.tar"
    with tarfile.open(download.value.path()) as archive:
        assert archive.getnames() == NAMES
    assert visitor.violations() == []


def test_versions_that_compare_in_nothing_say_why_none_is_best(
    insert: Insert[str], open_page: Callable[[str], Visitor]
) -> None:
    async def removed(database: Database) -> str:
        run = await builders.add_run(database)
        await builders.add_run(database, lead_run_id=run.id, policy="critic")
        for version in range(2):
            await builders.add_policy_version(database, run, version, pruned_at=run.created_at if version else None)
        _, [rollout] = await builders.add_group(database, run, size=1, admitted_version=1, state="complete")
        await builders.finish_rollout(database, rollout)
        return run.id

    visitor = open_page(f"/runs/{insert(removed)}/versions")
    expect(visitor.page.get_by_text("the base model", exact=True)).to_be_visible()
    expect(visitor.page.get_by_text("Best versionnone yet")).to_be_visible()
    assert visitor.violations() == []


def test_a_run_without_versions_names_the_next_command(
    insert: Insert[str], open_page: Callable[[str], Visitor]
) -> None:
    async def new_run(database: Database) -> str:
        return (await builders.add_run(database)).id

    run = insert(new_run)
    visitor = open_page(f"/runs/{run}/versions")
    expect(visitor.page.get_by_text(f"leyden run watch {run}")).to_be_visible()
    assert visitor.violations() == []
