"""`leyden`, or `python -m leyden.libs.cli`."""

from __future__ import annotations

from typing import Annotated

import typer
from typer.core import TyperGroup

from leyden.libs.cli.commands import agents, datasets, local, prompts, rewards, rollouts, runs, tokens
from leyden.libs.cli.commands.alarms import alarms
from leyden.libs.cli.commands.check import check
from leyden.libs.cli.commands.console import console
from leyden.libs.cli.commands.demo import demo
from leyden.libs.cli.commands.doctor import doctor
from leyden.libs.cli.commands.logs import logs
from leyden.libs.cli.commands.offers import pools, recipes
from leyden.libs.cli.commands.track import track
from leyden.libs.cli.commands.train import train
from leyden.libs.cli.context import Context, Home, make_context
from leyden.libs.cli.errors import CommandError, Exit, exit_on_error


class _Group(TyperGroup):
    """Ends every command that fails with a message and a status instead of a traceback."""

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]  # typer vendors click's context
        with exit_on_error():
            return super().invoke(ctx)


ON_THIS_MACHINE = frozenset({"up", "down", "demo"})

app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train the model inside any agent with reinforcement learning.\n\nBegin with `leyden up`, then"
    " `leyden train`; or `leyden dataset upload`, `leyden run create` and `leyden run watch`."
    " Exit status: 0 done, 1 error, 2 wrong usage,"
    " 3 not found, 4 unreachable, 5 refused, 6 not allowed.",
)


@app.callback()
def root(
    ctx: typer.Context,
    home: Home = None,
    url: Annotated[
        str | None, typer.Option(help="Address of the API.", show_default="LEYDEN_URL, or the home's platform")
    ] = None,
    token: Annotated[
        str | None, typer.Option(help="Bearer token.", show_default="LEYDEN_TOKEN, or the home's platform")
    ] = None,
    context: Annotated[
        str | None, typer.Option(help="kubectl context of a cluster.", show_default="LEYDEN_KUBE_CONTEXT")
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option(help="Namespace of the release.", show_default="LEYDEN_KUBE_NAMESPACE, or the context's"),
    ] = None,
    release: Annotated[
        str | None, typer.Option(help="Name of the release.", show_default="LEYDEN_RELEASE, or the only one")
    ] = None,
) -> None:
    """Lays the options over the settings."""
    ctx.obj = made = make_context(
        home=home, url=url, token=token, kube_context=context, kube_namespace=namespace, release=release
    )
    assert isinstance(made, Context)
    if made.on_cluster and ctx.invoked_subcommand in ON_THIS_MACHINE:
        raise CommandError(
            f"`leyden {ctx.invoked_subcommand}` is for this machine: use it without --context, --namespace, --release"
            " and LEYDEN_KUBE_CONTEXT; helm and kubectl start and restart a release",
            Exit.USAGE,
        )


app.command()(local.up)
app.command()(local.down)
app.command()(local.status)
app.command()(console)
app.command()(doctor)
app.command()(demo)
app.command()(train)
app.command()(pools)
app.command()(recipes)
app.command()(alarms)
app.command()(logs)
app.command()(tokens.audit)
app.add_typer(tokens.app, name="token")
app.add_typer(agents.app, name="agent")
app.add_typer(datasets.app, name="dataset")
runs.app.command("check")(check)
runs.app.command("track")(track)
app.add_typer(runs.app, name="run")
app.add_typer(rollouts.app, name="rollout")
app.add_typer(rewards.app, name="reward")
app.add_typer(prompts.app, name="prompts")
app.add_typer(runs.policies, name="policy")


def main() -> None:
    """The console script."""
    app(prog_name="leyden")


if __name__ == "__main__":
    main()
