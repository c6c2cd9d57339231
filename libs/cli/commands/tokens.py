"""`leyden token` and `leyden audit`: bearer tokens of the API, and the changes that they asked for."""

from __future__ import annotations

import itertools
import re
from datetime import datetime
from typing import Annotated

import typer

from leyden.libs.cli.context import context_of
from leyden.libs.cli.errors import CommandError, Exit
from leyden.libs.cli.view.output import AsJson, Count, facts, print_result, table
from leyden.libs.contracts.api.tokens import ApiScope, IssuedToken

app = typer.Typer(no_args_is_help=True, help="Tokens: bearer tokens of the REST API, one for each person and script.")

UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400}
DURATION = re.compile(r"(\d{1,9})(s|min|h|d)")


def seconds_of(text: str) -> int:
    """The seconds of a duration such as `30d`. Raises: CommandError: it is none"""
    found = DURATION.fullmatch(text)
    if found is None:
        raise CommandError(f"{text!r} is no duration: write a number and a unit, such as 30d, 12h or 30min", Exit.USAGE)
    return int(found[1]) * UNITS[found[2]]


@app.command("create")
def create(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of the person or the script, for the list of changes.")],
    scope: Annotated[
        list[ApiScope] | None, typer.Option("--scope", help="A right; repeat it for several.", show_default="read")
    ] = None,
    expires: Annotated[
        str | None, typer.Option("--expires", metavar="DURATION", help="Its life, such as 30d.", show_default="no end")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a token. Its secret is printed once."""
    life = None if expires is None else seconds_of(expires)
    with context_of(ctx).client() as leyden:
        _print_issued(leyden.create_token(name, scope or [ApiScope.READ], expires_seconds=life), as_json)


@app.command("list")
def list_tokens(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List tokens, newest first, without their secrets."""
    with context_of(ctx).client() as leyden:
        found = list(leyden.tokens())
    rows = [
        (
            *(one.id, one.name, " ".join(one.scopes), one.created_at),
            *map(_moment, (one.expires_at, one.revoked_at, one.changed_at)),
        )
        for one in found
    ]
    head = ("token", "name", "scopes", "created", "expires", "revoked", "last change")
    print_result(as_json, found, table(head, rows))


@app.command("rotate")
def rotate(
    ctx: typer.Context,
    token_id: Annotated[str, typer.Argument(metavar="TOKEN", help="Id of the token.")],
    grace: Annotated[
        str, typer.Option("--grace", metavar="DURATION", help="So long the old secret works beside the new one.")
    ] = "0s",
    as_json: AsJson = False,
) -> None:
    """Replace a token by a new one with its name, scopes and life; the old one ends at once, or after the grace."""
    with context_of(ctx).client() as leyden:
        _print_issued(leyden.rotate_token(token_id, grace_seconds=seconds_of(grace)), as_json)


@app.command("revoke")
def revoke(
    ctx: typer.Context,
    token_id: Annotated[str, typer.Argument(metavar="TOKEN", help="Id of the token.")],
    as_json: AsJson = False,
) -> None:
    """Revoke a token; it counts at the next request."""
    with context_of(ctx).client() as leyden:
        leyden.revoke_token(token_id)
    print_result(as_json, {"revoked": token_id}, f"revoked {token_id}")


def audit(
    ctx: typer.Context,
    token: Annotated[str | None, typer.Option("--token", help="Id or name of the token.")] = None,
    action: Annotated[str | None, typer.Option("--action", help="The operation, such as create_reward.")] = None,
    subject: Annotated[str | None, typer.Option("--subject", help="Id or name of the changed thing.")] = None,
    limit: Count = 50,
    as_json: AsJson = False,
) -> None:
    """List the changes that bearer tokens asked for, newest first: who did what, and when."""
    with context_of(ctx).client() as leyden:
        found = list(itertools.islice(leyden.audit(token=token, action=action, subject=subject), limit))
    rows = [(_second(one.created_at), one.token_name, one.action, one.subject, one.detail) for one in found]
    print_result(as_json, found, table(("time (UTC)", "token", "action", "subject", "detail"), rows))


def _moment(moment: datetime | None) -> str | None:
    return None if moment is None else f"{moment:%Y-%m-%d %H:%M}"


def _second(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S}"


def _print_issued(issued: IssuedToken, as_json: bool) -> None:
    expires = _moment(issued.expires_at) or "never"
    shown = facts(("token", issued.token), ("id", issued.id), ("name", issued.name), ("expires", expires))
    print_result(as_json, issued, shown)
