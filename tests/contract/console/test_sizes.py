"""Pages of what is large: a rollout of 10,000 calls, 100 runs, a call of 200,000 tokens. How much a page draws and asks
does not grow with them; nothing is said of times, which `make bench-console` measures."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest
from playwright.sync_api import Page, expect

from leyden.libs.store import tables
from leyden.libs.store.database import Database
from tests.contract.console.conftest import Insert
from tests.support import builders
from tests.support.browser import Visitor

CALLS = 10_000
RUNS = 130
TOKENS = 200_000
ROUND = 4_000

MANY_CALLS = """
    SET session_replication_role = replica;
    INSERT INTO model_calls
        SELECT (jsonb_populate_record(c, jsonb_build_object('id', c.id || n, 'request_id', c.id || n,
        'sequence', c.sequence + n))).* FROM model_calls c, generate_series(1, :calls - 1) n;
    INSERT INTO credits (call_id, run_id, rollout_id, depth, state_key, tools, intermediate_reward, return, baseline,
        advantage) SELECT id, run_id, rollout_id, 0, '', '{"calls": []}', 0, 1, 0.5, 0.5 FROM model_calls;
    ANALYZE
"""
MANY_RUNS = """
    SET session_replication_role = replica;
    INSERT INTO runs (:columns) SELECT :columns FROM (
        SELECT (jsonb_populate_record(r, jsonb_build_object('id', r.id || n))).*
        FROM runs r, generate_series(1, :runs - 1) n) AS copies;
    INSERT INTO run_status SELECT (jsonb_populate_record(s, jsonb_build_object('run_id', s.run_id || n))).*
        FROM run_status s, generate_series(1, :runs - 1) n;
    INSERT INTO steps (run_id, number, metrics, checkpoint, started_at)
        SELECT id, n, '{"loss": 1}', '', now() FROM runs, generate_series(1, 20) n;
    ANALYZE
"""


def fill(dsn: str, statements: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in statements.split(";"):
            connection.execute(statement.encode())


class Load:
    """How many different questions a page puts to the API from now on, and how much it draws."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._urls = list[str]()
        page.on("request", lambda request: self._urls.append(request.url))

    @property
    def nodes(self) -> int:
        found: int = self._page.evaluate("document.querySelectorAll('*').length")
        return found

    def questions(self) -> int:
        """Those since the last count; how often each is repeated depends on the time that passes."""
        found = {url for url in self._urls if "/v1/" in url}
        self._urls.clear()
        return len(found)


async def long_rollout(database: Database) -> str:
    run = await builders.add_run(database)
    group, [rollout, _] = await builders.add_group(database, run)
    await builders.add_call(database, rollout)
    await builders.finish_rollout(database, rollout)
    await builders.add_credited_group(database, group)
    return rollout.id


@pytest.fixture
def page_and_load(open_page: Callable[[str], Visitor]) -> tuple[Page, Load]:
    page = open_page("/datasets").page
    expect(page.get_by_role("heading", name="Datasets")).to_be_visible()
    page.clock.install()
    return page, Load(page)


def test_a_rollout_of_ten_thousand_calls_shows_some_and_more_by_a_button(
    insert: Insert[str], page_and_load: tuple[Page, Load], postgres_dsn: str
) -> None:
    rollout = insert(long_rollout)
    fill(postgres_dsn, MANY_CALLS.replace(":calls", str(CALLS)))
    page, load = page_and_load
    page.evaluate(f"location.hash = '#/rollouts/{rollout}'")
    calls = page.get_by_role("article")
    expect(calls).to_have_count(50)
    expect(page.get_by_role("link", name="Side by side")).to_be_visible()
    expect(page.get_by_text("Loading …")).to_have_count(0)
    first = (load.nodes, load.questions())
    page.get_by_role("button", name="Show more calls").click()
    expect(calls).to_have_count(1000)
    expect(page.get_by_text("These are the first 1,000")).to_be_visible()
    assert_within(first, (2_500, 12))
    # The calls, the count of alarms, and what the page asks once more after its first answers.
    assert_within((load.nodes, load.questions()), (45_000, 5))
    page.get_by_role("link", name="Side by side").click()
    expect(page.get_by_text("Both did the same.").or_(page.get_by_text("differs.")).first).to_be_visible()
    assert_within((load.nodes, load.questions()), (2_500, 6))


def test_a_list_of_runs_ends_with_the_hundredth(
    insert: Insert[str], page_and_load: tuple[Page, Load], postgres_dsn: str
) -> None:
    async def one_run(database: Database) -> str:
        return (await builders.add_run(database)).id

    insert(one_run)
    made = ", ".join(column.name for column in tables.Run.__table__.columns if column.computed is None)
    fill(postgres_dsn, MANY_RUNS.replace(":runs", str(RUNS)).replace(":columns", made))
    page, load = page_and_load
    page.evaluate("location.hash = '#/'")
    expect(page.get_by_role("region", name="Runs").locator("tbody tr")).to_have_count(100)
    expect(page.get_by_text("1 to 100")).to_be_visible()
    expect(page.get_by_role("img", name="Mean reward").or_(page.get_by_text("none yet")).first).to_be_visible()
    assert_within((load.nodes, load.questions()), (5_000, 4))
    for _ in range(3):
        with page.expect_response(lambda answer: "/v1/curves" in answer.url):
            page.clock.run_for(ROUND)
    # The list, the curves of the runs that go on, and the alarms that the head of every page counts.
    assert_within((load.nodes, load.questions()), (5_000, 4))


def test_a_rollout_of_200_000_tokens_loads_a_window(insert: Insert[str], page_and_load: tuple[Page, Load]) -> None:
    async def long_call(database: Database) -> str:
        run = await builders.add_run(database)
        _, [rollout, _] = await builders.add_group(database, run)
        await builders.add_call(database, rollout, (1, 2, 3), [4] * TOKENS)
        await builders.finish_rollout(database, rollout)
        return rollout.id

    rollout = insert(long_call)
    page, load = page_and_load
    page.evaluate(f"location.hash = '#/rollouts/{rollout}'")
    expect(page.get_by_role("article", name="Call 1")).to_be_visible()
    load.questions()
    page.get_by_text("Tokens", exact=True).click()
    tokens = page.get_by_role("group", name="Tokens").locator("span.token")
    for button in ("", "Next tokens", "To the end", "From the prompt's begin"):
        if button:
            page.get_by_role("button", name=button).click()
        expect(tokens).to_have_count(500)
        expect(page.get_by_text("Loading …")).to_have_count(0)
        # The window, and what the page asks again while its group is open.
        assert_within((load.nodes, load.questions()), (1_500, 10))


def assert_within(found: tuple[int, int], most: tuple[int, int]) -> None:
    """Nodes and questions, each at most so many."""
    assert found[0] <= most[0] and found[1] <= most[1], f"nodes and questions {found}, at most {most}"
