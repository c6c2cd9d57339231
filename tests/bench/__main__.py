"""`make bench`: runs every benchmark, prints the tables beside the recorded figures, and writes bench.json.

A module `bench_<part>` exposes `rows(repeats: int) -> list[Row]`. One with `ASKED_FOR = True` takes many minutes
and runs only where it is named. A benchmark that cannot prove its work raises; a goal that is missed is shown, and is
no error.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import platform
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.table import Table

import tests.bench
from tests.bench.rows import Row
from tests.speed import watched

RECORDED = Path(__file__).parents[2] / "docs" / "benchmarks" / "bench.json"
SPEED = "CPU time of adding up a million numbers meanwhile"


def main() -> int:
    """Exit status 0, or 2 for a part that does not exist."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("only", nargs="*", help="parts to run, such as `engine`; default all that take no many minutes")
    parser.add_argument("--repeats", type=int, default=5, help="how often each value is measured")
    parser.add_argument("--output", type=Path, default=Path("bench.json"), help="parts that do not run stay in it")
    arguments = parser.parse_args()
    names = sorted(m.name for m in pkgutil.iter_modules(tests.bench.__path__) if m.name.startswith("bench_"))
    known = {name.removeprefix("bench_"): name for name in names}
    unknown = set(arguments.only) - known.keys()
    if unknown:
        print(f"no benchmark called {', '.join(sorted(unknown))}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    _end_on_sigterm()
    # Where nobody looks the table is as wide as its words.
    console = Console() if sys.stdout.isatty() else Console(width=200)
    console.print(", ".join(machine().values()))
    for part in arguments.only or known:
        module = importlib.import_module(f"tests.bench.{known[part]}")
        if arguments.only or not getattr(module, "ASKED_FOR", False):
            began = time.monotonic()
            with watched() as speeds:
                measured = module.rows(arguments.repeats)
            recorded = _read(RECORDED)
            console.print(table(part, measured, {row["name"]: row for row in recorded["rows"]}))
            console.print(f"{part}: {time.monotonic() - began:.0f} s")
            before = recorded["speeds"].get(part)
            console.print(f"{SPEED}: {milliseconds(speeds)}{f'; recorded {milliseconds(before)}' if before else ''}\n")
            _write(arguments.output, part, measured, speeds)
    console.print(f"written to {arguments.output}")
    return 0


def _end_on_sigterm() -> None:
    """SIGTERM ends a part as Ctrl-C does: what it started is stopped. Ctrl-C works in the background too, where a
    shell has its signal ignored."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        # make tells its children what a whole group was told already: the second time would cut the stopping short.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, interrupt)


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    return {
        "cores": f"{os.cpu_count()} cores",
        "processor": _processor(),
        "system": f"{platform.system()} {platform.release()}",
        "python": f"Python {platform.python_version()}",
    }


def table(part: str, rows: list[Row], recorded: Mapping[str, dict[str, Any]]) -> Table:
    """One part's rows, for people."""
    result = Table("work", "median (spread)", "unit", "beside", "its median", "ratio", "goal", "growth", title=part)
    result.add_column("recorded", style="dim")
    for row in rows:
        before = recorded.get(row.name)
        result.add_row(
            row.name,
            f"{figure(row.median)} ({figure(min(row.repeats))} to {figure(max(row.repeats))})",
            row.unit,
            row.baseline_name,
            figure(row.median / row.ratio),
            f"{row.ratio:.3g}x",
            f"{row.goal} {'holds' if row.verdict else 'MISSED'}" if row.goal else "",
            f"{row.growth.factor:.2f}x at {row.growth.sizes[-1] / row.growth.sizes[0]:.0f}x" if row.growth else "",
            figure(before["median"]) if before else "",
        )
    return result


def figure(value: float) -> str:
    """Three or more digits, as people read them."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def milliseconds(speeds: Sequence[float]) -> str:
    """The median of a machine's speeds, and their spread."""
    return f"{figure(statistics.median(speeds))} ms ({figure(min(speeds))} to {figure(max(speeds))})"


def _read(file: Path) -> dict[str, Any]:
    # A file of before speeds were told has none.
    return {"rows": [], "speeds": {}} | (json.loads(file.read_text()) if file.exists() else {})


def _write(file: Path, part: str, rows: list[Row], speeds: Sequence[float]) -> None:
    # Each part is written as it ends: what was measured is not lost with a later part.
    before = _read(file)
    kept = [row for row in before["rows"] if row["part"] != part]
    three = [min(speeds), statistics.median(speeds), max(speeds)]
    document = {
        "machine": machine(),
        "speeds": before["speeds"] | {part: three},
        "rows": kept + [row.document() for row in rows],
    }
    file.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    sys.exit(main())
