"""One alarm that fires on a whole platform is the same for every reader, and ends for every reader."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, expect
from typer.testing import CliRunner

from leyden.libs.cli.__main__ import app
from leyden.libs.cli.local.platform import Platform
from leyden.libs.cli.view.console_link import console_link
from leyden.libs.client import Client
from leyden.libs.contracts.api.alarms import Alarm
from leyden.libs.contracts.api.runs import Run
from tests.campaigns.soak import bandit_run, small_platform
from tests.fakes.webhook import Webhook, running_webhook
from tests.support.browser import Visitor, running_browser
from tests.support.long import long_only
from tests.support.shared import ROOT
from tests.support.waiting import until

NAME = "agents_fail"
CAUSE = "the sandbox is full"
GROUP = 8
FAILED = 4
GOOD_GROUPS = 3
GAUGE = f'controller_run_alarms{{alarm="{NAME}",severity="warning"}} '
"""The series of the alert LeydenRunInAlarm."""


class Broken(Exception):
    """The agent's failure."""


def play(client: Client, run: Run, *, fails: bool, reward: float = 0.0) -> None:
    with contextlib.suppress(Broken), client.attempt(run.id, wait_seconds=240) as attempt:
        question = {"model": "any", "max_tokens": 1, "logprobs": True, "messages": [{"role": "user", "content": "?"}]}
        headers = {"authorization": f"Bearer {attempt.api_key}"}
        address = f"{attempt.base_url}/chat/completions"
        httpx.post(address, json=question, headers=headers, timeout=120, trust_env=False).raise_for_status()
        if fails:
            raise Broken(CAUSE)
        attempt.reward = reward


class Readers:
    """Everything that shows the alarms of a run to somebody."""

    def __init__(self, platform: Platform, client: Client, page: Page, webhook: Webhook, watched: Path) -> None:
        self.platform, self.client, self.page, self.webhook, self.watched = platform, client, page, webhook, watched

    def command(self, *words: str) -> list[str]:
        root = ["--url", self.platform.facts.url("api"), "--token", self.platform.token]
        result = CliRunner().invoke(app, [*root, *words], env={"COLUMNS": "400"})
        assert result.exit_code == 0, result.output
        return [line for line in result.output.splitlines() if f"alarm {NAME}" in line]

    def gauge(self) -> float:
        metrics = httpx.get(f"{self.platform.facts.internal_url('controller')}/metrics", trust_env=False, timeout=60)
        [line] = [line for line in metrics.text.splitlines() if line.startswith(GAUGE)]
        return float(line.removeprefix(GAUGE))

    def posted(self, event: str) -> list[Alarm]:
        found = [Alarm.model_validate(one["alarm"]) for one in self.webhook.received if one["event"] == event]
        return [one for one in found if one.name == NAME]

    def watched_lines(self) -> list[str]:
        return [line for line in self.watched.read_text().splitlines() if f"alarm {NAME}" in line]

    def go_to(self, page: str) -> None:
        self.page.goto(f"{self.platform.facts.url('api')}/#{page}")
        self.page.reload()


def assert_active(readers: Readers, run: Run, alarm: Alarm) -> None:
    page, client = readers.page, readers.client
    said = rf"{FAILED} of the last {GROUP} attempts ended as agent_error: .*Broken: {CAUSE}.*"
    assert re.fullmatch(said, alarm.reason)
    [listed] = client.alarms(run.id, name=NAME)
    [of_run] = [one for one in client.run(run.id).alarms if one.name == NAME]
    assert of_run == alarm and listed.state == "active"
    assert listed.model_dump(include=set(Alarm.model_fields)) == alarm.model_dump()
    words = f", warning since {alarm.since.astimezone():%Y-%m-%d %H:%M:%S}: {alarm.reason}: {alarm.remedy}"
    assert readers.command("run", "show", run.id) == [f"alarm {NAME}{words}"]
    assert readers.command("alarms", "--name", NAME) == [f"{run.name} ({run.id}): alarm {NAME}{words}"]
    assert until(readers.watched_lines, "a line of the watch", 60) == [f"alarm {NAME}{words}"]
    assert until(lambda: readers.gauge() == 1, "the gauge", 60)
    for address in ("/alarms?state=active", f"/runs/{run.id}"):
        readers.go_to(address)
        shown = page.get_by_role("list", name="Alarms", exact=True).locator("> li").filter(has_text=NAME)
        expect(shown).to_contain_text(f"{NAME}, warning since")
        expect(shown).to_contain_text(alarm.reason)
        expect(shown).to_contain_text(f"Remedy: {alarm.remedy}")


