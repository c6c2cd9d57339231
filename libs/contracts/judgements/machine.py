"""Judges whether a run fits a machine, and finds the settings, or the number of GPUs, with which it does."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.judgements.finding import Judgement, Severity
from leyden.libs.contracts.judgements.memory import GB, Machine, Part, Place, memory
from leyden.libs.contracts.judgements.shape import Shape
from leyden.libs.contracts.overlay import overlay

PATHS: Mapping[Place, str] = {"gpu": "training", "host": "training", "engine": "pool"}
WORDS: Mapping[Place, str] = {
    "gpu": "each of the trainer's GPUs",
    "host": "each of the trainer's hosts",
    "engine": "each of an engine's GPUs",
}
SMALLER: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("training.activation_checkpointing true", {"training": {"activation_checkpointing": True}}),
    ("training.micro_batch_tokens 1024", {"training": {"micro_batch_tokens": 1024}}),
    ("training.precision 'bfloat16'", {"training": {"precision": "bfloat16"}}),
    ("optimizer.offload true", {"optimizer": {"offload": True}}),
    ("optimizer.moments '8bit'", {"optimizer": {"moments": "8bit"}}),
    ("training.lora {}", {"training": {"lora": {}}}),
)
"""Changes of a document that need less memory, the least intrusive first."""
GPUS = tuple(2**power for power in range(7))


def judge_memory(run: RunConfig, shape: Shape, machine: Machine) -> list[Judgement]:
    """Returns a finding for each place with too little memory: `cannot` where its certain parts alone exceed it."""
    found = []
    for place in PATHS:
        parts = parts_of(run, shape, machine, place)
        if not _fits(parts, machine, place):
            has, needs = _limit(machine, place), sum(part.size_bytes for part in parts)
            reason = f"{WORDS[place]} has {_gb(has)}, and the run needs {_gb(needs)} ({_words(parts)})"
            certain = [part for part in parts if part.certain]
            severity: Severity = "warns" if _fits(certain, machine, place) else "cannot"
            remedy = ", or ".join(_remedies(run, shape, machine, place)) or "choose a smaller model"
            found.append(Judgement(PATHS[place], severity, reason, remedy))
    return found


def parts_of(run: RunConfig, shape: Shape, machine: Machine, place: Place) -> list[Part]:
    """Returns the parts of a place. A run without steps has no trainer."""
    trains = run.training.steps > 0
    return [one for one in memory(run, shape, machine) if one.place == place and (trains or one.of_engine)]


def _limit(machine: Machine, place: Place) -> float:
    limit = machine.host_bytes if place == "host" else machine.gpu_bytes
    return math.inf if limit is None else limit


def _fits(parts: Sequence[Part], machine: Machine, place: Place) -> bool:
    return sum(part.size_bytes for part in parts) <= _limit(machine, place)


def _remedies(run: RunConfig, shape: Shape, machine: Machine, place: Place) -> Iterator[str]:
    """The changes of which each suffices by itself."""
    for words, changes in () if place == "engine" else SMALLER:
        changed = RunConfig.model_validate(overlay(run.model_dump(mode="json"), changes))
        if changed != run and _fits(parts_of(changed, shape, machine, place), machine, place):
            yield f"write {words}"
    for count in () if place == "host" else GPUS:
        more = replace(machine, **({"engine_gpus": count} if place == "engine" else {"gpus": count, "hosts": 1}))
        if _fits(parts_of(run, shape, more, place), more, place):
            where = "an engine (engine.gpus)" if place == "engine" else "the trainer (trainer.gpusPerNode)"
            yield f"give {where} {count} GPUs"
            break
    if place == "host":
        needs = sum(part.size_bytes for part in parts_of(run, shape, machine, place))
        yield f"give the trainer {_gb(needs)} (trainer.resources.limits.memory)"


def _words(parts: Sequence[Part]) -> str:
    return ", ".join(f"{part.name} {_gb(part.size_bytes)}" for part in parts)


def _gb(size: float) -> str:
    return f"{size / GB:.1f} GB"
