"""Printing: tables for people, JSON for programs.

Names, reasons, tasks and answers are printed as they are: Rich reads no markup in them, a terminal no escape sequence,
and no text of an agent makes a line of its own (`safe_text`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Annotated

import typer
from pydantic import BaseModel
from rich.console import Console, Group, JustifyMethod
from rich.table import Table
from rich.text import Text

from leyden.libs.cli.view.safe_text import is_unsafe, safe_line, safe_lines
from leyden.libs.contracts.api.runs import (
    Evaluation,
    EvaluationResults,
    PassAt,
    Progress,
    Run,
    RunPolicy,
    Statistic,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Count = Annotated[int, typer.Option("--limit", "-n", min=1, help="Number of rows.")]
Part = Table | Text | Group | str
"""Anything that people read."""

console = Console(highlight=False, markup=False, emoji=False)
error_console = Console(highlight=False, markup=False, emoji=False, stderr=True)

TEXT_COLUMNS = 30
"""Least width of a column of texts; on a narrow terminal the table becomes wider than the terminal."""


def print_json(value: object) -> None:
    """One JSON document on standard output; `value` may contain API bodies at any depth."""
    sys.stdout.write(_json(value, indent=2) + "\n")


def print_json_line(value: object) -> None:
    """One JSON document on one line of standard output, flushed: a program that reads the pipe gets it at once."""
    sys.stdout.write(_json(value) + "\n")
    sys.stdout.flush()


def _json(value: object, indent: int | None = None) -> str:
    """The document; characters that act on a terminal are escaped, as JSON allows in its texts."""
    document = json.dumps(value, indent=indent, ensure_ascii=False, default=_plain)
    return "".join(json.dumps(one)[1:-1] if one != "\n" and is_unsafe(one) else one for one in document)


def _plain(value: object) -> object:
    assert isinstance(value, BaseModel), type(value)
    return value.model_dump(mode="json", by_alias=True)


def as_text(value: object, style: str = "") -> Text:
    """A value on one line, with characters such as an escape or a line's end written out."""
    return Text(safe_line(format_value(value)), style)


def as_block(value: object, style: str = "", *, first: str = "│ ", then: str = "│ ") -> Text:
    """A text of several lines, each behind a mark, so that none of them looks like a line of ours."""
    lines = safe_lines(format_value(value))
    return Text("\n".join([first + lines[0], *(then + line for line in lines[1:])]), style)


def heading(words: str) -> Text:
    """A line in bold after an empty one."""
    return Text("\n").append_text(as_text(words, "bold"))


def mean_and_interval(statistic: Statistic, form: str) -> str:
    """`0.500 [0.250, 0.750]`, the mean alone without an interval. Args: form: of a number, such as `.3f`"""
    if statistic.low is None or statistic.high is None:
        return f"{statistic.mean:{form}}"
    return f"{statistic.mean:{form}} [{statistic.low:{form}}, {statistic.high:{form}}]"


def pass_words(one: PassAt, evaluation: Evaluation) -> str:
    """The value of a pass@k: `0.750`, and `0.750 (70 tasks)` where others have too few rollouts with a reward."""
    every = evaluation.tasks * max(1, len(evaluation.results.agents))
    return f"{one.mean:.3f}{f' ({one.tasks} tasks)' if one.tasks < every else ''}"


def counted_rollouts(results: EvaluationResults) -> str:
    """How many of an evaluation's rollouts its reward counts: `50 rollouts`, `45 of 50 rollouts` where the others have
    none, and `12 of 30 rollouts so far` while it goes on."""
    every, counted = sum(results.rollouts.values()), results.reward.count if results.reward else 0
    share = str(every) if counted == every and results.complete else f"{counted} of {every}"
    return f"{share} rollouts{'' if results.complete else ' so far'}"


def steps_words(made: Progress | RunPolicy, between: str = "/") -> str:
    """The steps that a run or policy has made and those of its document, where that has them."""
    return f"{made.step}{between}{'?' if made.steps is None else made.steps}"


def next_step_words(progress: Progress) -> str | None:
    """How far the groups of the next step have come; None where none is due."""
    if (found := progress.next_step) is None:
        return None
    counts = f"{found.ended} ended, {found.graded} graded, {found.credited} credited"
    return f"step {found.number}: of {found.rollouts} rollouts {counts}"


def left_words(progress: Progress) -> str | None:
    """The time left as far as it can be told."""
    return None if progress.seconds_left is None else f"about {_in_one_unit(progress.seconds_left)}"


def best_words(made: Run | RunPolicy, *, with_reason: bool = False) -> str | None:
    """The best version; `unknown` where it cannot be told, None before any reward."""
    if made.best_version is None and made.best_version_reason is None:
        return None
    words = "unknown" if made.best_version is None else str(made.best_version)
    return f"{words}: {made.best_version_reason}" if with_reason and made.best_version_reason else words


def judge_words(run: Run) -> str | None:
    """Tokens and cost of a run's judges, each with its bound; None before a judge has answered."""
    if run.judge_tokens is None:
        return None
    bounds = run.config.reward if run.config else None
    words = f"{run.judge_tokens:,} tokens"
    if bounds and bounds.judge_tokens is not None:
        words += f" of {bounds.judge_tokens:,}"
    if run.judge_cost is None:
        return f"{words}, cost unknown: no price in GRADER_PROVIDERS"
    words += f", cost {run.judge_cost:.4g}"
    if bounds and bounds.judge_cost is not None:
        words += f" of {bounds.judge_cost:.4g}"
    unpriced = run.judge_unpriced_tokens
    return words + (f", without {unpriced:,} tokens that have no price" if unpriced else "")


def table(head: Sequence[str], rows: Iterable[Sequence[object]], *, justify: JustifyMethod = "left") -> Table:
    """A table that loses no character: a column of single words, such as ids, is never broken, and texts wrap."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    cells = [[value if isinstance(value, Text) else as_text(value) for value in row] for row in rows]
    for number, name in enumerate(head):
        column = [row[number].plain for row in cells]
        longest = max(map(len, column), default=0)
        is_text = any(len(cell.split()) > 1 for cell in column)
        min_width = min(longest, TEXT_COLUMNS) if is_text else longest
        made.add_column(name, justify=justify, overflow="fold", no_wrap=not is_text, min_width=min_width)
    for row in cells:
        made.add_row(*row)
    needed = sum(2 + (column.min_width or 0) for column in made.columns)
    made.width = needed if needed > console.width else None
    return made


def facts(*pairs: tuple[str, object]) -> Table:
    """Names and values, one pair on a line."""
    made = table(("name", "value"), [(as_text(name, "bold"), value) for name, value in pairs])
    made.show_header = False
    return made


def print_result(as_json: bool, value: object, *parts: Part) -> None:
    """The value as JSON, or the parts that people read."""
    if as_json:
        print_json(value)
    else:
        print_parts(*parts)


def print_parts(*parts: Part) -> None:
    """Tables and sentences, one below the other; "Nothing yet." stands for a table without rows."""
    for part in parts:
        console.print("Nothing yet." if isinstance(part, Table) and not part.row_count else part, crop=False)


def report_event(words: str) -> None:
    """One line on standard error about the platform."""
    sys.stderr.write(f"leyden: {safe_line(words)}\n")
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
    return f"{_in_one_unit((datetime.now(tz=UTC) - moment).total_seconds())} ago"


def _in_one_unit(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
