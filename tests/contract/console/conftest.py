"""Pages of the console in a real browser, against the API with rows that tests insert."""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TypeVar

import pytest
from playwright.sync_api import Browser, Route

from leyden.libs.cli.view.console_link import console_link
from leyden.libs.client import Client
from leyden.libs.contracts.api.tokens import ApiScope
from leyden.libs.store.database import Database
from tests.fakes.served_api import TOKEN
from tests.support.browser import Visitor, running_browser

HOSTILE = "<img src=x onerror=window.hacked=1><script>window.hacked=1</script>\x1b[2J\u202eevil"
SHOWN = "<img src=x onerror=window.hacked=1><script>window.hacked=1</script>\\x1b[2J\\u202eevil"
"""The hostile text as the console writes it out."""

Made = TypeVar("Made")
Insert = Callable[[Callable[[Database], Awaitable[Made]]], Made]


def loses(route: Route) -> None:
    """A connection that breaks when the API has done what was asked."""
    route.fetch()
    route.abort()


class _Shared:
    """A browser that consecutive tests share, since starting one takes a second.

    Playwright holds this thread's event loop while it runs: the browser is closed before a test, or the end of a longer
    fixture, that needs the loop.
    """

    def __init__(self) -> None:
        self.browser: Browser | None = None
        self.is_needed = False
        self._stop = ExitStack()

    def start(self) -> Browser:
        if self.browser is None:
            self.browser = self._stop.enter_context(running_browser())
        return self.browser

    def close(self) -> None:
        self.browser = None
        self._stop.close()


_shared = _Shared()
# An interrupted session ends no fixture.
atexit.register(_shared.close)


@pytest.fixture
def browser() -> Iterator[Browser]:
    """A browser without contexts."""
    started = _shared.start()
    yield started
    for context in started.contexts:
        context.close()
    if not _shared.is_needed:
        _shared.close()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Tells whether the next test uses the browser, too."""
    is_near = nextitem is not None and nextitem.path.parent == item.path.parent
    _shared.is_needed = is_near and "browser" in getattr(nextitem, "fixturenames", [])


@pytest.fixture
def insert(postgres_dsn: str) -> Insert[Made]:
    """Runs a coroutine function on the database; Playwright has this thread's event loop, so in another thread."""

    async def on_database(work: Callable[[Database], Awaitable[Made]]) -> Made:
        database = Database(postgres_dsn)
        try:
            return await work(database)
        finally:
            await database.close()

    def run(work: Callable[[Database], Awaitable[Made]]) -> Made:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(lambda: asyncio.run(on_database(work))).result()

    return run


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[[], Visitor]]:
    """Opens a browser of its own; afterwards no page may have complained."""
    visitors = list[Visitor]()

    def visit_() -> Visitor:
        visitors.append(Visitor(browser.new_context().new_page()))
        return visitors[-1]

    yield visit_
    complaints = [line for visitor in visitors for line in visitor.complaints]
    hacked = [visitor.page.evaluate("window.hacked") for visitor in visitors]
    for visitor in visitors:
        visitor.page.context.close()
    assert (complaints, set(hacked) - {None}) == ([], set())


@pytest.fixture
def open_page(api_url: str, visit: Callable[[], Visitor]) -> Callable[[str], Visitor]:
    """Opens a page of the console, signed in by a link, which may read; it is closed before the API ends."""

    def open_(page: str) -> Visitor:
        visitor = visit()
        with Client(api_url, TOKEN) as client:
            visitor.page.goto(console_link(client, api_url, page))
        return visitor

    return open_


@pytest.fixture
def open_writer(api_url: str, visit: Callable[[], Visitor]) -> Callable[[str], Visitor]:
    """Opens a page of the console as `ann`, who may write."""

    def open_(page: str) -> Visitor:
        visitor = visit()
        with Client(api_url, TOKEN) as client:
            secret = client.create_token("ann", [ApiScope.WRITE]).token
        visitor.page.goto(f"{api_url}/#{page}")
        visitor.page.get_by_label("Token", exact=True).fill(secret)
        visitor.page.keyboard.press("Enter")
        return visitor

    return open_
