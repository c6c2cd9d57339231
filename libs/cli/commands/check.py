"""`leyden run check`: judges a run's document without a platform, before anything starts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from leyden.libs.cli.commands.runs import Changes, RunFile
from leyden.libs.cli.context import Context, context_of
from leyden.libs.cli.document import read_document
from leyden.libs.cli.errors import Exit
from leyden.libs.cli.view.output import AsJson, Part, as_text, print_result, table
from leyden.libs.contracts.api.problems import field_problem
from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.judgements import (
    Judgement,
    Machine,
    Models,
    Need,
    engine_arguments,
    judge,
    judge_model,
    memory,
    model_config,
    size_bytes,
)


def _parsed(given: str) -> int:
    try:
        return size_bytes(given)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _size(words: str) -> Any:
    return typer.Option(parser=_parsed, metavar="SIZE", show_default="not judged", help=words)


def check(
    ctx: typer.Context,
    file: RunFile,
    changes: Changes = None,
    model: Annotated[
        Path | None, typer.Option(help="Model folder.", show_default="the document's, or that of `leyden up`")
    ] = None,
    gpus: Annotated[int, typer.Option(min=0, help="GPUs of each of the trainer's hosts; 0 for a CPU.")] = 1,
    gpu_memory: Annotated[int | None, _size("Memory of a GPU, such as 80GB.")] = None,
    host_memory: Annotated[int | None, _size("Memory of a trainer's host, or its pod's limit.")] = None,
    hosts: Annotated[int, typer.Option(min=1, help="The trainer's hosts.")] = 1,
    copies: Annotated[int, typer.Option(min=1, help="Copies of the model (trainer.copies), such as one a host.")] = 1,
    engine_gpus: Annotated[int, typer.Option(min=1, help="GPUs of an engine.")] = 1,
    shared: Annotated[bool, typer.Option("--shared", help="The engine is on the trainer's GPUs.")] = False,
    as_json: AsJson = False,
) -> None:
    """Judge a run's document: settings that cannot train, and the memory that it needs.

    Memory is arithmetic from the model's config.json; activations are an estimate. Exit status 5 if the run cannot
    train or cannot fit.

    Example: leyden run check run.json --gpus 8 --gpu-memory 80GB --host-memory 512GiB
    """
    machine = Machine(gpus, gpu_memory, host_memory, hosts, engine_gpus, shared, copies)
    run, found = _read(read_document(file, changes or []))
    folder, needs = model or _model(run, context_of(ctx)), list[Need]()
    if run is not None:
        config = (model_config(folder) if folder else None) or {}
        models = Models.of(run, config)
        found += [*judge(run, run.computation(machine.device)), *judge_model(run, config, machine, str(folder))]
        needs = memory(run, models, machine) if models else []
    can_run = all(one.severity != "cannot" for one in found)
    rate = run.optimizer.rate if run else None
    rollouts = run.rollouts_per_step if run and run.algorithm.type != "sft" else None
    engine = engine_arguments(machine) if needs else None
    result = {
        "can_run": can_run,
        "learning_rate": rate,
        "rollouts_per_step": rollouts,
        "findings": [*map(asdict, found)],
        "memory": [*map(asdict, needs)],
        "engine_arguments": engine,
    }
    print_result(as_json, result, *_shown(found, needs, folder, rollouts, engine))
    if not can_run:
        raise typer.Exit(Exit.REFUSED)


def _read(document: Mapping[str, Any]) -> tuple[RunConfig | None, list[Judgement]]:
    """The run, and what the API would refuse of its document by itself."""
    try:
        return RunConfig.model_validate_json(json.dumps(document)), []
    except ValidationError as error:
        fields = [field_problem(RunConfig, one["loc"], one["type"], one["msg"]) for one in error.errors()]
        return None, [Judgement(one.path, "cannot", "the document is refused", one.message) for one in fields]


def _model(run: RunConfig | None, context: Context) -> Path | None:
    if run is not None and run.model is not None:
        return Path(run.model)
    record = None if context.settings.url or context.on_cluster else context.record()
    return Path(record.model_path) if record is not None and record.model_path else None


def _shown(
    found: Sequence[Judgement], needs: Sequence[Need], folder: Path | None, rollouts: int | None, engine: str | None
) -> list[Part]:
    unknown = f"{folder} holds no config.json of a dense model" if folder else "name the model's folder with --model"
    kinds, styles = {True: "", False: "estimate"}, {"cannot": "red", "warns": "yellow"}
    rows = [(one.place, one.name, one.size, kinds[one.certain]) for one in needs]
    memory_shown = table(("each", "holds", "size", ""), rows) if needs else f"memory is not judged: {unknown}"
    lines = [as_text(f"{one.severity} {one.path}: {one.message}", styles[one.severity]) for one in found]
    sampled = [] if rollouts is None else [f"a step samples up to {rollouts} rollouts"]
    shares = [] if engine is None else [f'start SGLang beside the trainer with --engine-args "{engine}"']
    return [memory_shown, *shares, *sampled, *(lines or [as_text("nothing found")])]
