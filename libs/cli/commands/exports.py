"""`leyden rollout export`"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from leyden.libs.cli.commands.filters import (
    Failed,
    OfEvaluation,
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
from leyden.libs.contracts.conversation import Json

Write = Callable[[Json], object]


def export(
    ctx: typer.Context,
    run: Annotated[str, typer.Argument(metavar="RUN", help="Id or name of a run.")],
    form: Annotated[
        Literal["atif", "openai", "trl", "pairs"],
        typer.Option(
            "--as", help="Harbor's ATIF, OpenAI's fine-tuning, TRL's prompt and completion, TRL's preference pairs."
        ),
    ],
    to: Annotated[str, typer.Option(metavar="FILE", help="A file, replaced when all is written; - prints.")],
    evaluation: OfEvaluation = None,
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
    """Write finished rollouts as JSON lines that other tools read; a rollout without a reward has null.

    Example: leyden rollout export support --as trl --reward-min 0.9 --max-per-task 2 --to train.jsonl
    """
    with context_of(ctx).client() as leyden, _writer(to) as write:
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
        count = 0
        for count, row in enumerate(rows, 1):  # noqa: B007  # the last one is the number of all
            write(row)
    for reason, number in rows.left_out.items():
        error_console.print(as_text(f"left out: {number} {reason}"), soft_wrap=True)
    rest = "" if count or rows.left_out else ": no finished rollout passes the filters; `leyden rollout list` shows all"
    error_console.print(as_text(f"{count} rows{rest}"), soft_wrap=True)


@contextmanager
def _writer(to: str) -> Iterator[Write]:
    """Writes rows to standard output, or to a file that is there once all of them are.

    Raises: CommandError: no file can be made there
    """
    if to == "-":
        yield print_json_line
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
        with part.open("w", encoding="utf-8") as file:
            yield lambda row: file.write(json.dumps(row, ensure_ascii=False) + "\n")
        if is_replaced:
            part.replace(path)
    finally:
        if is_replaced:
            part.unlink(missing_ok=True)
