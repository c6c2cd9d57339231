"""Each page while the API fails, is slow, silent or away, after a sign-out, a deletion, and with clocks that differ.

Every page shows an error with a remedy and gets well by itself once the API answers again. The page's clock is the
test's: it moves on to the next question without a wait.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect
from sqlalchemy import update

from leyden.libs.cli.view.console_link import console_link
from leyden.libs.client import Client
from leyden.libs.contracts.call_counts import CallCounts
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.store.runs.retention import delete_run
from tests.contract.api.test_comparison import measured_run
from tests.contract.api.test_weights import add_version, make_version
from tests.contract.console.conftest import Insert
from tests.fakes.served_api import TOKEN
from tests.support import builders
from tests.support.browser import Visitor

API = re.compile(r"/v1/")
ROUND = 4_000
"""Milliseconds of the page's clock, longer than its pause between two questions."""
SILENCE = 61_000
"""Longer than a page waits for one answer."""
REMEDY = "leyden status"
NAME = re.compile(r"/v1/(runs|datasets)/[^/]+$")
"""Pages ask so for a name, in whose place the id stands where it is unknown."""
SILENT = ("/v1/events", "/v1/alarms")
"""Without a stream pages ask more often, and the link to the alarms shows no count while that is unknown."""

PAGES: dict[str, Callable[[Page], Locator]] = {
    "/": lambda page: page.get_by_role("region", name="Runs"),
    "/runs/{run}": lambda page: page.get_by_role("img", name="Loss"),
    "/runs/{run}/rollouts": lambda page: page.get_by_role("region", name="Rollouts"),
    "/runs/{run}/tasks": lambda page: page.get_by_role("region", name="Tasks"),
    "/runs/{run}/versions": lambda page: page.get_by_role("region", name="Versions"),
    "/runs/{run}/evaluations": lambda page: page.get_by_role("region", name="Evaluations"),
    "/runs/{run}/document": lambda page: page.get_by_text("learning_rate").first,
    "/runs/{run}/logs": lambda page: page.get_by_role("list", name="Rollouts"),
    "/runs/{run}/rate": lambda page: page.get_by_text("No rollout waits for your grade."),
    "/runs/{run}/playground": lambda page: page.get_by_text("they need a token with scope write"),
    "/rollouts/{rollout}": lambda page: page.get_by_role("article", name="Call 1"),
    "/groups/{group}": lambda page: page.get_by_role("link", name="Sibling 0").first,
    "/compare?runs={run},{other}": lambda page: page.get_by_role("region", name="Differences"),
    "/datasets": lambda page: page.get_by_role("region", name="Datasets"),
    "/datasets/{dataset}": lambda page: page.get_by_role("region", name="Runs"),
    "/rate": lambda page: page.get_by_text("No rollout waits for your grade."),
    "/alarms": lambda page: page.get_by_text("No run has had an alarm"),
    "/platform": lambda page: page.get_by_role("region", name="Services"),
}
"""Each page, with what stands on it once all is well."""
WHOLE = [
    "/runs/{run}",
    *(f"/runs/{{run}}/{part}" for part in ("document", "logs", "playground")),
    "/datasets/{dataset}",
]
"""Those whose own data have the address of a name."""
OF_RUN = [page for page in PAGES if "{run}" in page and "compare" not in page] + ["/rollouts/{rollout}"]


async def furnished(database: Database, folder: Path) -> dict[str, str]:
    """Two runs with a step, an evaluation, a version, and a credited group; the ids of one of each."""
    dataset = (await builders.add_run(database)).dataset_id
    other = await measured_run(database, dataset, 1e-6, [0.0, 0.5])
    run = await measured_run(database, dataset, 1e-5, [1.0, 0.5])
    group, rollouts = await builders.add_group(database, run, 9)
    for rollout, reward in zip(rollouts, (1.0, 0.0), strict=True):
        await builders.add_call(database, rollout)
        await builders.finish_rollout(database, rollout, reward=reward)
    await builders.add_credited_group(database, group, calls=CallCounts(calls=2).model_dump())
    await add_version(database, run, folder)
    return {"run": run.id, "other": other.id, "group": group.id, "rollout": rollouts[0].id, "dataset": dataset}


