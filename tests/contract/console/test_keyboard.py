"""The five questions that people bring to the console, each answered by the keyboard in four steps or fewer."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Locator, Page, expect

from leyden.libs.contracts.call_counts import CallCounts
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from tests.contract.api.test_comparison import measured_run
from tests.contract.api.test_weights import add_version, make_version
from tests.contract.console.conftest import Insert
from tests.contract.console.test_group import add_component
from tests.support import builders
from tests.support.browser import Visitor

STEPS = 4
MOST_TABS = 60


class Keyboard:
    """A person with a keyboard alone, whose steps are counted: each control that is used is one."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.steps = 0

    def use(self, control: Locator, key: str = "Enter") -> None:
        """Moves to a control by Tab and presses a key there."""
        expect(control).to_be_visible()
        for _ in range(MOST_TABS):
            if control.evaluate("(one) => one === document.activeElement"):
                break
            self.page.keyboard.press("Tab")
        expect(control).to_be_focused()
        self.page.keyboard.press(key)
        self.steps += 1


async def trained(database: Database, folder: Path) -> None:
    """Two runs that were measured; the second one has a step, a tool that fails, a version and a rollout at 0."""
    dataset = (await builders.add_run(database, name="empty")).dataset_id
    await measured_run(database, dataset, 1e-6, [0.0, 0.5])
    run = await measured_run(database, dataset, 1e-5, [1.0, 0.5])
    group, rollouts = await builders.add_group(database, run, 9)
    for rollout, reward in zip(rollouts, (1.0, 0.0), strict=True):
        await builders.add_call(database, rollout)
        await builders.finish_rollout(database, rollout, reward=reward)
        await add_component(database, rollout, "answer", reward)
    counts = CallCounts(calls=2, tools={"search": {"ok": 9}, "sql": {"error": 7, "ok": 1}})
    await builders.add_credited_group(database, group, calls=counts.model_dump())
    async with database.session() as session:
        session.add(tables.StepGroup(group_id=group.id, run_id=run.id, step=1, verdict="trained"))
    await add_version(database, run, folder)


def test_five_questions_take_four_steps_each(
    insert: Insert[None], open_page: Callable[[str], Visitor], tmp_path: Path
) -> None:
    folder = make_version(tmp_path / "version")
    insert(lambda database: trained(database, folder))

    def begin() -> Keyboard:
        page = open_page("/").page
        expect(page.get_by_role("heading", name="Runs")).to_be_visible()
        return Keyboard(page)

    def link(page: Page, name: str) -> Locator:
        return page.get_by_role("link", name=name, exact=True)

    # Is it learning?
    person = begin()
    person.use(link(person.page, "rate 1e-05"))
    expect(person.page.get_by_role("img", name="Mean reward in training: 0.500 at step 1")).to_be_visible()
    expect(person.page.get_by_role("img", name="Mean reward of held-out tasks")).to_be_visible()
    expect(person.page.get_by_text("0.750 at version 0", exact=True)).to_be_visible()
    taken = [person.steps]

    # Which tool fails?
    expect(person.page.get_by_role("region", name="Tools").get_by_role("row", name="sql")).to_contain_text("0.875")
    taken.append(person.steps)

    # Why did this reward fall?
    person.use(link(person.page, "Rollouts"))
    person.use(person.page.get_by_role("link", name=re.compile(r"\.9\.1$")))
    answer = person.page.get_by_role("region", name="Reward").get_by_role("row", name="answer")
    expect(answer.get_by_role("cell").nth(2)).to_have_text("0.000")
    taken.append(person.steps)

    # What changed between two runs?
    person = begin()
    for name in ("rate 1e-05", "rate 1e-06"):
        person.use(person.page.get_by_role("checkbox", name=re.compile(name)), "Space")
    person.use(link(person.page, "Compare 2 runs"))
    expect(person.page.get_by_role("region", name="Differences")).to_contain_text("optimizer.learning_rate")
    taken.append(person.steps)

    # Download the best version.
    person = begin()
    person.use(link(person.page, "rate 1e-05"))
    person.use(link(person.page, "Versions"))
    person.use(person.page.get_by_role("button", name="Files of version 0"))
    with person.page.expect_download() as download:
        person.use(link(person.page, "Download version 0"))
    assert download.value.suggested_filename.endswith("-version-0.tar")
    taken.append(person.steps)
    assert max(taken) <= STEPS, taken
