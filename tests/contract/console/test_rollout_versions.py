"""The same task at other versions: a table on a rollout's page, and one of those rollouts beside it."""

from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import expect

from leyden.libs.store.database import Database
from tests.contract.console.conftest import HOSTILE, SHOWN, Insert
from tests.support import builders
from tests.support.browser import Visitor


async def three_versions(database: Database) -> list[str]:
    """A task at versions 2, 3 and 5 with rewards 0.25, 0.5 and 1, and another task at version 4."""
    run = await builders.add_run(database, config=builders.run_document(name="the arithmetic"))
    made = list[str]()
    for number, (version, task, reward) in enumerate([(2, 0, 0.25), (3, 0, 0.5), (5, 0, 1.0), (4, 1, 0.0)]):
        group = {"admitted_version": version, "task_number": task, "size": 1}
        _, [rollout] = await builders.add_group(database, run, number, **group)
        await builders.add_call(database, rollout)
        answer = {"role": "assistant", "content": f"answer {version} {HOSTILE}"}
        await builders.add_call(database, rollout, sampled=(4, 5 + version), answer=answer)
        await builders.finish_rollout(database, rollout, reward=reward)
        made.append(rollout.id)
    return made


def test_an_earlier_and_a_later_version_stand_beside_a_rollout(
    insert: Insert[list[str]], open_page: Callable[[str], Visitor]
) -> None:
    [earlier, rollout, later, _] = insert(three_versions)
    visitor = open_page(f"/rollouts/{rollout}")
    page = visitor.page
    table = page.get_by_role("region", name="Versions on this task").locator("tbody tr")
    expect(table).to_have_count(3)
    assert [[*row.locator("th, td").all_inner_texts()] for row in table.all()] == [
        ["2", "1", "0.250", "0.250"],
        ["3", "1", "0.500", "0.500"],
        ["5", "1", "1.000", "1.000"],
    ]
    page.get_by_role("button", name="Earlier version").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_text("Same until call 1: the answer of call 2 differs.")).to_be_visible()
    expect(page.get_by_role("region", name="Version 3", exact=True)).to_contain_text(f"answer 3 {SHOWN}")
    expect(page.get_by_role("region", name="Version 2", exact=True)).to_contain_text("reward 0.250")
    expect(page.get_by_role("link", name=f"Rollout {earlier}", exact=True)).to_be_visible()
    expect(page.get_by_role("button", name="Earlier version")).to_be_disabled()
    assert visitor.violations() == []
    page.get_by_role("heading", name="Siblings").click()
    page.keyboard.press("Shift+ArrowRight")
    expect(page.get_by_role("region", name="Version 5", exact=True)).to_contain_text(f"answer 5 {SHOWN}")
    expect(page.get_by_label("Beside this one")).to_have_value(later)
    page.get_by_role("link", name=f"Rollout {later}", exact=True).click()
    expect(page.get_by_role("heading", name=f"Rollout {later}", exact=True)).to_be_visible()


def test_a_task_that_one_version_has_played_says_so_and_names_stand_for_ids(
    insert: Insert[list[str]], open_page: Callable[[str], Visitor]
) -> None:
    rollout = insert(three_versions)[3]
    page = open_page(f"/rollouts/{rollout}").page
    expect(page.get_by_text("No other version has played this task yet.")).to_be_visible()
    expect(page.get_by_role("definition").get_by_role("link", name="the arithmetic")).to_be_visible()
