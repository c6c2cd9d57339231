"""`leyden reward …`"""

from __future__ import annotations

from typing import Annotated

import typer

from leyden.libs.cli.commands.runs import Changes, RunFile
from leyden.libs.cli.context import context_of
from leyden.libs.cli.document import reward_of
from leyden.libs.cli.view.output import AsJson, print_result, table

app = typer.Typer(no_args_is_help=True, help="Rewards: the components of a run's document.")


# Without a callback the only command would lose its name.
@app.callback()
def rewards() -> None: ...


@app.command("test")
def grade_stored(
    ctx: typer.Context,
    file: RunFile,
    rollout: Annotated[str, typer.Option(help="Id of a rollout whose attempt has ended.")],
    changes: Changes = None,
    as_json: AsJson = False,
) -> None:
    """Grade a stored rollout with the components of a document, and store nothing.

    Example: leyden reward test run.json --rollout run-4hq2.7.3
    """
    reward = reward_of(file, changes)
    with context_of(ctx).client() as leyden:
        graded = leyden.grade(rollout, reward)
    rows = [
        (one.component, one.state, one.value, one.weight, one.contribution, one.extracted, one.explanation)
        for one in graded.components
    ]
    head = ("component", "state", "value", "weight", "of the total", "answer", "explanation")
    total = f"none: {graded.reason}" if graded.total is None else f"{graded.total:g}"
    print_result(as_json, graded, table(head, rows), f"reward of attempt {graded.attempt}: {total}")
