"""`leyden train`: one line from a command, a file of tasks and a grader to a trained model."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, get_args

import typer

from leyden.libs.cli.commands.runs import Changes
from leyden.libs.cli.context import Context, context_of
from leyden.libs.cli.document import Document, set_values
from leyden.libs.cli.errors import CommandError, Exit
from leyden.libs.cli.trial import is_cured_by_override, replaced_by, try_agents
from leyden.libs.cli.view.console_link import run_line
from leyden.libs.cli.view.output import AsJson, as_text, console, error_console
from leyden.libs.cli.view.watch import demand_completed, watch_run
from leyden.libs.contracts.config.graders import Grader

Command = Annotated[
    list[str], typer.Argument(metavar="-- COMMAND", help="The agent, with {task.NAME} for fields of a task.")
]


def train(
    ctx: typer.Context,
    command: Command,
    tasks: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="The tasks: JSON Lines, or one array.")],
    rewards: Annotated[
        list[str] | None,
        typer.Option(
            "--reward",
            metavar="GRADER:VALUE",
            help="A grader such as token_f1:{task.answer} or regex:PATTERN, or one as JSON; repeatable.",
            show_default="the agent's own last line with a reward",
        ),
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="A sampling parameter that the run decides: temperature=1, which leaves out top_p and the like.",
            show_default="the agent's own",
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimiser steps.", show_default="the run's default")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run.", show_default="the agent's program")] = None,
    directory: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="The agent's files; each attempt gets a copy.")
    ] = Path(),
    image: Annotated[str | None, typer.Option(help="The agent's image, in place of files of this machine.")] = None,
    changes: Changes = None,
    as_json: AsJson = False,
) -> None:
    """Train the model inside an agent: write the run's document, try the agent on one task, then train.

    The document stays as NAME.run.json for `leyden run create`. Ctrl-C in the training leaves the run running.

    Example: leyden train --tasks tasks.jsonl --reward 'token_f1:{task.answer}' -- python my_agent.py "{task.question}"
    """
    folder = directory.resolve()
    amendments = [f"sampling.override.{one}" for one in override or []] + (changes or [])
    if steps is not None:
        amendments.append(f"training.steps={steps}")
    document: Document = {"name": name or name_of(command, folder), "dataset": dataset_of(tasks)}
    document |= agent_in_image(command, image, _place(context_of(ctx))) if image else agent_here(command, folder)
    if rewards:
        document["reward"] = reward_of(rewards)
        refuse_names(document["reward"], first_task(tasks))
    _train(context_of(ctx), set_values(document, amendments), tasks, as_json=as_json)


def _train(context: Context, document: Document, tasks: Path, *, as_json: bool) -> None:
    screen = error_console if as_json else console
    with context.client() as leyden:
        leyden.upload_dataset(document["dataset"], tasks)
        path = write_document(document, Path.cwd())
        screen.print(as_text(f"wrote {path}; trying the agent on the first task"), soft_wrap=True)
        # The command writes a document with one agent.
        [trial] = try_agents(leyden, document)
        if trial.problems:
            found = "\n".join(f"would not train: {problem}" for problem in trial.problems)
            if is_cured_by_override(trial.calls, replaced_by(document)):
                found += "\nNo run changes an agent's sampling silently: to have it do so, add --override temperature=1"
            shown = f"See its conversation and output with: leyden rollout show {trial.rollout.id}"
            raise CommandError(f"{found}\n{shown}\nTo train all the same: leyden run create {path} --watch")
        run = leyden.create_run(document)
        screen.print(as_text(f"the trial worked; run {run.id} trains, and Ctrl-C leaves it running"), soft_wrap=True)
        # A forwarded port closes with this command.
        if not context.on_cluster:
            screen.print(run_line(leyden, context.address()[0].rstrip("/"), run.id), crop=False, soft_wrap=True)
        ended = watch_run(leyden, run.id, screen, as_json=as_json)
    demand_completed(ended)
    for words in (
        f"See its steps with: leyden run show {ended.id}",
        f"See its rollouts with: leyden rollout list --run {ended.id}",
        f"Take its weights with: leyden policy export {ended.id} --to FOLDER",
    ):
        screen.print(words, soft_wrap=True)


def agent_here(command: Sequence[str], folder: Path) -> Document:
    """The sections of an agent whose files lie in a folder. The shell's own `python` becomes its path.

    Raises: CommandError: there is no such program
    """
    first, *rest = command
    # A path is one in the copied folder, and {python} the runner's own interpreter.
    found = first if "/" in first or first == "{python}" else shutil.which(first)
    if found is None:
        raise CommandError(f"there is no program {first!r}: write the path of one, or {{python}}", Exit.USAGE)
    return {"agent": {"command": [found, *rest], "directory": str(folder)}}


def agent_in_image(command: Sequence[str], image: str, place: str) -> Document:
    """The sections of an agent whose files lie in an image. Args: place: `container` or `kubernetes`"""
    return {"agent": {"command": list(command)}, "runner": {"type": place, "image": image}}


def _place(context: Context) -> str:
    """The type of runner that executes images: containers on this machine, Jobs on a platform elsewhere."""
    return "kubernetes" if context.settings.url or context.on_cluster else "container"


def reward_of(texts: Sequence[str]) -> Document:
    """The section `reward` with a component of weight 1 for each grader, named by its type.

    >>> [one["name"] for one in reward_of(["regex:a", "regex:b", "tool_use"])["components"]]
    ['regex', 'regex_2', 'tool_use']
    """
    graders = list(map(grader_of, texts))
    kinds = [str(one.get("type", "grader")) for one in graders]
    names = [
        f"{kind}_{count}" if (count := kinds[: place + 1].count(kind)) > 1 else kind for place, kind in enumerate(kinds)
    ]
    return {"components": [{"name": name, "grader": one} for name, one in zip(names, graders, strict=True)]}


def grader_of(text: str) -> Document:
    """A grader from its short form, which gives the one field that it must have, or from JSON.

    Raises: CommandError: the text is neither

    >>> grader_of("token_f1:{task.answer}")
    {'type': 'token_f1', 'reference': '{task.answer}'}
    """
    kind, separator, value = text.partition(":")
    try:
        if text.startswith("{"):
            grader: Document = json.loads(text)
            return grader
        if separator:
            return {"type": kind, **_needed_value(kind, value)}
    except ValueError as error:
        raise CommandError(f"--reward {text!r}: {error}", Exit.USAGE) from None
    return {"type": kind}


def _needed_value(kind: str, value: str) -> Document:
    """Raises: ValueError: there is no such grader, or it needs no or several fields"""
    graders = {get_args(one.model_fields["type"].annotation)[0]: one for one in get_args(get_args(Grader)[0])}
    if kind not in graders:
        raise ValueError(f"there is no grader {kind!r}: write one of {', '.join(graders)}")
    fields = {name: field for name, field in graders[kind].model_fields.items() if name != "type"}
    needed = [name for name, field in fields.items() if field.is_required()]
    if len(needed) != 1:
        raise ValueError(f"{kind} has no short form: write JSON with its fields {', '.join(fields)}")
    [name] = needed
    return {name: value if fields[name].annotation is str else json.loads(value)}


def refuse_names(reward: Document, task: Document) -> None:
    """Raises: CommandError: a reference is the bare name of a field of the task, which every answer would be
    compared with
    """
    for one in reward["components"]:
        if isinstance(reference := one["grader"].get("reference"), str) and reference in task:
            raise CommandError(
                f"--reward: the reference of {one['name']} is the text {reference!r} itself: write"
                f" {{task.{reference}}} for that field of each task",
                Exit.USAGE,
            )


def first_task(tasks: Path) -> Document:
    """The first task of the file; empty where it cannot be read, which the upload refuses with the line."""
    try:
        with tasks.open(encoding="utf-8") as lines:
            first = next((line for line in lines if line.strip()), "")
        found = json.loads(tasks.read_bytes() if first.lstrip().startswith("[") else first)
    except ValueError:
        return {}
    found = found[0] if isinstance(found, list) and found else found
    return found if isinstance(found, dict) else {}


def name_of(command: Sequence[str], folder: Path) -> str:
    """A run's name: the first word of the command that is a file of the folder, else the program."""
    # A prompt is no path: pathlib would fail for one that is longer than any name of a file.
    program = next((word for word in command if os.path.isfile(folder / word)), command[0])  # noqa: PTH113
    return re.sub(r"[^\w.-]", "-", Path(program).stem).strip(".-")[:200] or "agent"


def dataset_of(tasks: Path) -> str:
    """A dataset's name with a hash of its content, since a dataset never changes."""
    with tasks.open("rb") as content:
        return f"{tasks.stem[:100]}-{hashlib.file_digest(content, 'sha256').hexdigest()[:8]}"


def write_document(document: Document, folder: Path) -> Path:
    """Writes NAME.run.json; a different document in its place becomes NAME.run.json~."""
    path, text = folder / f"{document['name']}.run.json", json.dumps(document, indent=2) + "\n"
    if path.exists() and path.read_text() != text:
        path.replace(f"{path}~")
    path.write_text(text)
    return path
