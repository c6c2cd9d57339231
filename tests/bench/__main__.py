"""`make bench`: runs every benchmark, prints the tables, and writes bench.json.

A module `bench_<part>` exposes `rows() -> list[dict]` with name, value, unit, baseline_name, baseline and ratio.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import platform
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

import tests.bench


def main() -> int:
    """Exit status 0; a benchmark that cannot prove its work raises."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help="parts to run, such as `engine`; default all")
    parser.add_argument("--output", type=Path, default=Path("bench.json"))
    arguments = parser.parse_args()
    names = sorted(m.name for m in pkgutil.iter_modules(tests.bench.__path__) if m.name.startswith("bench_"))
    known = {name.removeprefix("bench_"): name for name in names}
    unknown = set(arguments.only) - known.keys()
    if unknown:
        print(f"no benchmark called {', '.join(sorted(unknown))}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    console, rows = Console(), []
    console.print(
        f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}, Python {platform.python_version()}"
    )
    for part, module in known.items():
        if not arguments.only or part in arguments.only:
            measured = importlib.import_module(f"tests.bench.{module}").rows()
            rows += measured
            console.print(table(part, measured))
    arguments.output.write_text(json.dumps(rows, indent=1) + "\n")
    console.print(f"written to {arguments.output}")
    return 0


def table(part: str, rows: list[dict[str, object]]) -> Table:
    """One part's rows, for people."""
    result = Table("work", "value", "unit", "beside", "its value", "ratio", title=part)
    for row in rows:
        result.add_row(*(_cell(row[key]) for key in ("name", "value", "unit", "baseline_name", "baseline", "ratio")))
    return result


def _cell(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
