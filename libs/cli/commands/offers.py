"""`leyden pools` and `leyden recipes`: what a run's document may name."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from leyden.libs.cli.context import context_of
from leyden.libs.cli.errors import CommandError, Exit
from leyden.libs.cli.view.output import AsJson, print_result, table
from leyden.libs.contracts.api.platform import Engine


def pools(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List the pools that runs may name, their engines, the runs that have them and those that wait."""
    with context_of(ctx).client() as leyden:
        found = list(leyden.pools())
    rows = [
        (
            one.name,
            one.model_path,
            ", ".join(map(_engine, one.engines)),
            "embeddings of any" if one.embeddings else ", ".join(one.run_ids),
            ", ".join(one.waiting),
        )
        for one in found
    ]
    print_result(as_json, found, table(("pool", "model", "engines", "runs", "waiting"), rows))


def _engine(engine: Engine) -> str:
    version = "" if engine.policy_version is None else f" version {engine.policy_version}"
    cause = f" ({engine.detail})" if engine.state == "unreachable" and engine.detail else ""
    return f"{engine.url} {engine.state}{version}{cause}"


def recipes(
    ctx: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Show the settings of this one.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the recipes that a run's document may begin with (`recipe`), or show the settings of one."""
    with context_of(ctx).client() as leyden:
        found = list(leyden.recipes())
    if name is None:
        rows = [(one.name, one.purpose, f"{one.model}: {one.machine}") for one in found]
        print_result(as_json, found, table(("recipe", "purpose", "smallest machine"), rows))
        return
    named = next((one for one in found if one.name == name), None)
    if named is None:
        known = ", ".join(one.name for one in found)
        raise CommandError(f"there is no recipe {name!r}: write one of {known}", Exit.NOT_FOUND)
    print_result(as_json, named, json.dumps(named.document, indent=2))
