"""The buttons of a rollout's page: rate, grade again, export, ask again; each with its right, progress and refusal."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from playwright.sync_api import Page, expect

from leyden.libs.client import Client
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from tests.contract.api.test_regrades import LENIENT, OLD, graded
from tests.contract.api.test_waiting import run_that_waits
from tests.contract.console.conftest import HOSTILE, SHOWN, Insert, loses
from tests.contract.console.test_bad_input import Slow, answered
from tests.fakes.served_api import TOKEN
from tests.support import builders
from tests.support.browser import Visitor

Open = Callable[[str], Visitor]
GRADES = re.compile(r"/(re)?grades$")


async def waiting(database: Database) -> str:
    _, [rollout, _] = await run_that_waits(database)
    return rollout.id


async def plain(database: Database) -> str:
    """A rollout of a run whose document has no `reward`."""
    _, [rollout, _] = await builders.add_group(database, await builders.add_run(database))
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": HOSTILE}]
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
    await builders.add_call(database, rollout, turns=turns, tools=tools, temperature=0.5)
    await builders.finish_rollout(database, rollout)
    return rollout.id


async def evaluated(database: Database) -> str:
    return (await graded(database, evaluated=True)).id


def press(page: Page, name: str) -> None:
    """By keyboard alone."""
    button = page.get_by_role("button", name=name, exact=True)
    expect(button).to_be_enabled()
    button.focus()
    page.keyboard.press("Enter")


def open_rating(page: Page) -> None:
    press(page, "Rate")
    expect(page.get_by_label("Value")).to_be_focused()


def test_a_person_gives_feedback_with_words_that_stand_beside_the_component(
    insert: Insert[str], open_writer: Open, api_url: str
) -> None:
    rollout = insert(waiting)
    visitor = open_writer(f"/rollouts/{rollout}")
    page = visitor.page
    expect(page.get_by_text("Grade again: its first grading is not there yet.")).to_be_visible()
    open_rating(page)
    page.keyboard.type("0.5")
    page.keyboard.press("Tab")
    page.keyboard.insert_text(HOSTILE)
    page.keyboard.press("Enter")
    expect(page.get_by_text("The platform has taken 0.5 for thumbs.")).to_be_visible()
    row = page.get_by_role("region", name="Reward", exact=True).get_by_role("row", name="waits for the grading")
    expect(row).to_contain_text(SHOWN)
    assert visitor.violations() == []
    with Client(api_url, TOKEN) as leyden:
        [given] = leyden.rollout(rollout).feedback
    assert (given.component, given.value, given.comment, given.given_by) == ("thumbs", 0.5, HOSTILE, "ann")


def test_a_person_gives_a_reward_where_the_run_names_none(insert: Insert[str], open_writer: Open, api_url: str) -> None:
    rollout = insert(plain)
    page = open_writer(f"/rollouts/{rollout}").page
    expect(page.get_by_text("Grade again: its run has no reward.components")).to_be_visible()
    open_rating(page)
    page.keyboard.type("-0.25")
    page.keyboard.press("Enter")
    expect(page.get_by_text("The platform has taken -0.25 for person.")).to_be_visible()
    expect(page.get_by_role("region", name="Reward", exact=True).get_by_role("row", name="ann")).to_contain_text(
        "−0.250"
    )
    with Client(api_url, TOKEN) as leyden:
        [given] = leyden.rollout(rollout).rewards
    assert (given.name, given.value, given.given_by) == ("person", -0.25, "ann")


def test_a_refused_rating_says_why_and_keeps_what_was_typed(insert: Insert[str], open_writer: Open) -> None:
    rollout = insert(waiting)
    visitor = open_writer(f"/rollouts/{rollout}")
    page = visitor.page
    open_rating(page)
    page.keyboard.type("1")

    async def cancel(database: Database) -> str:
        async with database.session() as session:
            run = (await session.get_one(tables.Rollout, rollout)).run_id
            (await session.get_one(tables.Run, run)).intent = "cancelled"
        return run

    insert(cancel)
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("feedback for its rollouts counts nowhere")
    expect(page.get_by_label("Value")).to_have_value("1")
    # The browser reports the answer 409 as an error of its own.
    visitor.complaints[:] = [one for one in visitor.complaints if "409" not in one]


def test_a_reader_is_told_which_token_each_button_needs(insert: Insert[str], open_page: Open) -> None:
    visitor = open_page(f"/rollouts/{insert(evaluated)}")
    page = visitor.page
    expect(
        page.get_by_text("Rate, Grade again, Ask its first question again: it needs a token with scope write")
    ).to_be_visible()
    for name in ("Rate", "Grade again"):
        expect(page.get_by_role("button", name=name, exact=True)).to_be_disabled()
    expect(page.get_by_role("button", name="Export as JSON")).to_be_enabled()
    expect(page.get_by_text("--scope write --expires 30d")).to_be_visible()
    assert visitor.violations() == []


def test_a_rollout_is_graded_again_after_a_trial(insert: Insert[str], open_writer: Open) -> None:
    visitor = open_writer(f"/rollouts/{insert(evaluated)}")
    page = visitor.page
    press(page, "Grade again")
    field = page.get_by_label("The section reward")
    assert json.loads(field.input_value())["components"][0]["name"] == OLD["name"]
    field.fill("{")
    press(page, "Try it, and keep nothing")
    expect(page.get_by_role("alert")).to_contain_text("reward: this is no JSON")
    field.fill(json.dumps(LENIENT["reward"]))
    press(page, "Try it, and keep nothing")
    expect(page.get_by_text("It would have the total 0.900.")).to_be_visible()
    expect(page.get_by_role("region", name="Trial").locator("tbody tr")).to_have_count(2)
    assert visitor.violations() == []
    expect(page.get_by_text("It was graded again.")).to_have_count(0)
    press(page, "Keep it as the newest grading")
    expect(page.get_by_text("Kept as revision 2, total 0.900.")).to_be_visible()
    expect(page.get_by_text("It was graded again. The newest grading counts.")).to_be_visible()
    press(page, "Keep it as the newest grading")
    expect(page.get_by_text("Revision 2 has the same components and total: nothing changed.")).to_be_visible()
    assert visitor.violations() == []


def test_a_long_grading_is_waited_for(insert: Insert[str], open_writer: Open) -> None:
    visitor = open_writer(f"/rollouts/{insert(evaluated)}")
    page = visitor.page
    press(page, "Grade again")
    page.get_by_label("The section reward").fill(json.dumps(LENIENT["reward"]))
    page.clock.install()
    for name, told in (("Try it, and keep nothing", "the total 0.900"), ("Keep it as the newest grading", "Kept as")):
        slow = Slow()
        with answered(page, slow.hold, GRADES):
            press(page, name)
            expect(page.get_by_text("Grading …")).to_be_visible()
            page.clock.run_for(630_000)
            expect(page.get_by_text("Grading …")).to_be_visible()
            expect(page.get_by_role("alert")).to_have_count(0)
            slow.answer()
            expect(page.get_by_text(told)).to_be_visible()


def test_a_grading_whose_answer_was_lost_is_not_done_twice(insert: Insert[str], open_writer: Open) -> None:
    visitor = open_writer(f"/rollouts/{insert(evaluated)}")
    page = visitor.page
    keys = list[str | None]()
    page.on("request", lambda one: keys.append(one.headers.get("idempotency-key")) if GRADES.search(one.url) else None)
    press(page, "Grade again")
    page.get_by_label("The section reward").fill(json.dumps(LENIENT["reward"]))
    with answered(page, loses, GRADES):
        press(page, "Keep it as the newest grading")
        expect(page.get_by_role("alert")).to_contain_text("the API does not answer")
    press(page, "Keep it as the newest grading")
    expect(page.get_by_text("It was graded again. The newest grading counts.")).to_be_visible()
    press(page, "Keep it as the newest grading")
    expect(page.get_by_text("Revision 2 has the same components and total: nothing changed.")).to_be_visible()
    first, repeat, other = keys
    assert first is not None and first == repeat != other
    # The browser reports the lost answer as an error of its own.
    visitor.complaints[:] = [one for one in visitor.complaints if "Failed to load" not in one]


def test_a_refused_grading_says_what_to_write(insert: Insert[str], open_writer: Open) -> None:
    visitor = open_writer(f"/rollouts/{insert(evaluated)}")
    page = visitor.page
    press(page, "Grade again")
    page.get_by_label("The section reward").fill('{"components": [{"name": "answer", "from": "nowhere"}]}')
    press(page, "Keep it as the newest grading")
    expect(page.get_by_role("alert")).to_contain_text("from")
    visitor.complaints[:] = [one for one in visitor.complaints if "422" not in one]


def test_a_rollout_is_exported_with_its_calls(insert: Insert[str], open_page: Open) -> None:
    rollout = insert(plain)
    page = open_page(f"/rollouts/{rollout}").page
    with page.expect_download() as download:
        press(page, "Export as JSON")
    assert download.value.suggested_filename == f"{rollout}.json"
    found: dict[str, Any] = json.loads(download.value.path().read_text())
    [call] = found["calls"]
    assert (found["rollout"]["id"], found["spans"], call["prompt_ids"]) == (rollout, [], [1, 2, 3])
    assert call["turns"][1]["content"] == HOSTILE


def test_the_first_question_is_asked_again_in_the_playground(insert: Insert[str], open_writer: Open) -> None:
    rollout = insert(plain)
    visitor = open_writer(f"/rollouts/{rollout}")
    page = visitor.page
    page.get_by_role("link", name="Ask its first question again").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_label("Message", exact=True)).to_have_value(HOSTILE)
    expect(page.get_by_label("System message")).to_have_value("Be brief.")
    expect(page.get_by_label("Tools, a JSON list")).to_have_value(
        '[{"type":"function","function":{"name":"look_up","parameters":{}}}]'
    )
    expect(page.get_by_label("Temperature")).to_have_value("0.5")
    expect(page.get_by_role("link", name=rollout)).to_be_visible()
    assert visitor.violations() == []
