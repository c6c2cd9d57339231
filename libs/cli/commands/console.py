"""`leyden console`"""

from __future__ import annotations

from typing import Annotated

import typer

from leyden.libs.cli.context import context_of
from leyden.libs.cli.errors import CommandError
from leyden.libs.cli.view.console_link import console_link, link_line
from leyden.libs.cli.view.output import AsJson, print_result
from leyden.libs.client import Client

Page = Annotated[str | None, typer.Argument(metavar="RUN", help="The page of this run: an id, or a name.")]


def console(ctx: typer.Context, run: Page = None, as_json: AsJson = False) -> None:
    """Print a link that opens the web console in one browser, signed in to read.

    Your own token must be an administrator's.
    """
    context = context_of(ctx)
    if context.on_cluster:
        raise CommandError("forward a port to the API with kubectl, open that address, and paste a token there")
    url, token = context.address()
    with Client(url, token) as leyden:
        link = console_link(leyden, url.rstrip("/"), f"/runs/{leyden.find_run(run).id}" if run else "/")
    print_result(as_json, {"console": link}, link_line(link))
