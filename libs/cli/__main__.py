"""`leyden`, or `python -m leyden.libs.cli`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

from leyden.libs.cli import datasets, policies, rollouts, runs, supervisor
from leyden.libs.cli.context import Context, make_context
from leyden.libs.cli.demonstration import demo
from leyden.libs.cli.doctor import doctor
from leyden.libs.cli.errors import explained


class _Group(TyperGroup):
    """Errors of every command end in a message and a status, not a traceback."""

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]  # typer vendors click's context
        with explained():
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train the model inside any agent with reinforcement learning.\n\nBegin with `leyden up`, then"
    " `leyden dataset upload`, `leyden run create` and `leyden run watch`. Exit status: 0 done, 1 error, 2 wrong usage,"
    " 3 not found, 4 unreachable, 5 refused, 6 not allowed.",
)


@app.callback()
def root(
    ctx: typer.Context,
    home: Annotated[Path | None, typer.Option(help="Folder of the platform's files [LEYDEN_HOME, ~/.leyden].")] = None,
    url: Annotated[str | None, typer.Option(help="Address of the API [LEYDEN_URL, that of the home].")] = None,
    token: Annotated[str | None, typer.Option(help="Bearer token [LEYDEN_TOKEN, that of the home].")] = None,
) -> None:
    """Lays the options over the settings."""
    ctx.obj = make_context(home, url, token)
    assert isinstance(ctx.obj, Context)


app.command()(supervisor.up)
app.command()(supervisor.down)
app.command()(supervisor.restart)
app.command()(supervisor.status)
app.command()(doctor)
app.command()(demo)
app.command()(supervisor.logs)
app.add_typer(datasets.app, name="dataset")
app.add_typer(runs.app, name="run")
app.add_typer(rollouts.app, name="rollout")
app.add_typer(policies.app, name="policy")


def main() -> None:
    """The console script."""
    app(prog_name="leyden")


if __name__ == "__main__":
    main()
