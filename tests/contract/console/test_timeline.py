"""The calls and tools of an attempt on a time axis, and the keys that lead to siblings, on a rollout's page."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

from playwright.sync_api import expect

from leyden.libs.store.database import Database
from tests.contract.console.conftest import HOSTILE, SHOWN, Insert
from tests.support import builders
from tests.support.browser import Visitor

MILLION = 1_000_000
TOOL, INNER = "a" * 16, "b" * 16


async def nested(database: Database) -> tuple[str, list[str]]:
    """A call asks a tool, in which a second agent asks twice and uses a tool; then come a call that continues the
    first one and a fork that was aborted. Spans whose parents are a circle, too."""
    run = await builders.add_run(database)
    group, rollouts = await builders.add_group(database, run, size=3)
    rollout = rollouts[1]
    begin = time.time_ns()
    answer = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "asked", "name": "delegate", "arguments": "{}"}],
    }
    moments = [datetime.fromtimestamp(begin / 1e9 + seconds, UTC) for seconds in (1, 2, 3, 4, 5)]
    shared = {"total_seconds": 0.5, "agent_name": "lead"}
    first = await builders.add_call(database, rollout, answer=answer, created_at=moments[0], **shared)
    helper = {**shared, "agent_name": HOSTILE, "parent_span_id": INNER}
    await builders.add_call(database, rollout, created_at=moments[1], **helper)
    await builders.add_call(database, rollout, created_at=moments[2], **helper)
    child = {**shared, "parent_call_id": first.id, "tools": None}
    await builders.add_call(database, rollout, created_at=moments[3], continuation="extend", **child)
    await builders.add_call(
        database, rollout, created_at=moments[4], continuation="fork", status="aborted", trainable=False, **child
    )
    times = {"start_ns": begin + 1100 * MILLION, "end_ns": begin + 3100 * MILLION}
    await builders.add_tool_span(database, rollout, "delegate", span_id=TOOL, tool_call_id="asked", **times)
    # No tool: its calls are the tool's around it.
    await builders.add_tool_span(database, rollout, "", span_id=INNER, parent_span_id=TOOL, kind="agent", **times)
    inside = {"start_ns": begin + 2100 * MILLION, "end_ns": begin + 2200 * MILLION}
    await builders.add_tool_span(database, rollout, HOSTILE, parent_span_id=INNER, status="error", **inside)
    circle = {"start_ns": begin + 5100 * MILLION, "end_ns": begin + 5200 * MILLION}
    for own, other in (("c" * 16, "d" * 16), ("d" * 16, "c" * 16)):
        await builders.add_tool_span(database, rollout, "round", span_id=own, parent_span_id=other, **circle)
    for number, one in enumerate(rollouts):
        await builders.finish_rollout(database, one, reward=float(number))
    return group.id, [one.id for one in rollouts]


def test_calls_and_tools_stand_on_a_time_axis_below_their_parents(
    insert: Insert[tuple[str, list[str]]], open_page: Callable[[str], Visitor]
) -> None:
    _, rollouts = insert(nested)
    visitor = open_page(f"/rollouts/{rollouts[1]}")
    page = visitor.page
    rows = page.get_by_role("region", name="Time").locator("tbody tr")
    expect(rows).to_have_count(9)
    shown = rows.get_by_role("rowheader").all_inner_texts()
    step = "\u2003"
    assert shown[:7] == [
        "Call 1 lead",
        f"{step}└ delegate",
        f"{step * 2}└ Call 2 {SHOWN}",
        f"{step * 2}└ {SHOWN} error",
        f"{step * 2}└ Call 3 {SHOWN}",
        f"{step}└ Call 5 lead aborted",
        "Call 4 lead",
    ]
    assert {one.strip("\u2003└ ") for one in shown[7:]} == {"round"}
    expect(rows.nth(4).get_by_role("cell").nth(1)).to_have_text("0.50")
    assert visitor.violations() == []
    rows.nth(2).get_by_role("button", name="Call 2").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("article", name="Call 2")).to_be_focused()


def test_arrow_keys_lead_to_the_siblings_and_leave_fields_alone(
    insert: Insert[tuple[str, list[str]]], open_page: Callable[[str], Visitor]
) -> None:
    _, rollouts = insert(nested)
    visitor = open_page(f"/rollouts/{rollouts[1]}")
    page = visitor.page
    page.get_by_text("Keys", exact=True).click()
    expect(page.get_by_role("definition").filter(has_text="the sibling after")).to_be_visible()
    assert visitor.violations() == []
    page.get_by_text("Tokens", exact=True).first.click()
    tokens = page.get_by_role("group", name="Tokens")
    tokens.focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("heading", name=f"Rollout {rollouts[1]}")).to_be_visible()
    page.get_by_role("article", name="Call 1").focus()
    for key, sibling in (("ArrowRight", 2), ("ArrowLeft", 1), ("ArrowLeft", 0)):
        expect(page.get_by_role("link", name="Side by side")).to_be_visible()
        page.keyboard.press(key)
        expect(page.get_by_role("heading", name=f"Rollout {rollouts[sibling]}")).to_be_visible()
    expect(page.get_by_role("link", name="Sibling before")).to_have_count(0)