@pytest.fixture
def ids(insert: Insert[dict[str, str]], tmp_path: Path) -> dict[str, str]:
    folder = make_version(tmp_path / "version")
    return insert(lambda database: furnished(database, folder))


@pytest.fixture
def visitor(open_page: Callable[[str], Visitor], ids: dict[str, str]) -> Iterator[Visitor]:
    """A browser on the page Runs, whose clock the test may move on."""
    opened = open_page("/")
    expect(PAGES["/"](opened.page)).to_be_visible()
    opened.page.clock.install()
    yield opened
    # The browser reports each failed request and stream as an error of its own; of the page's code there is none.
    opened.complaints[:] = [
        one for one in opened.complaints if not one.startswith(("Failed to load resource", "EventSource"))
    ]


def go(page: Page, address: str) -> None:
    page.evaluate("(address) => { location.hash = '#' + address }", address)


def leave(page: Page, address: str) -> None:
    """Shows another page, so that this one begins anew."""
    elsewhere = "/rate" if address.startswith("/datasets") else "/datasets"
    go(page, elsewhere)
    is_well(page, elsewhere)


def is_well(page: Page, address: str) -> None:
    """Waits until the page shows its own content, without an error or a wait beside it."""
    expect(PAGES[address](page)).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(page.get_by_text("Loading …")).to_have_count(0)


def tells_a_remedy(page: Page) -> None:
    expect(page.get_by_role("alert").filter(has_text=REMEDY).first).to_be_visible()
    expect(page.get_by_text("Loading …")).to_have_count(0)


@contextmanager
def answered(page: Page, answer: Callable[[Route], object], where: re.Pattern[str] = API) -> Iterator[None]:
    """The API's answers are those of the function inside the block."""
    page.route(where, answer)
    try:
        yield
    finally:
        page.unroute(where, answer)


def fails(route: Route) -> None:
    route.fulfill(status=500, body="Internal Server Error")


def is_away(route: Route) -> None:
    route.abort("connectionrefused")


def is_a_proxys_page(route: Route) -> None:
    route.fulfill(status=200, content_type="text/html", body="<h1>Sign in to the proxy</h1>")


def refuses(route: Route) -> None:
    route.fulfill(status=401, json={"detail": "the token was revoked"})


class Slow:
    """An API that answers when the test says so."""

    def __init__(self) -> None:
        self._held: list[Route] | None = []

    def hold(self, route: Route) -> None:
        if self._held is None:
            route.continue_()
        else:
            self._held.append(route)

    def answer(self) -> None:
        """Answers what was asked, and from now on at once."""
        held, self._held = self._held or [], None
        for route in held:
            route.continue_()


@pytest.mark.parametrize("answer", [fails, is_away, is_a_proxys_page])
def test_each_page_tells_a_remedy_and_gets_well_by_itself(
    visitor: Visitor, ids: dict[str, str], answer: Callable[[Route], None]
) -> None:
    page = visitor.page
    for address in PAGES:
        leave(page, address)
        with answered(page, answer):
            go(page, address.format(**ids))
            tells_a_remedy(page)
        page.clock.run_for(ROUND)
        is_well(page, address)


def test_a_page_waits_for_a_slow_api_and_gives_up_a_silent_one(visitor: Visitor, ids: dict[str, str]) -> None:
    page = visitor.page
    for address in PAGES:
        slow = Slow()
        leave(page, address)
        with answered(page, slow.hold):
            go(page, address.format(**ids))
            expect(page.get_by_text("Loading …").first).to_be_visible()
            page.clock.run_for(10_000)
            expect(page.get_by_role("alert")).to_have_count(0)
            slow.answer()
            is_well(page, address)
        leave(page, address)
        with answered(page, Slow().hold):
            go(page, address.format(**ids))
            expect(page.get_by_text("Loading …").first).to_be_visible()
            page.clock.run_for(SILENCE)
            tells_a_remedy(page)
        page.clock.run_for(ROUND)
        is_well(page, address)


