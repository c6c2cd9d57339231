"""A headless Chromium with a page's errors, and axe: `make setup` puts both below .cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Error, Page, expect, sync_playwright

from tests.support.shared import ROOT

CHROMIUM = ROOT / ".cache" / "chromium" / "usr"
PROGRAM = CHROMIUM / "lib" / "chromium" / "chromium-headless-shell"
AXE = ROOT / ".cache" / "console" / "node_modules" / "axe-core" / "axe.min.js"

NARROW = 390
VIOLATIONS = "axe.run({resultTypes: ['violations']}).then(({ violations }) => violations)"
"""Every rule, with nodes where it is broken. Why: nodes that are in order, too, took 0.76 s instead of 0.17 s."""
MILLISECONDS = 30_000
"""A page's longest wait, on a machine that is busy with other tests."""


def libraries() -> str:
    """LD_LIBRARY_PATH of Debian's Chromium, whose libraries lie beside it."""
    return ":".join(map(str, sorted({path.parent for path in CHROMIUM.rglob("*.so*")})))


@contextmanager
def running_browser() -> Iterator[Browser]:
    """Debian's Chromium with the libraries beside it."""
    assert PROGRAM.exists() and AXE.exists(), f"{PROGRAM} or {AXE} is missing: run `make setup`"
    environment: dict[str, str | float | bool] = {**os.environ, "LD_LIBRARY_PATH": libraries()}
    expect.set_options(timeout=MILLISECONDS)
    with sync_playwright() as playwright:
        # As root, Chromium has no sandbox; it opens pages of this machine alone.
        browser = playwright.chromium.launch(executable_path=PROGRAM, env=environment, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Visitor:
    """One browser of one person, with everything that its page complained about."""

    page: Page
    complaints: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(MILLISECONDS)
        self.page.on("console", self._on_message)
        self.page.on("pageerror", self._on_error)

    def _on_message(self, message: ConsoleMessage) -> None:
        # The first question of a page that is not signed in.
        if message.type == "error" and "401" not in message.text:
            self.complaints.append(message.text)

    def _on_error(self, error: Error) -> None:
        self.complaints.append(error.stack or str(error))

    def violations(self) -> list[str]:
        """The findings of axe, wide in a light theme and 390 pixels wide in a dark one."""
        wide = self.page.viewport_size
        assert wide is not None
        found = self._axe("light")
        self.page.emulate_media(color_scheme="dark")
        self.page.set_viewport_size({"width": NARROW, "height": 800})
        found += self._axe("dark")
        if (needed := self.page.evaluate("document.documentElement.scrollWidth")) > NARROW:
            found.append(f"dark: the page needs {needed} pixels")
        self.page.set_viewport_size(wide)
        self.page.emulate_media(color_scheme="light")
        return found

    def _axe(self, words: str) -> list[str]:
        if not self.page.evaluate("'axe' in window"):
            self.page.evaluate(AXE.read_text())
        found: list[dict[str, Any]] = self.page.evaluate(VIOLATIONS)
        return [f"{words}: {one['id']}: {one['nodes'][0]['html'][:200]}" for one in found]
