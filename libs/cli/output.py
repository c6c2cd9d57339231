"""Printing: tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Annotated

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Count = Annotated[int, typer.Option("--limit", "-n", min=1, help="Number of rows.")]

console = Console(highlight=False)


def print_json(value: object) -> None:
    """One JSON document on standard output; `value` may contain API bodies at any depth."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False, default=_plain) + "\n")


def _plain(value: object) -> object:
    assert isinstance(value, BaseModel), type(value)
    return value.model_dump(mode="json", by_alias=True)


def print_table(head: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str = "Nothing yet.") -> None:
    """A table, or a sentence if it would have no rows."""
    table = Table(*head, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*map(format_value, row))
    console.print(table if table.row_count else empty)


def print_facts(facts: Iterable[tuple[str, object]]) -> None:
    """Names and values, one pair on a line."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in facts:
        table.add_row(f"[bold]{name}[/bold]", format_value(value))
    console.print(table)


def report_event(words: str) -> None:
    """One line on standard error about the platform."""
    sys.stderr.write(f"leyden: {words}\n")
    sys.stderr.flush()


def format_value(value: object) -> str:
    """A value in few characters."""
    match value:
        case None:
            return "–"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.3g}"
        case datetime():
            return age(value)
        case dict():
            return ", ".join(f"{name} {format_value(part)}" for name, part in value.items()) or "–"
        case _:
            return str(value)


def age(moment: datetime) -> str:
    """Time since a moment, in one unit."""
    seconds = (datetime.now(tz=UTC) - moment).total_seconds()
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"
