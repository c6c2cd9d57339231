"""`leyden dataset …`"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Annotated

import typer

from leyden.libs.cli.context import context_of
from leyden.libs.cli.view.output import AsJson, Count, facts, print_result, table

app = typer.Typer(no_args_is_help=True, help="Datasets: the tasks of agents.")

Dataset = Annotated[str, typer.Argument(help="Id or name.")]


@app.command("upload")
def upload(
    ctx: typer.Context,
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="JSON Lines, or one JSON array.")],
    name: Annotated[str | None, typer.Option(help="Name of the dataset.", show_default="the file's")] = None,
    as_json: AsJson = False,
) -> None:
    """Store a file of tasks, one JSON object each. A file with a bad row is refused whole."""
    with context_of(ctx).client() as leyden:
        made = leyden.upload_dataset(name or file.stem, file)
    shown = facts(("dataset", made.id), ("name", made.name), ("tasks", made.task_count))
    print_result(as_json, made, shown)


@app.command("list")
def list_(ctx: typer.Context, limit: Count = 50, as_json: AsJson = False) -> None:
    """List datasets, newest first."""
    with context_of(ctx).client() as leyden:
        found = list(itertools.islice(leyden.datasets(), limit))
    rows = [(dataset.name, dataset.id, dataset.task_count, dataset.created_at) for dataset in found]
    print_result(as_json, found, table(("name", "id", "tasks", "made"), rows))


@app.command("delete")
def delete(
    ctx: typer.Context, dataset: Dataset, yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False
) -> None:
    """Delete a dataset that no run uses."""
    with context_of(ctx).client() as leyden:
        found = leyden.dataset(dataset)
        if not yes:
            typer.confirm(f"Delete {found.name} ({found.id}) with {found.task_count} tasks?", abort=True)
        leyden.delete_dataset(found.id)


@app.command("show")
def show(ctx: typer.Context, dataset: Dataset, limit: Count = 5, as_json: AsJson = False) -> None:
    """Show a dataset and its first tasks."""
    with context_of(ctx).client() as leyden:
        found = leyden.dataset(dataset)
        tasks = list(itertools.islice(leyden.tasks(found.id), limit))
    rows = [(task.number, json.dumps(task.payload, ensure_ascii=False)) for task in tasks]
    print_result(
        as_json,
        {**found.model_dump(mode="json"), "tasks": [task.payload for task in tasks]},
        facts(("dataset", found.id), ("name", found.name), ("tasks", found.task_count), ("made", found.created_at)),
        table(("task", "payload"), rows),
    )
