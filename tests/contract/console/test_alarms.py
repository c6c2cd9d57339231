"""The page of all alarms, the count beside its link, and the alarms on a run's page."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime

from playwright.sync_api import expect

from leyden.libs.contracts.alarms import ALARM_RULES
from leyden.libs.store.alarms.judging import judge_run
from leyden.libs.store.alarms.phases import WORDS
from leyden.libs.store.database import Database
from tests.contract.console.conftest import HOSTILE, SHOWN, Insert
from tests.support import builders
from tests.support.alarms import add_alarm
from tests.support.browser import Visitor
from tests.unit.store.test_phase_alarms import trained

NOW = datetime.now(tz=UTC)
MANY = 60


async def stored(database: Database) -> str:
    """A run whose alarm is active and whose earlier ones have ended, and a run that ended with one."""
    run = await builders.add_run(database, config=builders.run_document(name="works"))
    hostile = {"reason": f"tool {HOSTILE} failed", "evidence": {"cause": HOSTILE, "share": 0.75}}
    await add_alarm(database, run.id, "tool_fails", number=MANY, subject=HOSTILE, **hostile)
    for number in range(1, MANY):
        await add_alarm(database, run.id, "stalled", number=number, minutes_ago=MANY - number, ended_at=NOW)
    over = await builders.add_run(database, config=builders.run_document(name="over"))
    await add_alarm(database, over.id, "no_reward", minutes_ago=5)
    await builders.end_run(database, over)
    return run.id


def test_alarms_of_all_runs_are_listed_filtered_and_paged(
    insert: Insert[str], open_page: Callable[[str], Visitor]
) -> None:
    run = insert(stored)
    visitor = open_page("/")
    page = visitor.page
    page.get_by_role("navigation", name="Main").get_by_role("link", name="Alarms (1)").click()
    rows = page.get_by_role("list", name="Alarms").locator("> li")
    expect(rows).to_have_count(50)
    first = rows.first
    expect(first).to_contain_text(re.compile(r"^tool_fails, warning since .*active"))
    expect(first.get_by_role("link", name="works")).to_have_attribute("href", f"#/runs/{run}")
    expect(first).to_contain_text(f"tool {SHOWN} failed")
    expect(first).to_contain_text(f"Remedy: {ALARM_RULES['tool_fails'].remedy}")
    first.get_by_text("Evidence").click()
    expect(first.get_by_text(f"cause: {SHOWN}")).to_be_visible()
    expect(rows.nth(1)).to_contain_text("stalled, critical since")
    expect(rows.nth(1)).to_contain_text(re.compile(r"until .*ended"))
    assert visitor.violations() == []
    page.get_by_role("button", name="Next page").click()
    expect(page.get_by_text(f"51 to {MANY + 1}", exact=False)).to_be_visible()
    page.get_by_label("State", exact=True).select_option("until its run's end")
    expect(rows).to_have_count(1)
    expect(rows.first).to_contain_text(re.compile(r"no_reward, warning since .* until the run's end at .*over"))
    page.get_by_label("Rule", exact=True).select_option("no_reward (1)")
    page.get_by_label("Run", exact=True).fill("over")
    expect(page.get_by_text("leyden alarms --state lasted --name no_reward --run over")).to_be_visible()
    expect(rows).to_have_count(1)
    page.get_by_label("State", exact=True).select_option("active")
    expect(page.get_by_text("No alarm matches the filter.")).to_be_visible()
    assert "state=active&name=no_reward&run=over" in page.url and visitor.violations() == []


def test_a_platform_without_alarms_says_so_and_an_unknown_count_is_not_zero(
    open_page: Callable[[str], Visitor],
) -> None:
    visitor = open_page("/alarms")
    expect(visitor.page.get_by_text("No run has had an alarm", exact=False)).to_be_visible()
    expect(visitor.page.get_by_text("leyden alarms", exact=True)).to_be_visible()
    link = visitor.page.get_by_role("navigation", name="Main").get_by_role("link", name=re.compile("^Alarms"))
    expect(link).to_have_text("Alarms (0)")
    assert visitor.violations() == []
    visitor.page.route("**/v1/alarms?*", lambda route: route.fulfill(json={"items": [], "names": None}))
    visitor.page.reload()
    expect(link).to_have_text("Alarms")


def test_a_runs_page_has_its_ended_alarms_below_those_that_last(
    insert: Insert[str], open_page: Callable[[str], Visitor]
) -> None:
    visitor = open_page(f"/runs/{insert(stored)}")
    lasting = visitor.page.get_by_role("list", name="Alarms", exact=True).locator("> li")
    expect(lasting).to_have_count(1)
    expect(lasting).to_contain_text("tool_fails, warning since")
    visitor.page.get_by_text("Ended alarms", exact=True).click()
    ended = visitor.page.get_by_role("list", name="Ended alarms").locator("> li")
    expect(ended).to_have_count(20)
    expect(ended.first).to_contain_text(re.compile("^stalled, critical since .* until "))
    assert visitor.violations() == []


def test_a_phase_that_takes_too_long_is_shown_with_its_figures_and_the_alarms_of_policies_too(
    insert: Insert[tuple[str, str]], open_page: Callable[[str], Visitor]
) -> None:
    async def slow(database: Database) -> tuple[str, str]:
        made = await trained(database, 3)
        [rollout] = (await builders.add_group(database, made.run, 4, size=1))[1]
        attempt = {"state": "running", "started_at": made.ago(30)}
        await builders.add_attempt(database, rollout, **attempt)
        policy = await builders.add_run(
            database, dataset_id=made.run.dataset_id, id="run-policy", lead_run_id=made.run.id, policy="checker"
        )
        await add_alarm(database, policy.id, "kl_high")
        async with database.session() as session:
            await judge_run(session, made.run.id)
        return made.run.id, rollout.id

    run, rollout = insert(slow)
    visitor = open_page(f"/runs/{run}")
    alarms = visitor.page.get_by_role("list", name="Alarms", exact=True).locator("> li")
    found = alarms.filter(has_text="phase_slow")
    expect(found).to_contain_text(re.compile(r"sample: an agent has been at work for 18\d\d s: in the last 3 steps"))
    expect(found).to_contain_text(f"Remedy: {WORDS['sample'][1]}")
    found.get_by_text("Evidence").click()
    expect(found.get_by_text(f"oldest: {rollout}")).to_be_visible()
    expect(alarms.filter(has_text="kl_high")).to_contain_text("policy checker")
    visitor.page.get_by_role("navigation", name="Main").get_by_role("link", name=re.compile("^Alarms")).click()
    expect(visitor.page.get_by_role("listitem").filter(has_text="phase_slow, warning")).to_contain_text("active")
    assert visitor.violations() == []
