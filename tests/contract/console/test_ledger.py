"""The ledger of a rollout: every number of the sum that makes its reward, and of the way to its advantages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from playwright.sync_api import Page, expect

from leyden.libs.store import tables
from leyden.libs.store.database import Database
from tests.contract.console.conftest import HOSTILE, SHOWN, Insert
from tests.support import builders
from tests.support.browser import Visitor

GRADER = {"type": "string_check", "operation": "eq", "output": "{output}", "reference": "{task.question}"}
REWARD = {
    "components": [
        {"name": "answer", "weight": 0.9, "grader": GRADER},
        {"name": "tests", "weight": 0.5, "gate": {"at_least": 1.0}, "grader": GRADER},
        {"name": "words", "weight": 0, "grader": {"type": "length", "at_most": 8}},
    ],
    "clip": [-0.25, 0.25],
}
LATER = {"components": [{"name": "answer", "weight": 1.0, "grader": GRADER}]}


async def graded(
    database: Database, values: Sequence[float | None], reward: float, *, contributions: bool = True
) -> tables.Rollout:
    """A finished rollout with the components of REWARD; without `contributions` as an older version wrote them."""
    run = await builders.add_run(database, config=builders.run_document(reward=REWARD))
    _, [rollout, _] = await builders.add_group(database, run)
    await builders.finish_rollout(database, rollout, reward=reward)
    key = {"rollout_id": rollout.id, "attempt": 1, "run_id": rollout.run_id}
    lease = {"tries": 1, "lease_id": rollout.id, "owner": "test", "lease_expires_at": datetime.now(tz=UTC)}
    async with database.session() as session:
        session.add(tables.Grading(**key, **lease, settled_at=datetime.now(tz=UTC), total=reward))
        await session.flush()
        for place, (one, value) in enumerate(zip(REWARD["components"], values, strict=True)):  # type: ignore[arg-type]
            weight = float(one["weight"])  # type: ignore[index]
            counts = contributions and weight and value is not None
            add_component(session, key, one["name"], value, weight, place, counts)  # type: ignore[index]
    return rollout


def add_component(
    session: Any, key: Any, name: str, value: float | None, weight: float, place: int, counts: Any
) -> None:
    state = "not_applicable" if value is None else "scored"
    part = {"position": place, "state": state, "weight": weight, "value": value}
    words = {"extracted": None, "explanation": HOSTILE, "source": "string_check", "duration_seconds": 0.0}
    contribution = weight * value if counts and value is not None else None
    session.add(
        tables.RolloutReward(**{"revision": 1, **key}, component=name, contribution=contribution, **part, **words)
    )


def rows(page: Page, label: str) -> list[list[str]]:
    """The cells of a table, without the explanations."""
    table = page.get_by_role("region", name=label, exact=True).locator("tbody tr")
    expect(table.first).to_be_visible()
    return [row.locator("th, td").all_inner_texts() for row in table.all()]


def test_a_closed_gate_and_a_clip_are_steps_of_the_sum(
    insert: Insert[str], open_page: Callable[[str], Visitor]
) -> None:
    async def closed(database: Database) -> str:
        return (await graded(database, (1.0, 0.5, 12.0), 0.0)).id

    async def clipped(database: Database) -> str:
        return (await graded(database, (1.0, 1.0, None), 0.25)).id

    visitor = open_page(f"/rollouts/{insert(closed)}")
    expect(visitor.page.get_by_text("gate tests")).to_be_visible()
    assert [[row[0], row[3], row[4], row[5]] for row in rows(visitor.page, "Reward")[:-1]] == [
        ["answer", "1.000", "0.9", "+0.900"],
        ["tests", "0.500", "0.5", "+0.250"],
        ["words", "12.000", "0", "–"],
        ["sum of components", "", "", "1.150"],
        ["gate tests", "0.500", "", "0.000"],
        ["clip", "", "", "0.000"],
    ]
    assert rows(visitor.page, "Reward")[-1] == ["reward", "", "0.000", ""]
    expect(visitor.page.get_by_role("cell", name=SHOWN).first).to_be_visible()
    assert visitor.violations() == []
    visitor.page.evaluate(f"location.hash = '#/rollouts/{insert(clipped)}'")
    expect(visitor.page.get_by_text("not applicable")).to_be_visible()
    assert [row[-2] for row in rows(visitor.page, "Reward")] == [
        "+0.900",
        "+0.500",
        "–",
        "1.400",
        "1.400",
        "0.250",
        "0.250",
    ]


def test_a_sum_with_an_unknown_part_says_so(insert: Insert[str], open_page: Callable[[str], Visitor]) -> None:
    async def older(database: Database) -> str:
        return (await graded(database, (1.0, 1.0, 3.0), 0.25, contributions=False)).id

    page = open_page(f"/rollouts/{insert(older)}").page
    expect(page.get_by_text("A part of the sum is unknown.")).to_be_visible()
    assert [row[5] for row in rows(page, "Reward")[:2]] == ["unknown", "unknown"]
    assert rows(page, "Reward")[-1][2] == "0.250"


def test_parts_that_do_not_make_the_reward_are_told(insert: Insert[str], open_page: Callable[[str], Visitor]) -> None:
    async def other(database: Database) -> str:
        return (await graded(database, (0.1, 1.0, 3.0), 0.2)).id

    page = open_page(f"/rollouts/{insert(other)}").page
    expect(page.get_by_text("These parts add up to 0.250, and the reward is 0.200")).to_be_visible()


def test_a_later_grading_stands_beside_the_one_that_credit_had(
    insert: Insert[str], open_page: Callable[[str], Visitor]
) -> None:
    async def regraded(database: Database) -> str:
        rollout = await graded(database, (1.0, 1.0, 3.0), 0.25)
        key = {"rollout_id": rollout.id, "attempt": 1, "run_id": rollout.run_id, "revision": 2}
        async with database.session() as session:
            session.add(tables.Regrade(**key, reward=LATER, total=0.75, token_name=HOSTILE))
            await session.flush()
            add_component(session, key, "answer", 0.75, 1.0, 0, True)
        return rollout.id

    visitor = open_page(f"/rollouts/{insert(regraded)}")
    page = visitor.page
    expect(page.get_by_text("Credit keeps the first grading.")).to_be_visible()
    assert rows(page, "Reward")[-1] == ["reward", "", "0.250", ""]
    page.get_by_text("Revision 2").click()
    assert [row[-2] for row in rows(page, "Revision 2")] == ["+0.750", "0.750"]
    expect(page.get_by_text("total 0.750")).to_contain_text("evil")
    assert visitor.violations() == []


def test_the_numbers_of_judges_and_people_lead_to_the_value_with_their_words(
    insert: Insert[str], open_page: Callable[[str], Visitor]
) -> None:
    judge = {"type": "score_model", "provider": "judge", "model": "m", "rubric": "Is it kind?", "range": [1, 5]}
    components = [{"name": "kind", "weight": 0.5, "grader": judge}, {"name": "thumbs", "from": "feedback"}]
    lines = f"{HOSTILE}\n" + "why " * 100

    async def judged(database: Database) -> str:
        reward = {"components": components, "wait": {"seconds": 60}}
        run = await builders.add_run(database, config=builders.run_document(reward=reward))
        _, [rollout, _] = await builders.add_group(database, run)
        await builders.finish_rollout(database, rollout, reward=0.875)
        key = {"rollout_id": rollout.id, "run_id": run.id}
        lease = {"tries": 1, "lease_id": rollout.id, "owner": "test", "lease_expires_at": datetime.now(tz=UTC)}
        scored = {"revision": 1, "state": "scored", "duration_seconds": 0.0}
        async with database.session() as session:
            session.add(tables.Grading(**key, attempt=1, **lease, settled_at=datetime.now(tz=UTC), total=0.875))
            await session.flush()
            for place, (source, value, weight, raw) in enumerate(
                [("score_model", 0.75, 0.5, "4, 5, 3"), ("feedback", 0.5, 1.0, None)]
            ):
                words = {"extracted": raw, "explanation": lines if raw else "the mean of 2", "source": source}
                numbers = {"weight": weight, "value": value, "contribution": weight * value}
                name = str(components[place]["name"])
                row = {**key, **scored, **words, **numbers, "component": name, "position": place, "attempt": 1}
                session.add(tables.RolloutReward(**row))
            for attempt, value, comment, name in [
                (1, 1.0, lines, HOSTILE),
                (1, 0.0, "rude", "ann"),
                (2, 0.25, None, "bo"),
            ]:
                given = {"key": name, "component": "thumbs", "value": value, "comment": comment, "token_name": name}
                session.add(tables.Feedback(**key, attempt=attempt, **given))
                await session.flush()
        return rollout.id

    visitor = open_page(f"/rollouts/{insert(judged)}")
    page = visitor.page
    assert [row[1:6] for row in rows(page, "Reward")] == [
        ["score_model", "4, 5, 3 of 1 to 5", "0.750", "0.5", "+0.375"],
        ["feedback", "1, 0 (mean)", "0.500", "1", "+0.500"],
        ["feedback", "0.25", "", "", "–"],
        ["", "0.875", ""],
    ]
    table = page.get_by_role("region", name="Reward", exact=True)
    expect(table.get_by_role("row", name="rude")).to_contain_text(f"1.000 by {SHOWN}")
    expect(table.get_by_role("row", name="its attempt does not count")).to_contain_text("0.250 by bo")
    for row, shown in ((0, "why why"), (1, "why why")):
        line = table.locator("tbody tr").nth(row)
        line.locator("summary").focus()
        page.keyboard.press("Enter")
        expect(line.locator("pre")).to_contain_text(shown)
    assert visitor.violations() == []


def test_a_failure_earns_what_the_platform_says(insert: Insert[str], open_page: Callable[[str], Visitor]) -> None:
    async def failed(database: Database) -> str:
        _, [rollout, _] = await builders.add_group(database, await builders.add_run(database))
        await builders.finish_rollout(database, rollout, reward=None, kind="agent_error")
        async with database.session() as session:
            (await session.get_one(tables.Rollout, rollout.id)).reward = -0.5
        return rollout.id

    page = open_page(f"/rollouts/{insert(failed)}").page
    assert [row[:1] + row[-2:-1] for row in rows(page, "Reward")] == [["failure", "−0.500"], ["reward", "-0.500"]]


async def credited(database: Database) -> str:
    """Two siblings: the first one's two calls are a chain with discount 0.5, the other one made one call."""
    credit = {"rule": {"type": "discounted", "gamma": 0.5}, "baseline": {"type": "mean"}}
    run = await builders.add_run(database, config=builders.run_document(credit=credit))
    group, [one, other] = await builders.add_group(database, run, state="complete", finished_at=datetime.now(tz=UTC))
    first = await builders.add_call(database, one)
    second = await builders.add_call(database, one, parent_call_id=first.id)
    third = await builders.add_call(database, other)
    # 0.2 + 0.5 · 1 = 0.7; the value is (0.7 + 1) / 2 = 0.85, and the baseline (0.85 + 0.25) / 2 = 0.55.
    for call, parent, own, whole in ((first, None, 0.2, 0.7), (second, first.id, 0.0, 1.0), (third, None, 0.0, 0.25)):
        numbers = {"intermediate_reward": own, "return_": whole, "baseline": 0.55, "advantage": whole - 0.55}
        key = {"run_id": run.id, "call_id": call.id, "rollout_id": call.rollout_id, "parent_call_id": parent}
        tools = {"calls": [{"tool": "search", "status": "ok", "source": "time"}]}
        async with database.session() as session:
            session.add(tables.CallCredit(**key, depth=0, state_key="", tools=tools, **numbers))
    await builders.finish_rollout(database, one, reward=1.0)
    await builders.finish_rollout(database, other, reward=0.25)
    await builders.add_credited_group(database, group)
    return one.id


def test_an_advantage_leads_to_its_inputs(insert: Insert[str], open_page: Callable[[str], Visitor]) -> None:
    rollout = insert(credited)
    visitor = open_page(f"/rollouts/{rollout}")
    page = visitor.page
    expect(page.get_by_text("0.550, the mean of the values below")).to_be_visible()
    assert rows(page, "Credit") == [
        [
            "Call 1",
            "0.200",
            "0.700",
            "0.550",
            "+0.150",
            "0.200 intermediate + 0.5 × 1.000, return of call 2",
            "search ok",
        ],
        ["Call 2", "0.000", "1.000", "0.550", "+0.450", "0.000 intermediate + 1.000 of the reward", "search ok"],
    ]
    assert rows(page, "Values of the siblings") == [["Sibling 0", "1.000", "0.850"], ["Sibling 1", "0.250", "0.250"]]
    assert visitor.violations() == []
    page.get_by_role("region", name="Credit").get_by_role("button", name="Call 2").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("article", name="Call 2")).to_be_focused()
    page.get_by_role("link", name="Sibling 1").click()
    expect(page.get_by_role("heading", name=f"Rollout {rollout[:-1]}1")).to_be_visible()
