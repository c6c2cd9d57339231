"""The page of a run's versions: evaluations, the best one, lineage, and the download of one."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import expect

from leyden.libs.store import tables
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
        _, rollouts = await builders.add_group(database, run, 90, admitted_version=1, state="complete")
        for rollout, reward in zip(rollouts, (0.0, 0.5), strict=True):
            await builders.finish_rollout(database, rollout, reward=reward)
        async with database.session() as session:
            session.add(tables.Engine(url="http://e", run_id=run.id, policy_version=1, state="serving"))
        return run.id, parent.id

    run, parent = insert(measured)
    visitor = open_page(f"/runs/{run}")
    page = visitor.page
    page.get_by_role("link", name="Versions").focus()
    page.keyboard.press("Enter")
    rows = page.get_by_role("region", name="Versions").locator("tbody tr")
    expect(rows).to_have_count(3)
    expect(rows.nth(0)).to_contain_text("0.500 [")
    expect(rows.nth(0)).to_contain_text("kept")
    expect(rows.nth(1)).to_contain_text("not measured0.250served by 1 engine")
    expect(page.get_by_role("link", name="Rollouts of step 1", exact=True)).to_have_attribute(
        "href", f"#/runs/{run}/rollouts?step=1"
    )
    expect(rows.nth(2)).to_contain_text("removed")
    expect(page.get_by_title(parent)).to_have_attribute("href", f"#/runs/{parent}/versions")
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
    page.get_by_label("Only versions whose files are there").focus()
    page.keyboard.press("Space")
    expect(rows).to_have_count(2)
    expect(page.get_by_text(f"leyden policy list {run} --kept")).to_be_visible()


def test_each_policy_of_a_run_has_its_versions(insert: Insert[str], open_page: Callable[[str], Visitor]) -> None:
    async def team(database: Database) -> str:
        parent = await builders.add_run(database)
        run = await builders.add_run(database, parent_run_id=parent.id, parent_version=3)
        critic = await builders.add_run(database, lead_run_id=run.id, policy="critic", parent_version=2)
        for version in range(4):
            await builders.add_policy_version(database, critic, version)
        return run.id

    run = insert(team)
    visitor = open_page(f"/runs/{run}/versions")
    page = visitor.page
    policies = page.get_by_role("region", name="Policies").locator("tbody tr")
    expect(policies).to_have_count(2)
    expect(policies.nth(0)).to_contain_text("none yet")
    expect(policies.nth(1)).to_contain_text("version 2 of")
    assert visitor.violations() == []
    page.get_by_role("link", name="critic").focus()
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(r"\?policy=critic$"))
    expect(page.get_by_role("region", name="Versions").locator("tbody tr")).to_have_count(4)
    expect(page.get_by_role("link", name="critic")).to_have_attribute("aria-current", "true")


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
    expect(visitor.page.get_by_role("definition").filter(has_text="the base model")).to_be_visible()
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
