"""Every file, heading and module that a page names exists."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.support.shared import ROOT

PAGES = [
    path
    for pattern in ("*.md", "docs/**/*.md", "services/*/README.md", "libs/*/README.md", "examples/*/README.md")
    for path in sorted(ROOT.glob(pattern))
]
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s#]*)(?:#([^)\s]+))?\)")
CITED = re.compile(r"`((?:tests|docs|services|libs|examples|leyden)/[\w./*-]+)`")
MODULE = re.compile(r"python -m ((?:tests|docs|leyden)[\w.]*)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_name_in_a_page_leads_somewhere(page: Path) -> None:
    text = page.read_text()
    missing = [f"file {link}" for link, _ in LINK.findall(text) if link and not (page.parent / link).exists()]
    missing += [f"path {path}" for path in CITED.findall(text) if not list(ROOT.glob(path.rstrip("/")))]
    missing += [f"module {name}" for name in MODULE.findall(text) if importlib.util.find_spec(name.rstrip(".")) is None]
    for link, anchor in LINK.findall(text):
        target = page.parent / link if link else page
        if anchor and target.suffix == ".md" and target.exists() and anchor not in _anchors(target):
            missing.append(f"heading {link}#{anchor}")
    assert missing == []


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
