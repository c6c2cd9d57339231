"""A run's rollouts on its page: filters that the address holds, sorting and pages, of 10,000 rollouts."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
from playwright.sync_api import expect

from leyden.libs.store import tables
from leyden.libs.store.database import Database
from tests.contract.api.test_rollout_filters import excused_run, filtered_run
from tests.contract.console.conftest import HOSTILE, SHOWN, Insert
from tests.support import builders
from tests.support.browser import Visitor
from tests.support.long import long_only

GROUPS, SIBLINGS = 1250, 8
ROLLOUTS = GROUPS * SIBLINGS

# As ended rollouts would be; every hundredth group failed.
MANY = """
    SET session_replication_role = replica;
    INSERT INTO groups (id, run_id, number, dataset_id, task_number, size, admitted_version, state)
        SELECT :run || '.' || n, :run, n, 'd', n % 50, :siblings, n / 100, 'complete'
        FROM generate_series(0, :groups - 1) n;
    INSERT INTO rollouts (id, run_id, group_id, sibling, state, attempt, reward, reason, created_at)
        SELECT id || '.' || s, :run, id, s, 'finished', 1, number + s / 10.0,
            CASE WHEN number % 100 = 99 THEN 'agent_error' ELSE 'succeeded' END,
            now() + number * interval '1 second' + s * interval '1 millisecond'
        FROM groups, generate_series(0, :siblings - 1) s;
    INSERT INTO outcomes (rollout_id, attempt, run_id, kind, facts, stdout_tail, stderr_tail)
        SELECT id, 1, :run, 'succeeded', '{}', 'output of ' || id, '' FROM rollouts;
    ANALYZE
"""


def add_many(dsn: str, run_id: str) -> None:
    statements = MANY.replace(":run", f"'{run_id}'").replace(":groups", str(GROUPS)).replace(":siblings", str(SIBLINGS))
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in statements.split(";"):
            connection.execute(statement.encode())


def downloaded(visitor: Visitor) -> list[dict[str, Any]]:
    """The rows of the file that the page's button makes."""
    with visitor.page.expect_download() as download:
        visitor.page.get_by_role("button", name="Download all that pass the filter").click()
    assert download.value.suggested_filename.endswith("-rollouts.jsonl")
    return [json.loads(line) for line in Path(download.value.path()).read_text().splitlines()]


@long_only
def test_ten_thousand_rollouts_are_filtered_sorted_and_paged_by_an_address(
    insert: Insert[str], open_page: Callable[[str], Visitor], postgres_dsn: str
) -> None:
    async def run_of(database: Database) -> str:
        return (await builders.add_run(database)).id

    run = insert(run_of)
    add_many(postgres_dsn, run)
    visitor = open_page(f"/runs/{run}?sort=highest")
    page, rows = visitor.page, visitor.page.get_by_role("region", name="Rollouts").locator("tbody tr")
    expect(page.get_by_text(f"1 to 100 of {ROLLOUTS:,}")).to_be_visible()
    expect(rows.first).to_contain_text(f"{GROUPS - 1}.700")
    page.get_by_role("button", name="Next page").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_text(f"101 to 200 of {ROLLOUTS:,}")).to_be_visible()
    page.get_by_role("button", name="Page before").click()
    assert len(downloaded(visitor)) == ROLLOUTS

    page.get_by_label("Cause", exact=True).select_option("agent_error")
    expect(page.get_by_text(f"1 to {GROUPS // 100 * SIBLINGS} of {GROUPS // 100 * SIBLINGS}")).to_be_visible()
    page.get_by_label("Cause", exact=True).select_option("any")
    page.get_by_label("Failed", exact=True).select_option("yes")
    failed = GROUPS // 100 * SIBLINGS
    expect(page.get_by_text(f"1 to {failed} of {failed}")).to_be_visible()
    expect(page).to_have_url(re.compile(r"\?failed=true&sort=highest$"))
    page.get_by_label("Reward from").fill("1000")
    page.get_by_label("to", exact=True).fill("1099.2")
    expect(page.get_by_text("1 to 3 of 3")).to_be_visible()
    expect(page.get_by_text(f"leyden rollout list --run {run} --evaluation none --failed")).to_contain_text(
        "--reward-min 1000 --reward-max 1099.2 --sort highest"
    )
    assert visitor.violations() == []

    again = open_page(page.url.partition("#")[2])
    expect(again.page.get_by_text("1 to 3 of 3")).to_be_visible()
    expect(again.page.get_by_label("Reward from")).to_have_value("1000")
    again.page.get_by_label("Failed", exact=True).select_option("any")
    expect(again.page.get_by_text("1 to 100 of 795")).to_be_visible()
    again.page.get_by_label("Text", exact=True).fill(f"{run}.1002.3")
    expect(again.page.get_by_text("1 to 1 of 1")).to_be_visible()
    again.page.get_by_label("Text", exact=True).fill(HOSTILE)
    expect(again.page.get_by_text("No rollout matches the filter.")).to_be_visible()


def test_a_hostile_reason_is_shown_as_text(insert: Insert[str], open_page: Callable[[str], Visitor]) -> None:
    async def hostile(database: Database) -> str:
        run = await builders.add_run(database)
        _, [rollout] = await builders.add_group(database, run, size=1)
        await builders.finish_rollout(database, rollout, kind="agent_error", reward=None)
        async with database.session() as session:
            (await session.get_one(type(rollout), rollout.id)).reason = HOSTILE
        return run.id

    visitor = open_page(f"/runs/{insert(hostile)}?text=evil")
    expect(visitor.page.get_by_role("cell", name=SHOWN)).to_be_visible()
    assert visitor.violations() == []


