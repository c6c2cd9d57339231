"""`make bench`: measures the budgets of docs/benchmarks.md, prints one table, and writes bench.json.

A module `bench_<part>` has a function `rows(repeats: int) -> list[Row]`. A benchmark checks its own work and raises an
error if anything is missing; a missed budget is no error. `make bench-page` writes bench.json into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import platform
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

import tests.bench
from tests.bench.rows import Row

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- figures: written by `make bench-page` -->\n", "<!-- end of the figures -->\n"


def main() -> int:
    """Exit status 0, or 2 for an unknown part."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("only", nargs="*", help="parts to run, such as `engine` [default: all]")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each value")
    parser.add_argument("--output", type=Path, default=Path("bench.json"), help="parts that do not run stay in it")
    parser.add_argument("--page", action="store_true", help="measure nothing; write the page from --output")
    arguments = parser.parse_args()
    if arguments.page:
        write_page(json.loads(arguments.output.read_text()))
        return 0
    names = (module.name for module in pkgutil.iter_modules(tests.bench.__path__))
    parts = sorted(name.removeprefix("bench_") for name in names if name.startswith("bench_"))
    if unknown := set(arguments.only) - set(parts):
        print(f"no benchmark called {', '.join(sorted(unknown))}; there are {', '.join(parts)}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _interrupt)
    # A log gets a table as wide as its words.
    console = Console() if sys.stdout.isatty() else Console(width=160)
    for part in arguments.only or parts:
        began = time.monotonic()
        measured = importlib.import_module(f"tests.bench.bench_{part}").rows(arguments.repeats)
        console.print(table(f"{part}, {time.monotonic() - began:.0f} s", measured))
        _write(arguments.output, part, measured)
    console.print(f"written to {arguments.output}")
    return 0


def _interrupt(*_: object) -> NoReturn:
    """Ends a part as Ctrl-C does, so that it stops the processes that it started."""
    raise KeyboardInterrupt


def table(title: str, rows: Sequence[Row]) -> Table:
    """The rows for people."""
    result = Table("work", "median", "range", "unit", "budget", "", title=title)
    for row in rows:
        low, high = figure(min(row.values)), figure(max(row.values))
        verdict = ("" if not row.budget else "within") if row.is_within else "[red]MISSED[/red]"
        result.add_row(row.work, figure(row.median), f"{low} to {high}", row.unit, row.budget, verdict)
    return result


def write_page(document: dict[str, Any]) -> None:
    """Replaces the table in docs/benchmarks.md."""
    lines = [
        f"Measured on {document['machine']}.",
        "",
        "| part | work | median | range | unit | budget |",
        "|---|---|--:|---|---|---|",
    ]
    for row in document["rows"]:
        budget = row["budget"] if row["is_within"] else f"{row['budget']}: **missed**"
        low, high = figure(min(row["values"])), figure(max(row["values"]))
        cells = (row["part"], row["work"], f"**{figure(row['median'])}**", f"{low} to {high}", row["unit"], budget)
        lines.append(f"| {' | '.join(cells)} |")
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + rest.split(END)[1])


def figure(value: float) -> str:
    """Three or more digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def machine() -> str:
    """The machine in words."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.machine()
    return f"{os.cpu_count()} cores, {processor}, {platform.system()}, Python {platform.python_version()}"


def _write(file: Path, part: str, rows: Sequence[Row]) -> None:
    before = json.loads(file.read_text())["rows"] if file.exists() else []
    others = [row for row in before if row["part"] != part]
    document = {"machine": machine(), "rows": [*others, *(row.document() for row in rows)]}
    file.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
