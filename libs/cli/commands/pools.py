"""`leyden pools`"""

from __future__ import annotations

import typer

from leyden.libs.cli.context import context_of
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
            ", ".join(one.run_ids),
            ", ".join(one.waiting),
        )
        for one in found
    ]
    print_result(as_json, found, table(("pool", "model", "engines", "runs", "waiting"), rows))


def _engine(engine: Engine) -> str:
    version = "" if engine.policy_version is None else f" version {engine.policy_version}"
    return f"{engine.url} {engine.state}{version}"