def test_the_rollouts_of_a_filter_are_downloaded(insert: Insert[str], open_page: Callable[[str], Visitor]) -> None:
    async def rewarded(database: Database) -> str:
        run = await builders.add_run(database)
        _, rollouts = await builders.add_group(database, run, size=3)
        for rollout, reward in zip(rollouts, (0.0, 0.5, 1.0), strict=True):
            await builders.finish_rollout(database, rollout, reward=reward)
        return run.id

    run = insert(rewarded)
    visitor = open_page(f"/runs/{run}?reward_min=0.5&sort=highest")
    rows = downloaded(visitor)
    assert [(row["run_id"], row["reward"]) for row in rows] == [(run, 1.0), (run, 0.5)]
    assert visitor.violations() == []


def test_rollouts_are_filtered_by_role_tool_and_component_and_downloaded_as_csv(
    insert: Insert[str], open_page: Callable[[str], Visitor]
) -> None:
    async def hostile(database: Database) -> str:
        run, rollouts = await filtered_run(database)
        async with database.session() as session:
            (await session.get_one(type(rollouts[0]), rollouts[0].id)).reason = '=HYPERLINK("x"),'
            (await session.get_one(tables.Group, f"{run.id}.0")).agent = "solver"
        return run.id

    run = insert(hostile)
    visitor = open_page(f"/runs/{run}/rollouts")
    page, rows = visitor.page, visitor.page.get_by_role("region", name="Rollouts").locator("tbody tr")
    expect(rows).to_have_count(4)
    with page.expect_download() as download:
        page.get_by_role("button", name="Download as CSV").click()
    assert download.value.suggested_filename == f"{run}-rollouts.csv"
    with Path(download.value.path()).open(newline="") as file:
        found = {row["id"]: row for row in csv.DictReader(file)}
    assert len(found) == 4
    assert found[f"{run}.0.0"]["reason"] == '\'=HYPERLINK("x"),'
    assert (found[f"{run}.0.1"]["reward"], found[f"{run}.0.1"]["agent"]) == ("-0.5", "solver")
    page.get_by_label("Tool", exact=True).fill("search")
    expect(rows).to_have_count(3)
    page.get_by_label("Role", exact=True).fill("writer")
    expect(rows).to_have_count(1)
    page.get_by_label("Role", exact=True).fill("")
    page.get_by_label("Component", exact=True).fill("right")
    page.get_by_label("Value from").fill("0.5")
    expect(page).to_have_url(re.compile(r"\?tool=search&component=right&component_min=0.5$"))
    expect(rows).to_have_count(1)
    expect(page.get_by_text("--tool search --component right --component-min 0.5")).to_be_visible()
    assert visitor.violations() == []


def test_rollouts_are_filtered_by_cause(insert: Insert[str], open_page: Callable[[str], Visitor]) -> None:
    async def excused(database: Database) -> str:
        return (await excused_run(database, HOSTILE))[0].id

    run = insert(excused)
    visitor = open_page(f"/runs/{run}/rollouts")
    page, rows = visitor.page, visitor.page.get_by_role("region", name="Rollouts").locator("tbody tr")
    expect(rows).to_have_count(8)
    cause = page.get_by_label("Cause", exact=True)
    expect(cause.locator("option")).to_have_count(5)
    expect(cause.locator("option", has_text="(2)").first).to_contain_text(SHOWN[:40])
    cause.focus()
    page.keyboard.type("ungraded")
    expect(rows).to_have_count(1)
    expect(page).to_have_url(re.compile(r"\?cause=ungraded$"))
    expect(page.get_by_text(f"leyden rollout list --run {run} --evaluation none --cause ungraded")).to_be_visible()
    cause.select_option(HOSTILE)
    expect(rows).to_have_count(2)
    assert visitor.violations() == []
    page.goto(page.url.replace(page.url.partition("cause=")[2], "gone"))
    expect(page.get_by_text("No rollout matches the filter.")).to_be_visible()
    expect(cause).to_have_value("gone")
    assert visitor.violations() == []


def test_causes_are_those_of_the_rollouts_that_the_list_shows(
    insert: Insert[str], open_page: Callable[[str], Visitor]
) -> None:
    async def with_evaluation(database: Database) -> str:
        run, _ = await excused_run(database)
        async with database.session() as session:
            columns = {"dataset_id": run.dataset_id, "policy_version": 0, "rollouts_per_task": 1}
            session.add(tables.Evaluation(id=f"{run.id}.e1", run_id=run.id, number=1, **columns))
            await session.flush()
            (await session.get_one(tables.Group, f"{run.id}.3")).evaluation_id = f"{run.id}.e1"
        return run.id

    run = insert(with_evaluation)
    page = open_page(f"/runs/{run}/rollouts").page
    options = page.get_by_label("Cause", exact=True).locator("option")
    expect(options).to_have_count(4)
    expect(options.filter(has_text="agent_error (1)")).to_have_count(1)
    page.get_by_label("Of", exact=True).select_option(f"{run}.e1")
    expect(options).to_have_text(["any", "agent_error (1)", "ungraded (1)"])
    page.get_by_label("Of", exact=True).select_option("all")
    expect(options).to_have_count(5)
