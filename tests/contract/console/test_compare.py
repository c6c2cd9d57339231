"""The page that compares runs: curves in one chart, figures, differences of documents, tasks won and lost."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta

from playwright.sync_api import expect

from leyden.libs.store.database import Database
from tests.contract.api.test_comparison import START, measured_run, trained_step
from tests.contract.console.conftest import HOSTILE, SHOWN, Insert
from tests.support import builders
from tests.support.browser import Visitor


async def two_runs(database: Database) -> tuple[str, str]:
    dataset = (await builders.add_run(database)).dataset_id
    first = await measured_run(database, dataset, 1e-6, [0.0, 0.5, 1.0, 0.25])
    other = await measured_run(database, dataset, 1e-5, [1.0, 0.5, 0.5, 0.75])
    return first.id, other.id


def test_runs_that_are_ticked_in_the_list_stand_beside_each_other(
    insert: Insert[tuple[str, str]], open_page: Callable[[str], Visitor]
) -> None:
    first, other = insert(two_runs)
    visitor = open_page("/")
    page = visitor.page
    expect(page.get_by_text("Tick two runs or more")).to_be_visible()
    for run in (first, other):
        page.get_by_role("checkbox", name=re.compile(run)).focus()
        page.keyboard.press("Space")
    assert visitor.violations() == []
    page.get_by_role("link", name="Compare 2 runs").focus()
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(rf"#/compare\?runs={first},{other}$"))
    expect(page.get_by_role("region", name="Differences").locator("tbody tr")).to_have_count(1)


def test_the_list_shows_curve_best_version_agent_model_and_pool(
    insert: Insert[tuple[str, str]], open_page: Callable[[str], Visitor]
) -> None:
    async def add(database: Database) -> tuple[str, str]:
        trained = await builders.add_run(database, config=builders.run_document(name="trained", model="/models/small"))
        for version in (0, 1):
            await builders.add_policy_version(database, trained, version)
        for number, rewards in enumerate([(0.0, 1.0), (1.0, 1.0)], start=1):
            await trained_step(database, trained, number, rewards)
        hostile = builders.run_document(name="new", agent={"command": [HOSTILE]})
        return trained.id, (await builders.add_run(database, config=hostile)).id

    insert(add)
    visitor = open_page("/")
    row = visitor.page.get_by_role("row", name="trained")
    words = "Mean reward 0.500 at step 1, 1.000 at step 2, from 0.500 to 1.000"
    expect(row.get_by_role("img", name=words)).to_be_visible()
    for cell in ("1: 0.750 in training", "{python} /agents/agent.py", "small", "default"):
        expect(row.get_by_role("cell", name=cell, exact=True)).to_be_visible()
    new = visitor.page.get_by_role("row", name="new")
    expect(new.get_by_role("cell", name="none yet")).to_have_count(2)
    expect(new).to_contain_text(SHOWN[:40])
    assert visitor.violations() == []


def test_two_runs_are_chosen_and_stand_beside_each_other(
    insert: Insert[tuple[str, str]], open_page: Callable[[str], Visitor]
) -> None:
    first, other = insert(two_runs)
    visitor = open_page("/")
    page = visitor.page
    page.get_by_role("link", name="Compare").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_text("Choose two runs or more.")).to_be_visible()
    assert visitor.violations() == []
    for run in (first, other):
        page.get_by_role("checkbox", name=re.compile(run)).focus()
        page.keyboard.press("Space")
    expect(page).to_have_url(re.compile(rf"#/compare\?runs={first},{other}$"))
    differences = page.get_by_role("region", name="Differences").locator("tbody tr")
    expect(differences).to_have_count(1)
    expect(differences).to_have_text(re.compile("optimizer.learning_rate.*1e-06.*1e-05"))
    expect(page.get_by_role("region", name="Held-out tasks")).to_contain_text("+0.250")
    changed = page.get_by_role("region", name="Tasks that changed most: rate 1e-05")
    expect(changed.locator("tbody tr")).to_have_text(
        [
            re.compile(r"^00\.0001\.000\+1\.000.*2\+2"),
            re.compile(r"^30\.2500\.750\+0\.500"),
            re.compile(r"^21\.0000\.500−0\.500"),
        ]
    )
    expect(changed.get_by_role("link", name="Rollout of task 2 in this run, mean reward 0.500")).to_have_attribute(
        "href", re.compile(f"^#/rollouts/{other}")
    )
    expect(page.get_by_role("row", name="Held-out reward").get_by_role("cell")).to_have_text(["0.438", "0.688"])
    held_out = page.get_by_role("img", name="Mean reward of held-out tasks")
    expect(held_out).to_have_attribute(
        "aria-label", re.compile("rate 1e-06 0.438 at version 0; rate 1e-05 0.688 at version 0")
    )
    page.get_by_label("Series").select_option("loss")
    expect(page.get_by_role("img", name="loss: ")).to_be_visible()
    assert visitor.violations() == []


def test_curves_are_drawn_by_step_time_and_trained_tokens(
    insert: Insert[tuple[str, str]], open_page: Callable[[str], Visitor]
) -> None:
    async def add(database: Database) -> tuple[str, str]:
        runs = [await builders.add_run(database, config=builders.run_document(name=name)) for name in ("a", "b")]
        for run, rewards, tokens in zip(runs, ((0.0, 1.0), (0.5, 0.5)), (700_000, None), strict=True):
            for number in (1, 2):
                metrics = {} if tokens is None else {"trained_tokens": tokens}
                made = START + timedelta(seconds=30.04 * number)
                await trained_step(database, run, number, rewards, metrics=metrics, created_at=made)
        return runs[0].id, runs[1].id

    visitor = open_page(f"/compare?runs={','.join(insert(add))}")
    page = visitor.page
    chart = page.get_by_role("img", name="reward_mean: ")
    expect(chart).to_have_attribute("aria-label", "reward_mean: a 0.500 at step 2; b 0.500 at step 2")
    page.get_by_label("by", exact=True).select_option("time")
    expect(chart).to_have_attribute("aria-label", "reward_mean: a 0.500 at seconds 60.1; b 0.500 at seconds 60.1")
    page.get_by_label("by", exact=True).select_option("trained tokens")
    # The second run does not know its tokens: it has no place on this axis.
    words = "reward_mean: a 0.500 at trained tokens 1400000; b not measured"
    expect(chart).to_have_attribute("aria-label", words)
    assert visitor.violations() == []


def test_hostile_documents_are_shown_as_text(
    insert: Insert[tuple[str, str]], open_page: Callable[[str], Visitor]
) -> None:
    async def hostile_run(database: Database) -> tuple[str, str]:
        agent = {"command": ["a"], "environment": {"WORDS": HOSTILE}}
        plain = await builders.add_run(database)
        return plain.id, (await builders.add_run(database, config=builders.run_document(agent=agent))).id

    visitor = open_page(f"/compare?runs={','.join(insert(hostile_run))}")
    row = visitor.page.get_by_role("row", name="agent.environment.WORDS")
    # A document is JSON: a control character is an escape, and its backslash stands.
    expect(row).to_contain_text(SHOWN.replace("\\x1b", "\\u001b"))
    expect(visitor.page.get_by_text("No further run was evaluated")).to_be_visible()
    assert visitor.violations() == []


def test_a_run_that_is_gone_is_named(open_page: Callable[[str], Visitor]) -> None:
    visitor = open_page("/compare?runs=nobody,none")
    expect(visitor.page.get_by_role("alert")).to_contain_text("nobody")
    # The browser reports the answer 404 as an error of its own.
    visitor.complaints[:] = [one for one in visitor.complaints if "404" not in one]
