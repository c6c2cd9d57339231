"""Duels of evaluations, and the charts of deliveries and of the queue."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from playwright.sync_api import expect

from leyden.libs.client import Client
from leyden.libs.contracts.api.duels import DuelPair
from leyden.libs.contracts.config import Reward
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from tests.contract.api.test_duels import REWARD, evaluated
from tests.contract.console.conftest import Insert
from tests.fakes.served_api import TOKEN
from tests.support import builders
from tests.support.browser import Visitor


def test_a_duel_stands_beside_the_evaluations(
    insert: Insert[tuple[tables.Run, dict[str, list[str]]]], open_page: Callable[[str], Visitor], api_url: str
) -> None:
    run, rollouts = insert(evaluated)
    visitor = open_page(f"/runs/{run.id}/evaluations")
    page = visitor.page
    expect(page.get_by_text(f"leyden reward duel run.json --evaluation {run.id}.e2", exact=False).first).to_be_visible()
    reward = Reward.model_validate(REWARD)
    old, new = rollouts
    pairs = [
        DuelPair(rollout=mine, against=rival, values={"better": value})
        for mine, rival, value in zip(rollouts[new], rollouts[old], (1.0, 0.5), strict=True)
    ]
    with Client(api_url, TOKEN) as client:
        client.add_duel(run.id, new, old, reward, pairs)
    page.reload()
    row = page.get_by_role("region", name="Duels").locator("tbody tr")
    expect(row.get_by_role("rowheader")).to_have_text(f"{new}, version 2")
    cells = [f"{old}, version 0", "better", "0.750", "0.000 to 1.000", "1", "1", "0", "0", "first-admin"]
    expect(row.get_by_role("cell")).to_have_text([*cells, re.compile(".")])
    assert visitor.violations() == []


def test_charts_show_pauses_for_weights_and_the_queue(insert: Insert[str], open_page: Callable[[str], Visitor]) -> None:
    async def swapped(database: Database) -> str:
        run = await builders.add_run(database)
        await builders.add_group(database, run)
        moment = datetime.now(tz=UTC) + timedelta(minutes=1)
        async with database.session() as session:
            for number in (1, 2):
                times = {"started_at": moment, "created_at": moment}
                session.add(tables.Step(run_id=run.id, number=number, metrics={}, checkpoint="", **times))
            for seconds in (1.0, 2.0):
                session.add(tables.WeightSwap(run_id=run.id, policy_version=1, url="http://engine", seconds=seconds))
        return run.id

    visitor = open_page(f"/runs/{insert(swapped)}")
    speed = visitor.page.get_by_role("region", name="Speed")
    pauses = speed.get_by_role("figure").filter(has_text="Pause of an engine for the step's weights")
    pauses.get_by_text("Numbers").click()
    expect(pauses.locator("tbody td")).to_have_text(["1.500", "2.000", "–", "–"])
    queue = speed.get_by_role("img", name="Rollouts that wait for their first attempt")
    expect(queue).to_have_attribute("aria-label", re.compile("2 at step 1, 2 at step 2$"))
    assert visitor.violations() == []
