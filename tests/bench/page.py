"""`make bench-page`: puts the figures of a bench.json into docs/benchmarks.md, and draws how costs grow.

Without a file it writes the page again from the figures recorded last.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.bench.__main__ import RECORDED, SPEED, figure, milliseconds

PAGE = RECORDED.parents[1] / "benchmarks.md"
PLOT = RECORDED.parent / "growth.svg"
BEGIN, END = "<!-- figures: written by `make bench-page` -->\n", "<!-- end of the figures -->\n"
COLUMNS = 3

Json = dict[str, Any]


def main() -> int:
    """Exit status 0."""
    if sys.argv[1:]:
        shutil.copy(sys.argv[1], RECORDED)
    document = json.loads(RECORDED.read_text())
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    PAGE.write_text(before + BEGIN + figures(document) + END + rest.split(END)[1])
    draw([row for row in document["rows"] if row["growth"]], PLOT)
    return 0


def figures(document: Json) -> str:
    """The tables of the page: one line per row of the document."""
    lines = [
        f"Measured on {', '.join(document['machine'].values())}.",
        "",
        "| work | median (spread) | unit | beside | its median | ratio | goal | grows |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        cells = (
            row["name"],
            f"**{figure(row['median'])}** ({figure(row['least'])} to {figure(row['most'])})",
            row["unit"],
            row["baseline_name"],
            figure(row["baseline_median"]),
            f"{row['ratio']:.3g}x",
            _goal(row),
            _growth(row["growth"]),
        )
        lines.append("| " + " | ".join(cells) + " |")
    speeds = (f"{part} {milliseconds(three)}" for part, three in document["speeds"].items())
    return "\n".join([*lines, "", *_notes(document["rows"]), f"- {SPEED}: {', '.join(speeds)}."]) + "\n"


def draw(rows: list[Json], file: Path) -> None:
    """Cost per unit against the amount of work, a small plot per row; a flat line is what one hopes for."""
    # The same figures make the same file.
    mpl.rcParams.update({"svg.hashsalt": "leyden", "svg.fonttype": "none", "font.size": 8})
    height = -(-len(rows) // COLUMNS)
    drawing = Figure(figsize=(4 * COLUMNS, 2.6 * height), layout="constrained")
    for axes, row in zip(
        drawing.subplots(height, COLUMNS, squeeze=False).flat, [*rows, *[None] * COLUMNS], strict=False
    ):
        if row is None:
            axes.set_axis_off()
        else:
            _draw_row(axes, row)
    drawing.savefig(file, metadata={"Date": None})


def _draw_row(axes: Axes, row: Json) -> None:
    growth = row["growth"]
    axes.plot(growth["sizes"], growth["costs"], marker="o")
    axes.set_xscale("log", base=2)
    axes.set_xticks(growth["sizes"], [f"{size:,g}" for size in growth["sizes"]])
    axes.set_ylim(bottom=0)
    axes.set_title(row["name"], fontsize=8)
    axes.set_xlabel(growth["of"])
    axes.set_ylabel(growth["unit"])


def _goal(row: Json) -> str:
    return f"{row['goal']}: {'holds' if row['holds'] else '**missed**'}" if row["goal"] else ""


def _growth(growth: Json | None) -> str:
    if growth is None:
        return ""
    costs = ", ".join(figure(cost) for cost in growth["costs"])
    sizes = ", ".join(f"{size:,g}" for size in growth["sizes"])
    return f"{costs} {growth['unit']} at {sizes} {growth['of']}"


def _notes(rows: list[Json]) -> list[str]:
    return [f"- {row['name']}: {row['note']}" for row in rows if row["note"]]


if __name__ == "__main__":
    sys.exit(main())
