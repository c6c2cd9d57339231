"""Pages ask again while their answer may change, and no longer."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from playwright.sync_api import Page, expect
from sqlalchemy import select

from leyden.libs.client import Client
from leyden.libs.contracts import ids
from leyden.libs.contracts.api.rollouts import RewardRequest
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from tests.contract.console.conftest import Insert
from tests.fakes.served_api import TOKEN
from tests.support import builders
from tests.support.browser import Visitor

ROUND = 4_000
"""Milliseconds of the page's clock, longer than its pause between two questions."""
ROUNDS = 50
"""More than any page needs until its last question."""


async def finished_rollout(
    database: Database, *, in_evaluation: bool = False, reward: float | None = 1.0, **document: object
) -> str:
    """A rollout with one call in a complete group that credit has not seen."""
    run = await builders.add_run(database, config=builders.run_document(**document))
    columns: dict[str, Any] = {"state": "complete", "finished_at": datetime.now(tz=UTC)}
    if in_evaluation:
        columns["evaluation_id"] = ids.evaluation_id(run.id, 1)
        values = {"dataset_id": run.dataset_id, "policy_version": 0, "rollouts_per_task": 1}
        async with database.session() as session:
            session.add(tables.Evaluation(id=columns["evaluation_id"], run_id=run.id, number=1, **values))
    _, [rollout] = await builders.add_group(database, run, size=1, **columns)
    await builders.add_call(database, rollout)
    await builders.finish_rollout(database, rollout, reward=reward)
    return rollout.id


async def unrewarded_rollout(database: Database) -> str:
    """One whose reward comes from outside."""
    return await finished_rollout(database, reward=None, runner={"stdout_reward": False})


async def rollout_of_an_evaluation(database: Database) -> str:
    return await finished_rollout(database, in_evaluation=True)


def credit(rollout_id: str) -> Callable[[Database], object]:
    async def work(database: Database) -> None:
        async with database.session() as session:
            rollout = await session.get_one(tables.Rollout, rollout_id)
            group = await session.get_one(tables.Group, rollout.group_id)
            calls = await session.scalars(select(tables.ModelCall.id).where(tables.ModelCall.rollout_id == rollout_id))
            numbers = {"intermediate_reward": 0.0, "return_": 1.0, "baseline": 0.5, "advantage": 0.5}
            place = {"rollout_id": rollout_id, "run_id": rollout.run_id, "depth": 0, "state_key": ""}
            session.add_all(tables.CallCredit(call_id=call, tools={"calls": []}, **place, **numbers) for call in calls)
        await builders.add_credited_group(database, group)

    return work


OF_EVERY_PAGE = "/v1/alarms?state=active"
"""The count beside a link of the navigation, which is asked for as long as the page is seen."""


class Asked:
    """The questions of a page to the API, that of every page left out, whose clock the test moves."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.urls = list[str]()
        page.clock.install()
        page.on("request", lambda request: self.urls.append(request.url) if OF_EVERY_PAGE not in request.url else None)

    def open(self, kind: str, key: str) -> None:
        self.urls.clear()
        self.page.evaluate(f"location.hash = '#/{kind}/{key}'")

    def pause(self) -> list[str]:
        """The addresses asked within one pause of the page."""
        before = len(self.urls)
        self.page.clock.run_for(ROUND)
        self.page.evaluate("fetch('.').then((answer) => answer.text())")
        return [url for url in self.urls[before:] if "/v1/" in url]

    def end(self) -> None:
        """Waits until nothing is asked for three pauses."""
        quiet = 0
        for _ in range(ROUNDS):
            quiet = 0 if self.pause() else quiet + 1
            if quiet == 3:
                return
        raise AssertionError(f"the page asks for ever: {self.urls[-3:]}")


def test_a_rollouts_page_asks_until_its_calls_have_credit(
    insert: Insert[str], open_page: Callable[[str], Visitor]
) -> None:
    rollout = insert(finished_rollout)
    page = open_page("/").page
    expect(page.get_by_role("heading", name="Runs")).to_be_visible()
    asked = Asked(page)
    asked.open("rollouts", rollout)
    expect(page.get_by_text("No credit yet.")).to_be_visible()
    insert(credit(rollout))
    for _ in range(ROUNDS):
        asked.pause()
        if page.get_by_text("= advantage").is_visible():
            break
    expect(page.get_by_text("= advantage")).to_contain_text("+0.500")
    asked.end()


def test_a_rollouts_page_shows_a_reward_that_comes_from_outside_after_its_end(
    insert: Insert[str], open_page: Callable[[str], Visitor], api_url: str
) -> None:
    rollout = insert(unrewarded_rollout)
    page = open_page("/").page
    expect(page.get_by_role("heading", name="Runs")).to_be_visible()
    asked = Asked(page)
    asked.open("rollouts", rollout)
    expect(page.get_by_text("Nobody has given a reward yet.")).to_be_visible()
    with Client(api_url, TOKEN) as client:
        client.give_reward(rollout, RewardRequest(key="k", name="person", value=0.7))
    for _ in range(ROUNDS):
        asked.pause()
        if not page.get_by_text("Nobody has given a reward yet.").is_visible():
            break
    expect(page.get_by_role("region", name="Reward", exact=True).get_by_role("row", name="person")).to_contain_text(
        "0.700"
    )
    insert(credit(rollout))
    asked.end()


def test_pages_of_an_evaluation_and_of_what_is_not_there_stop_asking(
    insert: Insert[str], open_page: Callable[[str], Visitor]
) -> None:
    rollout = insert(rollout_of_an_evaluation)
    visitor = open_page("/")
    page = visitor.page
    expect(page.get_by_role("heading", name="Runs")).to_be_visible()
    asked = Asked(page)
    asked.open("groups", rollout.rpartition(".")[0])
    expect(page.get_by_role("link", name="Sibling 0")).to_be_visible()
    asked.end()
    asked.open("rollouts", rollout)
    expect(page.get_by_role("link", name="Side by side")).to_be_visible()
    asked.end()
    asked.open("groups", "none")
    expect(page.get_by_role("alert")).to_contain_text("names its group")
    asked.end()
    # The browser reports the answer 404 as an error of its own.
    visitor.complaints[:] = [one for one in visitor.complaints if "404" not in one]
