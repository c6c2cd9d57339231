"""The page of a group: siblings side by side, and two of them from their first difference on."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from playwright.sync_api import expect

from leyden.libs.store import tables
from leyden.libs.store.database import Database
from tests.contract.console.conftest import HOSTILE, SHOWN, Insert
from tests.support import builders
from tests.support.browser import Visitor

LONG = "y" * 1_000_000


async def add_component(database: Database, rollout: tables.Rollout, name: str, value: float) -> None:
    key = {"rollout_id": rollout.id, "attempt": 1, "run_id": rollout.run_id}
    lease = {"tries": 1, "lease_id": rollout.id, "owner": "test", "lease_expires_at": datetime.now(tz=UTC)}
    part = {"position": 0, "state": "scored", "weight": 0.5, "value": value, "contribution": 0.5 * value}
    words = {"extracted": None, "explanation": HOSTILE, "source": "exact", "duration_seconds": 0.0}
    async with database.session() as session:
        session.add(tables.Grading(**key, **lease))
        await session.flush()
        session.add(tables.RolloutReward(**key, component=name, revision=1, **part, **words))


async def add_advantage(database: Database, call: tables.ModelCall, advantage: float) -> None:
    numbers = {"intermediate_reward": 0.0, "return_": 0.5, "baseline": 0.5 - advantage, "advantage": advantage}
    key = {"run_id": call.run_id, "call_id": call.id, "rollout_id": call.rollout_id}
    async with database.session() as session:
        session.add(tables.CallCredit(**key, depth=0, state_key="", tools={"calls": []}, **numbers))


async def siblings_that_differ_in_their_second_call(database: Database) -> str:
    """Three siblings: the last earned most, and the first one's second answer is hostile and long."""
    run = await builders.add_run(database)
    group, siblings = await builders.add_group(database, run, size=3)
    tool = {"id": "1", "name": f"search {HOSTILE}", "arguments": HOSTILE}
    for number, sibling in enumerate(siblings):
        first: dict[str, Any] = {"role": "assistant", "content": "I search.", "tool_calls": [tool]}
        calls = [await builders.add_call(database, sibling, answer=first)]
        if number < 2:
            text = HOSTILE + LONG if number == 0 else "four"
            turns = [{"role": "tool", "content": HOSTILE, "tool_call_id": "1"}]
            later = {"parent_call_id": calls[0].id, "shared_tokens": 5, "shared_turns": 2, "turns": turns}
            answer = {"role": "assistant", "content": text}
            calls.append(await builders.add_call(database, sibling, (9,), (number,), answer=answer, **later))
        for call in calls:
            await add_advantage(database, call, (-0.5, 0.125, 0.375)[number])
        await builders.finish_rollout(database, sibling, reward=number / 2)
        await add_component(database, sibling, HOSTILE, number)
    await builders.add_credited_group(database, group)
    return group.id


def test_siblings_stand_side_by_side_and_differ_from_a_call_on(
    insert: Insert[str], open_page: Callable[[str], Visitor]
) -> None:
    group = insert(siblings_that_differ_in_their_second_call)
    visitor = open_page(f"/rollouts/{group}.0")
    page = visitor.page
    page.get_by_role("link", name="Side by side").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name=f"Group {group}")).to_be_visible()

    heads = page.get_by_role("columnheader")
    expect(heads).to_have_text(["Sibling 2", "Sibling 1", "Sibling 0"])
    expect(page.get_by_role("row", name="Reward").get_by_role("cell")).to_have_text(["1.000", "0.500", "0.000"])
    expect(page.get_by_role("row", name="Advantage").get_by_role("cell")).to_have_text(["+0.375", "+0.125", "−0.500"])
    expect(page.get_by_role("row").filter(has_text=SHOWN).filter(has_text="adds")).to_contain_text(
        "2.000 (adds +1.000)"
    )
    first = page.get_by_role("row", name="Call 1").get_by_role("cell")
    expect(first.nth(1)).to_contain_text("as the best")
    expect(first.nth(1)).to_contain_text(f"calls search {SHOWN}")
    second = page.get_by_role("row", name="Call 2").get_by_role("cell")
    expect(second.nth(0)).to_have_text("–")
    expect(second.nth(2)).to_contain_text(SHOWN)

    page.get_by_label("Sibling", exact=True).select_option(f"{group}.0")
    page.get_by_label("beside", exact=True).select_option(f"{group}.1")
    expect(page.get_by_text("Same until call 1: the answer of call 2 differs.")).to_be_visible()
    left = page.get_by_role("region", name="Sibling 0").get_by_role("article", name="Call 2")
    expect(left.get_by_text(SHOWN).first).to_be_visible()
    expect(left.get_by_role("button", name="Show all 1,000,0")).to_be_visible()
    expect(page.get_by_role("region", name="Sibling 1").get_by_text("four")).to_be_visible()
    assert visitor.violations() == []