def test_no_question_of_a_page_fails_in_silence(visitor: Visitor, ids: dict[str, str]) -> None:
    page = visitor.page
    for address in PAGES:
        asked = list[str]()
        page.on("request", lambda request, asked=asked: asked.append(urlsplit(request.url).path))
        go(page, address.format(**ids))
        is_well(page, address)
        questions = {one for one in asked if "/v1/" in one and not one.endswith(SILENT)}
        if address not in WHOLE:
            questions = {one for one in questions if not NAME.search(one)}
        for path in sorted(questions):
            leave(page, address)
            with answered(page, fails, re.compile(re.escape(path) + r"(\?.*)?$")):
                go(page, address.format(**ids))
                expect(page.get_by_role("alert").filter(has_text=REMEDY).first, f"{address}: {path}").to_be_visible()
            page.clock.run_for(ROUND)
            is_well(page, address)


def test_a_refused_page_asks_for_a_token_and_returns_to_its_place(visitor: Visitor, ids: dict[str, str]) -> None:
    page = visitor.page
    for address in ("/runs/{run}", "/rollouts/{rollout}", "/platform", "/compare?runs={run},{other}", "/"):
        with answered(page, refuses):
            go(page, address.format(**ids))
            expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
            expect(page.get_by_text("leyden token create", exact=False)).to_be_visible()
            page.get_by_role("textbox", name="Token").fill("wrong")
            page.keyboard.press("Enter")
            expect(page.get_by_role("alert")).to_contain_text("the token was revoked")
        page.get_by_role("textbox", name="Token").fill(TOKEN)
        page.keyboard.press("Enter")
        is_well(page, address)


def test_a_refusal_in_the_middle_of_a_pages_life_asks_for_a_token(visitor: Visitor, ids: dict[str, str]) -> None:
    page = visitor.page
    go(page, "/runs/" + ids["run"])
    is_well(page, "/runs/{run}")
    with answered(page, refuses):
        page.clock.run_for(31_000)
        expect(page.get_by_role("textbox", name="Token")).to_be_visible()


def test_pages_of_a_deleted_run_say_so(visitor: Visitor, ids: dict[str, str], insert: Insert[None]) -> None:
    page = visitor.page
    go(page, "/runs/" + ids["run"])
    is_well(page, "/runs/{run}")

    async def delete(database: Database) -> None:
        await builders.end_run(database, await one_run(database, ids["run"]))
        async with database.session() as session:
            await session.execute(update(tables.Run).where(tables.Run.id == ids["run"]).values(intent="deleted"))
        await delete_run(database, ids["run"])

    insert(delete)
    page.clock.run_for(31_000)
    expect(page.get_by_role("alert").first).to_contain_text(ids["run"])
    for address in OF_RUN:
        go(page, address.format(**ids))
        expect(page.get_by_role("alert").first).to_be_visible()
        expect(page.get_by_text("Loading …")).to_have_count(0)
    page.get_by_role("alert").get_by_role("link", name="All runs").first.click()
    is_well(page, "/")
    expect(page.get_by_role("link", name="rate 1e-05")).to_have_count(0)


async def one_run(database: Database, run_id: str) -> tables.Run:
    async with database.session() as session:
        return await session.get_one(tables.Run, run_id)


def test_two_tabs_sign_out_and_in_together_and_show_the_same(visitor: Visitor, ids: dict[str, str]) -> None:
    page = visitor.page
    second = Visitor(page.context.new_page())
    second.page.goto(page.url.partition("#")[0] + f"#/runs/{ids['run']}")
    is_well(second.page, "/runs/{run}")
    page.get_by_role("button", name="Sign out").click()
    for one in (page, second.page):
        expect(one.get_by_role("textbox", name="Token")).to_be_visible()
    page.get_by_role("textbox", name="Token").fill(TOKEN)
    page.keyboard.press("Enter")
    is_well(page, "/")
    is_well(second.page, "/runs/{run}")

    # A change that one tab makes stands in the other.
    second.page.get_by_role("button", name="Cancel the run").click()
    second.page.get_by_role("button", name="Yes, cancel the run").click()
    expect(second.page.get_by_text("the platform has taken it")).to_be_visible()
    go(page, f"/runs/{ids['run']}")
    expect(page.get_by_text("(asked: cancelled)")).to_be_visible()
    assert second.complaints == []