def assert_ended(readers: Readers, run: Run, alarm: Alarm) -> None:
    page, client = readers.page, readers.client
    [listed] = client.alarms(run.id, name=NAME)
    [posted] = until(lambda: readers.posted("alarm_ended"), "the event of the end", 60)
    assert (listed.number, listed.since, listed.state) == (alarm.number, alarm.since, "ended")
    assert listed.model_dump(include=set(Alarm.model_fields)) == posted.model_dump()
    assert NAME not in [one.name for one in client.run(run.id).alarms]
    assert readers.command("run", "show", run.id) == []
    assert readers.command("alarms", "--state", "active", "--name", NAME) == []
    assert until(lambda: len(lines := readers.watched_lines()) > 1 and lines, "a line of the watch", 60)[1:] == [
        f"alarm {NAME} has ended"
    ]
    assert until(lambda: readers.gauge() == 0, "the gauge", 60)
    readers.go_to(f"/alarms?name={NAME}")
    shown = page.get_by_role("list", name="Alarms", exact=True).locator("> li")
    expect(shown).to_have_count(1)
    expect(shown).to_contain_text(re.compile(rf"^{NAME}, warning since .* until .*ended"))
    readers.go_to(f"/runs/{run.id}")
    page.get_by_text("Ended alarms", exact=True).click()
    ended = page.get_by_role("list", name="Ended alarms").locator("> li").filter(has_text=NAME)
    expect(ended).to_contain_text(listed.reason)
    lasting = page.get_by_role("list", name="Alarms", exact=True).locator("> li").filter(has_text=NAME)
    expect(lasting).to_have_count(0)


@pytest.fixture
def readers(tmp_path: Path) -> Iterator[Readers]:
    with (
        running_webhook() as webhook,
        small_platform(tmp_path, CONTROLLER_WEBHOOK_URL=webhook.url) as platform,
        Client(platform.facts.url("api"), platform.token, patience_seconds=60) as client,
        running_browser() as browser,
    ):
        visitor = Visitor(browser.new_context().new_page())
        visitor.page.goto(console_link(client, platform.facts.url("api")))
        yield Readers(platform, client, visitor.page, webhook, tmp_path / "watched.txt")


@contextlib.contextmanager
def watching(readers: Readers, run: Run) -> Iterator[None]:
    """`leyden run watch`, as a job that writes into a file has it."""
    root = ["--url", readers.platform.facts.url("api"), "--token", readers.platform.token]
    command = [sys.executable, "-m", "leyden.libs.cli", *root, "run", "watch", run.id]
    with readers.watched.open("w") as output, subprocess.Popen(command, cwd=ROOT, stdout=output) as process:
        try:
            yield
        finally:
            process.kill()


@long_only
@pytest.mark.timeout(600)
def test_an_alarm_has_one_name_reason_and_remedy_for_every_reader_and_ends_for_all(
    readers: Readers, tmp_path: Path
) -> None:
    client = readers.client
    client.upload_dataset("bandit", [{"number": number} for number in range(16)])
    document = bandit_run(tmp_path / "log", "alarmed", 9, sampling={"groups_per_step": 1, "group_size": GROUP})
    run = client.create_run(document | {"agent": {}, "runner": {"type": "external", "timeout_seconds": 120}})
    with watching(readers, run):
        for number in range(GROUP - FAILED):
            play(client, run, fails=False, reward=number % 2)
        for _ in range(FAILED):
            play(client, run, fails=True)
        [alarm] = until(lambda: readers.posted("alarm"), "the event of the alarm", 60)
        assert_active(readers, run, alarm)
        for number in range(GOOD_GROUPS * GROUP):
            play(client, run, fails=False, reward=number % 2)
        until(lambda: list(client.alarms(run.id, name=NAME, state="ended")), "the alarm's end", 180)
        assert_ended(readers, run, alarm)
        client.cancel_run(run.id)
        until(lambda: client.run(run.id).phase == "cancelled", "the run's end", 120)
