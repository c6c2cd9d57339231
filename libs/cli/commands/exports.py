"""`leyden rollout export`"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Literal

import typer

from leyden.libs.cli.commands.filters import (
    Failed,
    OfStep,
    OfTask,
    OfVersion,
    RewardMax,
    RewardMin,
    WithText,
)
from leyden.libs.cli.context import context_of
from leyden.libs.cli.errors import CommandError, Exit
from leyden.libs.cli.view.output import as_text, error_console, print_json_line
from leyden.libs.client.export import Export


def export(
    ctx: typer.Context,
    run: Annotated[str, typer.Argument(metavar="RUN", help="Id or name of a run.")],
    form: Annotated[
        Literal["atif", "openai", "trl", "pairs", "parquet"],
        typer.Option(
            "--as",
            help="Harbor's ATIF, OpenAI's fine-tuning, TRL's prompt and completion, TRL's preference pairs, or a table"
            " with a row an answer.",
        ),
    ],
    to: Annotated[str, typer.Option(metavar="FILE", help="A file, replaced when all is written; - prints.")],
    evaluation: Annotated[
        str | None,
        typer.Option(
            help="Rollouts of this evaluation, none for training rollouts, or all.",
            show_default="none for openai, trl and pairs of a run that trains, else all",
        ),
    ] = None,
    step: OfStep = None,
    version: OfVersion = None,
    task: OfTask = None,
    failed: Failed = None,
    reward_min: RewardMin = None,
    reward_max: RewardMax = None,
    max_per_task: Annotated[
        int | None, typer.Option(min=1, help="The best rollouts of a task; for pairs, groups with the best ones.")
    ] = None,
    role: Annotated[str | None, typer.Option(help="Conversations of one role alone.")] = None,
    policy: Annotated[
        str | None, typer.Option(help="Conversations of the roles that a further policy answers alone.")
    ] = None,
    text: WithText = None,
) -> None:
    """Write finished rollouts as JSON lines or Parquet that other tools read; a rollout without a reward has null.

    Example: leyden rollout export support --as trl --reward-min 0.9 --max-per-task 2 --to train.jsonl
    """
    if form == "parquet" and to == "-":
        raise CommandError("--to: Parquet is no text to print: name a file", Exit.USAGE)
    with context_of(ctx).client() as leyden, _part(to) as part:
        rows = leyden.export(
            leyden.find_run(run).id,
            form,
            evaluation=evaluation,
            step=step,
            version=version,
            task=task,
            failed=failed,
            reward_min=reward_min,
            reward_max=reward_max,
            text=text,
            role=role,
            policy=policy,
            max_per_task=max_per_task,
        )
        count = rows.write_parquet(part) if part and form == "parquet" else _write_lines(rows, part)
    for reason, number in rows.left_out.items():
        error_console.print(as_text(f"left out: {number} {reason}"), soft_wrap=True)
    rest = "" if count or rows.left_out else ": no finished rollout passes the filters; `leyden rollout list` shows all"
    error_console.print(as_text(f"{count} rows{rest}"), soft_wrap=True)


def _write_lines(rows: Export, part: Path | None) -> int:
    """Returns the number of rows. Args: part: the file; None: standard output"""
    count = 0
    with part.open("w", encoding="utf-8") if part else nullcontext() as file:
        for row in rows:
            count += 1
            if file is None:
                print_json_line(row)
            else:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return count


@contextmanager
def _part(to: str) -> Iterator[Path | None]:
    """A file beside the wanted one, which it replaces once all is written; None for standard output.

    Raises: CommandError: no file can be made there
    """
    if to == "-":
        yield None
        return
    path = Path(to)
    if path.is_dir() or not path.parent.is_dir():
        raise CommandError(
            f"--to: {to} is no file in a folder that exists: make the folder, or name a file", Exit.USAGE
        )
    # A pipe or a device cannot be replaced.
    is_replaced = path.is_file() or not path.exists()
    part = path.with_name(f".{path.name}.{os.getpid()}") if is_replaced else path
    try:
        yield part
        if is_replaced:
            part.replace(path)
    finally:
        if is_replaced:
            part.unlink(missing_ok=True)
