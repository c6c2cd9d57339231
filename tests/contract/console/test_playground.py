"""The playground on a run's page: a question, and the streamed answer of the CPU engine, through API and gateway."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from leyden.libs.capability import write_keys
from leyden.libs.contracts.states import EngineState
from leyden.libs.store.database import Database
from leyden.libs.store.engines import EngineStatus, write_engines
from leyden.services.api.app import create_app
from leyden.services.api.settings import Settings as ApiSettings
from leyden.services.engine.app import create_engine_app
from leyden.services.engine.settings import Settings as EngineSettings
from leyden.services.gateway.app import create_app as create_gateway
from leyden.services.gateway.settings import Settings as GatewaySettings
from tests.contract.console.conftest import HOSTILE, Insert
from tests.fakes.served import served
from tests.fakes.served_api import TOKEN
from tests.support import builders
from tests.support.browser import Visitor

TOOLS = '[{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]'


@pytest.fixture
def run(insert: Insert[str]) -> str:
    async def add(database: Database) -> str:
        return (await builders.add_run(database)).id

    return insert(add)


@pytest.fixture
def page(
    browser: Browser, run: str, postgres_dsn: str, redis_url: str, tiny_model: Path, tmp_path: Path
) -> Iterator[Visitor]:
    """The playground of a run whose engine serves version 4; its visitor may write."""
    keys = tmp_path / "keys.json"
    write_keys(keys, {"test": "s" * 40})
    shared: dict[str, Any] = {"database_url": postgres_dsn, "redis_url": redis_url, "capability_keys_file": keys}
    limits: dict[str, Any] = {"threads": 1, "max_total_tokens": 8192}
    with (
        served(create_engine_app(EngineSettings(model_path=tiny_model, weight_version=f"{run}:4", **limits))) as engine,
        served(create_gateway(GatewaySettings(model_path=tiny_model, engine_urls=(engine,), **shared))) as gateway,
        served(create_app(ApiSettings(admin_token=TOKEN, gateway_url=gateway, collector_url=gateway, **shared))) as api,
        browser.new_context() as context,
    ):
        visitor = Visitor(context.new_page())
        visitor.page.goto(f"{api}/#/runs/{run}/playground")
        visitor.page.get_by_role("textbox", name="Token").fill(TOKEN)
        visitor.page.keyboard.press("Enter")
        yield visitor


def ask(page: Page, words: str) -> None:
    page.get_by_label("Message", exact=True).fill(words)
    page.get_by_label("Tokens at most").fill("12")
    page.get_by_role("button", name="Ask").focus()
    page.keyboard.press("Enter")


def test_a_question_is_answered_with_the_version_and_the_tokens(page: Visitor) -> None:
    ask(page.page, HOSTILE)
    answer = page.page.get_by_role("region", name="Answer")
    expect(answer.get_by_role("status")).to_have_text(re.compile(r"Version 4, \d+ tokens\. It (reached|ended)"))
    answer.get_by_text("Tokens by probability").click()
    tokens = answer.get_by_role("group", name="Tokens").locator(".token")
    expect(tokens.first).to_have_attribute("title", re.compile(r"log-probability -\d+\.\d{4}, version 4"))
    assert page.violations() == []
    assert page.complaints == []


def test_a_run_that_no_engine_serves_says_so(page: Visitor, run: str, insert: Insert[None]) -> None:
    async def serve_another(database: Database) -> None:
        other = await builders.add_run(database)
        async with database.session() as session:
            await write_engines(session, [EngineStatus("http://127.0.0.1:9", EngineState.SERVING, other.id, 2)])

    insert(serve_another)
    ask(page.page, "Hi?")
    expect(page.page.get_by_role("alert")).to_contain_text(f"no engine serves run {run}, which is running")
    expect(page.page.get_by_role("button", name="Ask")).to_be_enabled()


def test_a_token_that_only_reads_is_told_what_it_needs(run: str, open_page: Callable[[str], Visitor]) -> None:
    visitor = open_page(f"/runs/{run}/playground")
    expect(visitor.page.get_by_text("they need a token with scope write")).to_be_visible()
    expect(visitor.page.get_by_role("button", name="Ask")).to_have_count(0)
    assert visitor.violations() == []


def test_two_versions_are_asked_side_by_side_and_the_wrong_one_never_answers(page: Visitor) -> None:
    visitor, browser_page = page, page.page
    browser_page.get_by_label("Tools").fill(TOOLS)
    browser_page.get_by_label("Seed").fill("7")
    browser_page.get_by_label("Version", exact=True).fill("4")
    browser_page.get_by_label("Beside version").fill("4")
    ask(browser_page, HOSTILE)
    answers = browser_page.get_by_role("region", name="Answer of version 4")
    expect(answers.get_by_role("status")).to_have_text([re.compile(r"Version 4, \d+ tokens")] * 2)
    # The same seed, question and version.
    first, second = (answers.nth(place).locator(".turn").all_inner_texts() for place in (0, 1))
    assert first == second
    assert visitor.violations() == []

    browser_page.get_by_label("Beside version").fill("3")
    browser_page.get_by_role("button", name="Ask").click()
    refused = browser_page.get_by_role("region", name="Answer of version 3")
    expect(refused.get_by_role("alert")).to_contain_text("The engine serves version 4 now, not 3")
    expect(refused.locator(".turn")).to_have_count(0)
    expect(answers.get_by_role("status")).to_have_text(re.compile(r"Version 4, \d+ tokens"))
    assert visitor.violations() == []
    # The browser tells of the answer 409.
    assert [line for line in visitor.complaints if "409" not in line] == []


def test_a_question_is_saved_as_a_task_and_tools_that_are_no_list_are_refused(page: Visitor) -> None:
    browser_page = page.page
    browser_page.get_by_label("System message").fill("Be brief.")
    browser_page.get_by_label("Message", exact=True).fill(HOSTILE)
    browser_page.get_by_label("Tools").fill(TOOLS)
    with browser_page.expect_download() as download:
        browser_page.get_by_role("button", name="Save for a dataset").click()
    assert download.value.suggested_filename == "task.jsonl"
    row = json.loads(download.value.path().read_text())
    assert row["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": HOSTILE}]
    assert row["tools"] == json.loads(TOOLS)
    for words, problem in (("{}", "Tools: write a list"), ("[", "Tools: this is no JSON")):
        browser_page.get_by_label("Tools").fill(words)
        browser_page.get_by_role("button", name="Ask").click()
        expect(browser_page.get_by_role("alert")).to_contain_text(problem)
    assert page.violations() == []