def test_a_link_that_has_signed_this_browser_in_opens_its_page_again(
    visit: Callable[[], Visitor], api_url: str
) -> None:
    with Client(api_url, TOKEN) as client:
        link = console_link(client, api_url, "/datasets")
    context = visit().page.context
    for _ in range(2):
        page = context.new_page()
        page.goto(link)
        expect(page.get_by_role("heading", name="Datasets")).to_be_visible()
    stranger = visit().page
    stranger.goto(link)
    expect(stranger.get_by_role("alert")).to_contain_text("The link has signed in before or is too old")


def test_a_sign_out_that_fails_says_so(visitor: Visitor) -> None:
    page = visitor.page
    with answered(page, lambda route: is_away(route) if route.request.method == "DELETE" else route.continue_()):
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_role("alert")).to_contain_text("You are still signed in")
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("textbox", name="Token")).to_be_visible()


@pytest.mark.parametrize("ahead", [timedelta(hours=-1), timedelta(hours=1)])
def test_a_browser_whose_clock_is_wrong_judges_by_the_apis(browser: Browser, api_url: str, ahead: timedelta) -> None:
    with browser.new_context() as context:
        visitor = Visitor(context.new_page())
        page = visitor.page
        right: float = page.evaluate("Date.now()")
        page.clock.install(time=right / 1000 + ahead.total_seconds())
        page.goto(f"{api_url}/#/platform")
        page.get_by_role("textbox", name="Token").fill(TOKEN)
        page.keyboard.press("Enter")
        # Two tokens of half an hour: the one's end is before the wrong clock's time, the other's start after it.
        headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
        for name, scopes in (("valid", ["read"]), ("revoked", ["read"])):
            body = {"name": name, "scopes": scopes, "expires_seconds": 1800}
            made = page.request.post(f"{api_url}/v1/tokens", headers=headers, data=body).json()
            if name == "revoked":
                page.request.delete(f"{api_url}/v1/tokens/{made['id']}", headers=headers)
        page.reload()
        region = page.get_by_role("region", name="Tokens", exact=True)
        for name in ("valid", "revoked"):
            row = region.locator("tbody tr").filter(has=page.get_by_role("rowheader", name=name))
            expect(row.get_by_role("cell").nth(4)).to_have_text(name)
        at = page.get_by_text("as of", exact=False).last
        shown = page.evaluate(
            "([hours]) => [-60, 0, 1].map((s) => new Date(Date.now() + s * 1e3 - hours * 36e5).toLocaleTimeString())",
            [ahead.total_seconds() / 3600],
        )
        minutes = {":".join(re.split(r"[: ]", one)[:2]) for one in shown}
        assert any(one in at.inner_text() for one in minutes), (at.inner_text(), shown)
        assert visitor.complaints == []


def test_spans_of_an_agent_whose_clock_is_an_hour_off_are_drawn(
    insert: Insert[str], open_page: Callable[[str], Visitor]
) -> None:
    hour = 3600 * 10**9

    async def add(database: Database) -> str:
        run = await builders.add_run(database)
        _, [rollout, _] = await builders.add_group(database, run)
        await builders.add_call(database, rollout)
        for name, off in (("late", hour), ("early", -hour)):
            start = time.time_ns() + off
            await builders.add_tool_span(database, rollout, name, start_ns=start, end_ns=start + 10**9)
        await builders.finish_rollout(database, rollout)
        return rollout.id

    page = open_page(f"/rollouts/{insert(add)}").page
    rows = page.get_by_role("region", name="Time").locator("tbody tr")
    expect(rows).to_have_count(3)
    for row in rows.all():
        start, length = [float(cell) for cell in row.locator("td.number").all_inner_texts()]
        assert 0 <= start <= 7300 and 0 <= length < 60
