"""The page on which people grade rollouts one after another by keyboard, and the page of the platform."""

from __future__ import annotations

import re
from collections.abc import Callable

from playwright.sync_api import Browser, expect

from leyden.libs.client import Client
from leyden.libs.contracts.api.tokens import ApiScope
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from tests.contract.api.test_waiting import run_that_waits
from tests.contract.console.conftest import HOSTILE, SHOWN, Insert, loses
from tests.fakes.served_api import TOKEN
from tests.support import builders
from tests.support.browser import Visitor


async def waiting_run(database: Database) -> tuple[str, list[str]]:
    run, rollouts = await run_that_waits(database, output=HOSTILE)
    return run.id, [one.id for one in rollouts]


def test_a_person_grades_one_rollout_after_the_other_by_keyboard(
    insert: Insert[tuple[str, list[str]]], browser: Browser, api_url: str
) -> None:
    run, [first, second] = insert(waiting_run)
    with Client(api_url, TOKEN) as leyden:
        secret = leyden.create_token("ann", [ApiScope.WRITE]).token
        visitor = Visitor(browser.new_context().new_page())
        page = visitor.page
        page.goto(f"{api_url}/#/runs/{run}/rate")
        page.get_by_label("Token", exact=True).fill(secret)
        page.keyboard.press("Enter")
        expect(page.get_by_role("article", name=f"Rollout {first}")).to_contain_text(SHOWN)
        expect(page.get_by_label("thumbs")).to_be_focused()
        assert visitor.violations() == []
        page.keyboard.type("0.5")
        page.keyboard.press("Enter")
        expect(page.get_by_role("article", name=f"Rollout {second}")).to_be_visible()
        expect(page.get_by_label("thumbs")).to_be_focused()
        page.keyboard.press("Escape")
        expect(page.get_by_text("You have skipped all that wait.")).to_be_visible()
        page.get_by_role("button", name="Show them again").click()
        expect(page.get_by_label("thumbs")).to_be_focused()
        page.keyboard.type("-1")
        page.keyboard.press("Tab")
        page.keyboard.type("rude")
        page.keyboard.press("Enter")
        expect(page.get_by_text("No rollout waits for your grade.")).to_be_visible()
        [given] = leyden.rollout(first).feedback
        assert (given.component, given.value, given.comment, given.given_by) == ("thumbs", 0.5, None, "ann")
        [given] = leyden.rollout(second).feedback
        assert (given.value, given.comment) == (-1.0, "rude")
    assert (visitor.violations(), visitor.complaints, page.evaluate("window.hacked")) == ([], [], None)
    page.context.close()


def test_a_rollout_that_somebody_else_grades_stays_until_this_person_leaves_it(
    insert: Insert[tuple[str, list[str]]], open_writer: Callable[[str], Visitor], api_url: str
) -> None:
    _, [first, second] = insert(waiting_run)
    visitor = open_writer("/rate")
    page = visitor.page
    shown = page.get_by_role("article", name=f"Rollout {first}")
    expect(shown).to_be_visible()
    expect(page.get_by_label("thumbs")).to_be_focused()
    page.keyboard.type("0.")
    with Client(api_url, TOKEN) as leyden:
        leyden.rate(first, "thumbs", 1.0)
        with page.expect_response("**/v1/feedback?*"):
            pass
        expect(shown.get_by_role("alert")).to_contain_text("waits no more for thumbs")
        expect(page.get_by_label("thumbs")).to_be_focused()
        assert visitor.violations() == []
        page.keyboard.type("5")
        expect(page.get_by_label("thumbs")).to_have_value("0.5")
        page.keyboard.press("Enter")
        page.keyboard.press("Escape")
        expect(page.get_by_role("article", name=f"Rollout {second}")).to_be_visible()
        assert [[one.value for one in leyden.rollout(name).feedback] for name in (first, second)] == [[1.0], []]
        # Escape has skipped nothing: the first one does not wait.
        page.keyboard.type("1")
        page.keyboard.press("Enter")
        expect(page.get_by_text("No rollout waits for your grade.")).to_be_visible()


def test_a_rollout_stays_until_each_of_its_components_has_a_grade(
    insert: Insert[tuple[str, list[str]]], open_writer: Callable[[str], Visitor], api_url: str
) -> None:
    async def two_components(database: Database) -> tuple[str, list[str]]:
        components = [{"name": name, "from": "feedback"} for name in ("thumbs", "style")]
        run, rollouts = await run_that_waits(database, size=1, values=2, components=components)
        return run.id, [one.id for one in rollouts]

    _, [rollout] = insert(two_components)
    visitor = open_writer("/rate")
    page = visitor.page
    expect(page.get_by_label("thumbs")).to_be_focused()
    page.keyboard.type("0.5")
    page.keyboard.press("Enter")
    expect(page.get_by_label("thumbs")).to_have_count(0)
    expect(page.get_by_role("article", name=f"Rollout {rollout}")).to_be_visible()
    expect(page.get_by_label("style")).to_be_focused()
    assert visitor.violations() == []
    # With another comment it is another grade, and no repeat of the one whose answer was lost.
    page.keyboard.type("1")
    page.route("**/feedback", loses)
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert").filter(has_text="the API does not answer")).to_be_visible()
    page.unroute("**/feedback")
    page.get_by_label("Comment").fill("kind")
    page.keyboard.press("Enter")
    expect(page.get_by_text("No rollout waits for your grade.")).to_be_visible()
    with Client(api_url, TOKEN) as leyden:
        given = [(one.component, one.value, one.comment) for one in leyden.rollout(rollout).feedback]
    assert sorted(given, key=str) == [("style", 1.0, "kind"), ("style", 1.0, None), ("thumbs", 0.5, None)]
    # The browser reports the lost answer as an error of its own.
    visitor.complaints[:] = [one for one in visitor.complaints if "Failed to load" not in one]


