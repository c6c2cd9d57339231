"""The console in a real browser on a platform that trained: curves, rewards with their parts, and hostile texts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, expect
from rich.console import Console

from leyden.libs.cli.local.platform import Platform
from leyden.libs.cli.view.console_link import console_link
from leyden.libs.cli.view.watch import watch_run
from leyden.libs.client import Client
from leyden.libs.contracts.api.runs import Run
from tests.support.browser import Visitor, running_browser
from tests.support.shared import ROOT

STEPS = 2
LONG = 50_000
HOSTILE = "<img src=x onerror=window.hacked=1><script>window.hacked=1</script>\x1b[2J\u202eevil"
SHOWN = "<img src=x onerror=window.hacked=1><script>window.hacked=1</script>\\x1b[2J\\u202eevil"
REWARD = {
    "components": [
        {
            "name": "right",
            "weight": 0.6,
            "grader": {"type": "token_f1", "output": "{output.answer}", "reference": "{task.answer}"},
        },
        {"name": "words", "weight": 0, "grader": {"type": "length", "at_most": 8}},
    ]
}


@pytest.fixture
def run(client: Client) -> Run:
    """A run that has ended, whose tasks, messages and output are hostile; one for all tests."""
    if (earlier := next(client.runs(name="hostile"), None)) is not None:
        return earlier
    tasks: list[dict[str, Any]] = [{"number": number, "answer": "odd", "text": HOSTILE} for number in range(4)]
    client.upload_dataset("hostile", [{**task, "long": "y" * LONG} for task in tasks])
    program = ROOT / "tests" / "agents" / "hostile.py"
    document = {
        "name": "hostile",
        "dataset": "hostile",
        "agent": {"command": ["{python}", "-I", "-S", str(program)], "environment": {"HOSTILE": HOSTILE}},
        "sampling": {"group_size": 8, "groups_per_step": 1},
        "training": {"steps": STEPS},
        "evaluation": {"dataset": "hostile", "rollouts_per_task": 2},
        "reward": REWARD,
    }
    ended = watch_run(client, client.create_run(document).id, Console(quiet=True))
    assert (ended.phase, ended.progress.step) == ("completed", STEPS)
    return ended


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as started:
        yield started


@pytest.fixture
def visitor(browser: Browser) -> Iterator[Visitor]:
    with browser.new_context() as context:
        yield Visitor(context.new_page())


def test_a_link_leads_to_the_curve_and_to_the_parts_of_a_reward(
    visitor: Visitor, client: Client, platform: Platform, run: Run
) -> None:
    page = visitor.page
    page.goto(console_link(client, platform.facts.url("api")))
    row = page.get_by_role("row").filter(has_text="hostile")
    assert run.progress.reward_mean is not None
    expect(row).to_contain_text(f"{STEPS} / {STEPS}")
    expect(row).to_contain_text(f"{run.progress.reward_mean:.3f}")
    assert "sign-in" not in page.url and visitor.violations() == []

    row.get_by_role("link").focus()
    page.keyboard.press("Enter")
    steps = list(client.steps(run.id))
    curve = page.get_by_role("img", name="Mean reward in training")
    expect(curve).to_have_attribute("aria-label", re.compile(f"{steps[-1].reward_mean:.3f} at step {STEPS}$"))
    expect(curve.locator("canvas")).to_be_visible()
    expect(page.get_by_role("img", name="Mean reward of held-out tasks")).to_be_visible()
    assert visitor.violations() == []
    evaluation = max(client.evaluations(run.id), key=lambda one: one.number)
    page.get_by_label("Of", exact=True).select_option(f"held-out tasks, version {STEPS}")
    expect(page.get_by_text("held out", exact=False)).to_have_count(evaluation.results.rollouts["finished"])
    page.get_by_label("Of", exact=True).select_option("training")

    rollout = client.rollout(next(iter(client.rollouts(run=run.id, step=STEPS))).id)
    page.get_by_role("link", name=rollout.id, exact=True).click()
    right = rollout.components[0]
    assert right.value is not None
    expect(page.get_by_role("row").filter(has_text="right")).to_contain_text(f"+{right.value * right.weight:.3f}")
    expect(page.get_by_role("row", name=re.compile("^reward"))).to_contain_text(f"{rollout.reward:.3f}")
    siblings = list(client.rollouts(group=rollout.group_id))
    expect(page.get_by_role("listitem").filter(has_text=re.compile(r"^\d+ \d"))).to_have_count(len(siblings))
    [call] = client.calls(rollout.id)
    assert call.credit is not None
    expect(page.get_by_role("article", name="Call 1")).to_contain_text(f"{abs(call.credit.advantage):.3f}")
    expect(page.get_by_role("article", name="Call 1").get_by_text(SHOWN)).to_be_visible()

    page.get_by_text("Task", exact=True).last.click()
    page.get_by_role("button", name="Show all").click()
    page.get_by_text("Attempt 1").click()
    expect(page.get_by_text("y" * 1000)).to_be_visible()
    assert visitor.violations() == []
    assert page.evaluate("window.hacked") is None and page.locator("main img").count() == 0
    assert visitor.complaints == []


def test_a_link_signs_in_once_and_a_token_signs_in_by_hand(
    browser: Browser, visitor: Visitor, client: Client, platform: Platform, run: Run
) -> None:
    url = platform.facts.url("api")
    link = console_link(client, url, f"/runs/{run.id}")
    visitor.page.goto(link)
    expect(visitor.page.get_by_role("heading", name="hostile")).to_be_visible()
    with browser.new_context() as context:
        second = Visitor(context.new_page())
        second.page.goto(link)
        expect(second.page.get_by_role("alert")).to_contain_text("signed in before")
        assert second.violations() == []
        second.page.get_by_role("textbox", name="Token").fill(platform.token)
        second.page.keyboard.press("Enter")
        expect(second.page.get_by_role("heading", name="hostile")).to_be_visible()
        second.page.get_by_role("button", name="Sign out").click()
        expect(second.page.get_by_role("textbox", name="Token")).to_be_visible()
        second.page.goto(url)
        expect(second.page.get_by_role("textbox", name="Token")).to_be_visible()
        assert second.complaints == []


def test_a_platform_without_runs_and_an_api_that_fails_say_what_to_do(
    visitor: Visitor, client: Client, platform: Platform
) -> None:
    page = visitor.page
    page.route("**/v1/runs?*", lambda route: route.fulfill(json={"items": [], "next_cursor": None}))
    page.goto(console_link(client, platform.facts.url("api")))
    expect(page.get_by_text("leyden train", exact=False)).to_be_visible()
    assert visitor.violations() == []
    page.unroute("**/v1/runs?*")
    problem = {"detail": "the database does not answer"}
    page.route("**/v1/runs?*", lambda route: route.fulfill(status=503, json=problem))
    expect(page.get_by_role("alert")).to_contain_text("the database does not answer")
    page.unroute("**/v1/runs?*")
    expect(page.get_by_role("alert")).to_have_count(0)
