"""The page of a rollout's transitions: state, action, reward and next state, page by page."""

from __future__ import annotations

import time
from collections.abc import Callable

from playwright.sync_api import expect

from leyden.libs.store.database import Database
from tests.contract.api.test_trajectory import MANY, add_credit, one_rollout
from tests.contract.console.conftest import HOSTILE, SHOWN, Insert
from tests.support import builders
from tests.support.browser import Visitor

CALLS = 10_000
LONG = "long " * 1000


async def searched(database: Database) -> str:
    """A call that asks for a search, the search, and a call of a further policy's role with a long answer."""
    rollout = await one_rollout(database)
    asked = [{"id": "t1", "name": "search", "arguments": '{"q": "x"}'}]
    answer = {"role": "assistant", "content": HOSTILE, "tool_calls": asked}
    first = await builders.add_call(database, rollout, answer=answer, sequence=1000, role=HOSTILE)
    found = {"gen_ai.tool.call.arguments": '{"q": "x"}', "gen_ai.tool.call.result": HOSTILE}
    times = {"start_ns": 2000, "end_ns": 3000}
    await builders.add_tool_span(database, rollout, "search", tool_call_id="t1", attributes=found, **times)
    last = await builders.add_call(
        database, rollout, sequence=4000, role="checker", answer={"role": "assistant", "content": LONG}
    )
    await builders.finish_rollout(database, rollout)
    await add_credit(database, first, 0.25)
    await add_credit(database, last, -0.5)
    return rollout.id


async def many_calls(database: Database) -> str:
    rollout = await one_rollout(database)
    await builders.add_attempt(database, rollout)
    first = await builders.add_call(database, rollout, sequence=1)
    async with database.session() as session:
        await session.execute(MANY, {"calls": CALLS - 1, "id": first.id})
    return rollout.id


def test_transitions_have_state_action_reward_and_next_state(
    insert: Insert[str], open_page: Callable[[str], Visitor]
) -> None:
    rollout = insert(searched)
    visitor = open_page(f"/rollouts/{rollout}")
    page = visitor.page
    page.get_by_role("link", name="Trajectory").focus()
    page.keyboard.press("Enter")
    first, tool, last = (page.get_by_role("article", name=f"Transition {number}") for number in (1, 2, 3))
    expect(first.get_by_role("heading")).to_have_text(f"1: model {SHOWN}")
    expect(first).to_contain_text("Reward of this step: +0.250")
    expect(first).to_contain_text("Next state: as before.")
    expect(tool.get_by_role("heading")).to_have_text("2: tool search")
    expect(tool).to_contain_text("Reward of this step: that of the call that asked")
    expect(tool.get_by_role("listitem")).to_have_text(f"tool.search = {SHOWN}")
    expect(last).to_contain_text("Reward of this step: −0.500")
    expect(last).to_contain_text("No next state")
    last.get_by_text("State: 2 variables").click()
    expect(last.get_by_role("region", name="State of transition 3")).to_contain_text(SHOWN)
    # A long text is folded, and all of it is loaded when asked for.
    expect(last).not_to_contain_text(LONG[:1000])
    last.get_by_text("Action, the first 2,000 of").click()
    expect(last).to_contain_text(LONG[:1000])
    last.get_by_role("button", name="Load all of transition 3").click()
    expect(last).to_contain_text('"id": "')
    expect(page.get_by_text(f"leyden rollout trajectory {rollout}")).to_be_visible()
    assert visitor.violations() == []


def test_ten_thousand_calls_come_page_by_page(insert: Insert[str], open_page: Callable[[str], Visitor]) -> None:
    visitor = open_page(f"/rollouts/{insert(many_calls)}/trajectory")
    page = visitor.page
    expect(page.get_by_role("article")).to_have_count(50)
    begin = time.monotonic()
    page.get_by_role("button", name="Next page").click()
    expect(page.get_by_role("article", name="Transition 51")).to_contain_text("tool.look = result 51")
    print(f"the next page took {time.monotonic() - begin:.2f} s")
    page.get_by_role("button", name="Page before").click()
    expect(page.get_by_role("article", name="Transition 1", exact=True)).to_be_visible()
    assert visitor.violations() == []


def test_a_rollout_without_calls_names_the_next_command(
    insert: Insert[str], open_page: Callable[[str], Visitor]
) -> None:
    async def empty(database: Database) -> str:
        return (await one_rollout(database)).id

    rollout = insert(empty)
    visitor = open_page(f"/rollouts/{rollout}/trajectory")
    expect(visitor.page.get_by_text(f"leyden rollout show {rollout}")).to_be_visible()
    assert visitor.violations() == []
