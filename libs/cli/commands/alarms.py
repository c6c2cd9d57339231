"""`leyden alarms`"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated

import typer

from leyden.libs.cli.context import context_of
from leyden.libs.cli.view.alarms import listed_lines
from leyden.libs.cli.view.output import AsJson, Count, Part, print_result


def alarms(
    ctx: typer.Context,
    run: Annotated[
        str | None, typer.Option(help="Id or name: only alarms of such runs.", show_default="all runs")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Only alarms of this rule, such as tool_fails.")] = None,
    state: Annotated[
        str | None, typer.Option(help="active, lasted (until its run's end) or ended.", show_default="all")
    ] = None,
    limit: Count = 20,
    as_json: AsJson = False,
) -> None:
    """List the alarms of all runs: active ones first, then those that began last, ended ones too."""
    with context_of(ctx).client() as leyden:
        found = list(itertools.islice(leyden.alarms(run, name=name, state=state), limit))
    lines: Sequence[Part] = listed_lines(found) or ["No such alarm."]
    print_result(as_json, found, *lines)
