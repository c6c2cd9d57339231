"""The playground on a run's page: a question, and the streamed answer of the CPU engine, through API and gateway."""

from __future__ import annotations

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
