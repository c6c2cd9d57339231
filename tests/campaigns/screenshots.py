"""`make screenshots`: writes the pictures of docs/how-to/console.md, of a bandit that a few steps have trained."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, expect
from rich.console import Console

from leyden.libs.cli.local.platform import Platform
from leyden.libs.cli.view.console_link import console_link
from leyden.libs.cli.view.watch import watch_run
from leyden.libs.client import Client
from leyden.libs.contracts.api.runs import Run
from tests.campaigns.soak import QUICK, bandit_run, small_platform
from tests.support.browser import running_browser
from tests.support.shared import ROOT

IMAGES = ROOT / "docs" / "images"
SIZE: Any = {"width": 1100, "height": 900}
STEPS = 10
GRADER = {"type": "token_f1", "output": "{output.answer}", "reference": "{task.answer}"}
COMPONENTS = [
    {"name": "answer", "weight": 0.9, "grader": GRADER},
    {"name": "format", "weight": 0.1, "grader": {"type": "regex", "pattern": '^{"answer": "[a-z]+"}$'}},
    {"name": "words", "weight": 0, "grader": {"type": "length", "at_most": 8}},
]


def main() -> None:
    """Trains on a platform of its own, then visits its pages."""
    with (
        tempfile.TemporaryDirectory(prefix="leyden-screenshots-") as folder,
        small_platform(Path(folder)) as platform,
        Client(platform.facts.url("api"), platform.token) as client,
    ):
        _take(platform, client, _train(client, Path(folder)))


def _train(client: Client, folder: Path) -> Run:
    client.upload_dataset("coins", [{"number": number, "answer": "odd"} for number in range(16)])
    sections = {"evaluation": {"dataset": "coins", "every": 3, "rollouts_per_task": 4}, **QUICK}
    document = bandit_run(folder / "received.log", "coins", STEPS, reward={"components": COMPONENTS}, **sections)
    document["dataset"] = "coins"
    document["agent"]["environment"]["BANDIT_SILENT"] = "1"
    return watch_run(client, client.create_run(document).id, Console())


def _take(platform: Platform, client: Client, run: Run) -> None:
    # One that earned less than its siblings, in a step whose rollouts are on the first page of the list.
    rollout = min(client.rollouts(run=run.id, step=STEPS // 2 + 1), key=lambda one: one.reward or 0.0)
    IMAGES.mkdir(exist_ok=True)
    with running_browser() as browser, browser.new_context(viewport=SIZE, color_scheme="light") as context:
        page: Page = context.new_page()
        page.goto(console_link(client, platform.facts.url("api"), f"/runs/{run.id}"))
        expect(page.get_by_role("region", name="Cost").locator("canvas").first).to_be_visible()
        # From the facts on, with all charts of the score.
        page.locator("dl").first.evaluate("(facts) => window.scrollTo(0, facts.getBoundingClientRect().top - 16)")
        page.screenshot(path=IMAGES / "console-run.png")
        page.get_by_role("link", name="Rollouts", exact=True).click()
        page.get_by_role("link", name=rollout.id, exact=True).click()
        expect(page.get_by_role("article").first).to_be_visible()
        # Each part that is not loaded says so.
        expect(page.get_by_role("status")).to_have_count(0)
        page.screenshot(path=IMAGES / "console-rollout.png")


if __name__ == "__main__":
    main()