async def sibling_that_is_tried_again(database: Database) -> str:
    """A sibling that ended, and one whose second attempt runs."""
    run = await builders.add_run(database)
    group, siblings = await builders.add_group(database, run, size=2)
    await builders.add_call(database, siblings[0], answer={"role": "assistant", "content": "ended"})
    await builders.finish_rollout(database, siblings[0], reward=1.0)
    for number, state in ((1, "expired"), (2, "running")):
        await builders.add_attempt(database, siblings[1], number, state=state)
        answer = {"role": "assistant", "content": f"said in attempt {number}"}
        await builders.add_call(database, siblings[1], (1, 2, 3), (7, number), attempt=number, answer=answer)
    return group.id


def test_a_sibling_without_a_counted_attempt_shows_its_newest(
    insert: Insert[str], open_page: Callable[[str], Visitor]
) -> None:
    page = open_page(f"/groups/{insert(sibling_that_is_tried_again)}").page
    later = page.get_by_role("region", name="Sibling 1")
    expect(later).to_contain_text("these are the calls of attempt 2, the newest")
    expect(later).to_contain_text("said in attempt 2")
    expect(later).not_to_contain_text("said in attempt 1")


def test_a_group_that_is_not_there_says_what_to_do(open_page: Callable[[str], Visitor]) -> None:
    visitor = open_page("/groups/none")
    expect(visitor.page.get_by_role("alert")).to_contain_text("names its group")
    # The browser reports the answer 404 as an error of its own.
    visitor.complaints[:] = [one for one in visitor.complaints if "404" not in one]


def test_a_group_that_teaches_nothing_names_the_cause(
    insert: Insert[list[str]], open_page: Callable[[str], Visitor]
) -> None:
    causes: list[dict[str, Any]] = [
        {"reward_std": 0.0},
        {"reward_std": 0.5},
        {"reward_std": 0.5, "reason": "of 2 model calls 2 temperature"},
    ]

    async def groups(database: Database) -> list[str]:
        run = await builders.add_run(database)
        critic = await builders.add_run(database, lead_run_id=run.id, policy="critic")
        made = [(await builders.add_group(database, run, number))[0] for number in range(len(causes))]
        for group, columns in zip(made, causes, strict=True):
            await builders.add_credited_group(database, group, has_variance=False, **columns)
        await builders.add_credited_group(database, made[-1], run_id=critic.id, reason="of 2 model calls 2 cut")
        return [group.id for group in made]

    equal, unequal, untrainable = insert(groups)
    page = open_page(f"/groups/{equal}").page
    alike = page.get_by_text("All siblings earned alike")
    expect(alike).to_be_visible()
    page.evaluate(f"location.hash = '#/groups/{unequal}'")
    expect(page.get_by_text("no token that trains has an advantage")).to_be_visible()
    expect(alike).to_have_count(0)
    page.evaluate(f"location.hash = '#/groups/{untrainable}'")
    expect(page.get_by_role("alert")).to_have_text("of 2 model calls 2 temperature")
    expect(page.get_by_text("credited · of 2 model calls 2 cut")).to_be_visible()
    expect(page.locator("p.warning")).to_have_count(0)


def test_a_group_of_one_without_a_call_is_shown(insert: Insert[str], open_page: Callable[[str], Visitor]) -> None:
    async def lonely(database: Database) -> str:
        group, _ = await builders.add_group(database, await builders.add_run(database), size=1)
        return group.id

    visitor = open_page(f"/groups/{insert(lonely)}")
    expect(visitor.page.get_by_text("This group has one rollout.")).to_be_visible()
    assert visitor.violations() == []
