"""`leyden alarms`"""

from __future__ import annotations

import itertools
from typing import Annotated

import typer

from leyden.libs.cli.context import context_of
from leyden.libs.cli.view.alarms import listed_lines
from leyden.libs.cli.view.output import AsJson, Count, as_text, console, print_json


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
    if as_json:
        print_json(found)
        return
    for line in listed_lines(found) or [as_text("No such alarm.")]:
        # One line each whatever the width is, for programs that read lines.
        console.print(line, soft_wrap=True)
