"""Statements read columns that the table of runs computes from a document, and no paths into it."""

from __future__ import annotations

import re
from pathlib import Path

LIBS = Path(__file__).parents[3] / "libs"


def test_no_statement_has_a_path_into_the_runs_document() -> None:
    modules = [path for path in LIBS.rglob("*.py") if path.parent.name not in {"tables", "versions"}]
    assert [path for path in modules if re.search(r"\bconfig *(#>|->)", path.read_text())] == []