def test_those_behind_the_first_hundred_are_reached(
    insert: Insert[list[str]], open_page: Callable[[str], Visitor]
) -> None:
    async def many(database: Database) -> list[str]:
        _, rollouts = await run_that_waits(database, size=101)
        return [one.id for one in rollouts]

    *before, last = insert(many)
    page = open_page("/rate").page
    for rollout in before:
        expect(page.get_by_role("article", name=f"Rollout {rollout}")).to_be_visible()
        page.get_by_role("button", name=re.compile("^Skip")).click()
    page.get_by_role("button", name="Show the next ones").click()
    expect(page.get_by_role("article", name=f"Rollout {last}")).to_be_visible()


def test_a_reader_is_told_which_token_grades(
    insert: Insert[tuple[str, list[str]]], open_page: Callable[[str], Visitor]
) -> None:
    insert(waiting_run)
    visitor = open_page("/rate")
    expect(visitor.page.get_by_text("--scope write --expires 30d")).to_be_visible()
    expect(visitor.page.get_by_label("thumbs")).to_be_disabled()
    expect(visitor.page.get_by_role("button", name="Grade (Enter)")).to_be_disabled()
    assert visitor.violations() == []


def test_a_grade_that_comes_too_late_is_refused_with_the_reason(
    insert: Insert[tuple[str, list[str]]], browser: Browser, api_url: str
) -> None:
    run, _ = insert(waiting_run)

    async def cancel(database: Database) -> tuple[str, list[str]]:
        async with database.session() as session:
            (await session.get_one(tables.Run, run)).intent = "cancelled"
        return run, []

    with Client(api_url, TOKEN) as leyden:
        secret = leyden.create_token("ann", [ApiScope.WRITE]).token
    page = browser.new_context().new_page()
    page.goto(f"{api_url}/#/rate")
    page.get_by_label("Token", exact=True).fill(secret)
    page.keyboard.press("Enter")
    expect(page.get_by_label("thumbs")).to_be_focused()
    insert(cancel)
    page.keyboard.type("1")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("feedback for its rollouts counts nowhere")
    page.context.close()


def test_the_platform_shows_services_pools_and_what_is_unknown(
    insert: Insert[str], open_page: Callable[[str], Visitor]
) -> None:
    async def pools(database: Database) -> str:
        run, _ = await run_that_waits(database)
        async with database.session() as session:
            (await session.get_one(tables.Pool, "default")).run_ids = [run.id]
            session.add(tables.Pool(name="spare", waiting=[run.id]))
            session.add(
                tables.Engine(url="http://one", pool="default", run_id=run.id, policy_version=3, state="serving")
            )
            session.add(tables.Engine(url="http://two", pool="default", state="unreachable", detail=HOSTILE))
        for version in range(2):
            await builders.add_policy_version(database, run, version, path="/nowhere")
        return run.id

    insert(pools)
    visitor = open_page("/")
    page = visitor.page
    page.get_by_role("link", name="Platform").focus()
    page.keyboard.press("Enter")
    services = page.get_by_role("region", name="Services")
    expect(services.get_by_role("row").filter(has_text="api")).to_contain_text("connected")
    expect(services.get_by_role("row").filter(has_text="trainer")).to_contain_text("not connected")
    engines = page.get_by_role("region", name="Engines of default").locator("tbody tr")
    expect(engines.nth(0)).to_contain_text("servingsupport3")
    expect(engines.nth(1)).to_contain_text("unreachableunknownunknown")
    expect(engines.nth(1)).to_contain_text(SHOWN)
    expect(page.get_by_text("No engine of this pool has been seen")).to_be_visible()
    disks = page.get_by_role("region", name="Disks").locator("tbody tr")
    expect(disks.nth(0)).to_have_text("versions and checkpointsunknownunknownthe API's machine has no folder /nowhere")
    expect(disks.nth(1)).to_have_text(re.compile(r"^the database[\d.]+ .iB[\d.]+ .iB$"))
    assert visitor.violations() == []
    page.get_by_role("definition").get_by_role("link", name="2", exact=True).click()
    expect(page.get_by_role("heading", name="Rate rollouts")).to_be_visible()


def test_pages_without_data_name_the_next_command(open_page: Callable[[str], Visitor]) -> None:
    visitor = open_page("/rate")
    expect(visitor.page.get_by_text("No rollout waits for your grade.")).to_be_visible()
    assert visitor.violations() == []
    visitor.page.evaluate("location.hash = '#/platform'")
    expect(visitor.page.get_by_text("No engine of this pool has been seen")).to_be_visible()
    expect(visitor.page.get_by_text("leyden doctor")).to_be_visible()
    assert visitor.violations() == []
