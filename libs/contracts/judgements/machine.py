"""Judges whether a run fits a machine, and finds the settings, or the number of GPUs, with which it does."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.judgements.finding import Judgement, Severity
from leyden.libs.contracts.judgements.memory import GB, Machine, Models, Need, Place, memory
from leyden.libs.contracts.judgements.shape import judge_kind
from leyden.libs.contracts.overlay import overlay

PATHS: Mapping[Place, str] = {"gpu": "training", "host": "training", "engine": "pool"}
WORDS: Mapping[Place, str] = {
    "gpu": "each of the trainer's GPUs",
    "host": "each of the trainer's hosts",
    "engine": "each of an engine's GPUs",
}
Change = tuple[str, Mapping[str, Any]]
SMALLER: Sequence[Change] = (
    ("training.activation_checkpointing true", {"training": {"activation_checkpointing": True}}),
    ("training.micro_batch_tokens 1024", {"training": {"micro_batch_tokens": 1024}}),
    ("training.precision 'bfloat16'", {"training": {"precision": "bfloat16"}}),
    ("optimizer.offload true", {"optimizer": {"offload": True}}),
    ("optimizer.moments '8bit'", {"optimizer": {"moments": "8bit"}}),
    ("training.lora {}", {"training": {"lora": {}}}),
)
"""Changes of a document that need less memory, the least intrusive first."""
SMALLER_WITH_ROUTER: Sequence[Change] = (
    *SMALLER[:-1],
    ("training.lora {} with router 'frozen'", {"training": {"lora": {}, "router": "frozen"}}),
)
"""The same where routers train, which no adapters stand beside."""
SETTINGS: Mapping[Place, str] = {"gpu": "trainer.gpusPerNode", "engine": "engine.gpus"}
GPUS = (2, 4, 8)


def judge_model(
    run: RunConfig, config: Mapping[str, Any], machine: Machine, model: str, teacher: Path | None = None
) -> list[Judgement]:
    """Judges a run with the model of a `config.json`. Memory is judged where its shape is known.

    Args: model: its name in messages; teacher: the folder of a teacher that is a run's version
    """
    kind = judge_kind(config, model) if run.training.steps else None
    models = Models.of(run, config, teacher)
    return [kind] if kind else judge_memory(run, models, machine) if models else []


def judge_memory(run: RunConfig, models: Models, machine: Machine) -> list[Judgement]:
    """Returns a finding for each place with too little memory: `cannot` where its certain needs alone exceed it."""
    found = []
    for place in PATHS:
        needs = _needs(run, models, machine, place)
        if not _fits(needs, machine, place):
            has, size = _gb(_limit(machine, place)), _gb(_sum(needs))
            reason = f"{WORDS[place]} has {has}, and the run needs {size} ({_words(needs)})"
            certain = [need for need in needs if need.certain]
            severity: Severity = "warns" if _fits(certain, machine, place) else "cannot"
            remedy = ", or ".join(_remedies(run, models, machine, place)) or "choose a smaller model"
            found.append(Judgement(PATHS[place], severity, reason, remedy))
    return found


def _needs(run: RunConfig, models: Models, machine: Machine, place: Place) -> list[Need]:
    return [one for one in memory(run, models, machine) if one.place == place]


def _limit(machine: Machine, place: Place) -> float:
    limit = machine.host_bytes if place == "host" else machine.gpu_bytes
    return math.inf if limit is None else limit


def _fits(needs: Sequence[Need], machine: Machine, place: Place) -> bool:
    return _sum(needs) <= _limit(machine, place)


def _sum(needs: Sequence[Need]) -> int:
    return sum(need.size_bytes for need in needs)


def _remedies(run: RunConfig, models: Models, machine: Machine, place: Place) -> Iterator[str]:
    """The changes of which each suffices by itself; the fewest of the document together where none does."""

    def suffice(changes: Sequence[Change]) -> bool:
        return _fits(_needs(_changed(run, changes), models, machine, place), machine, place)

    smaller = SMALLER_WITH_ROUTER if run.training.router == "trained" else SMALLER
    changes = [] if place == "engine" else list(smaller)
    singles = [change for change in changes if suffice([change])]
    yield from (f"write {words}" for words, _ in singles)
    yield from _larger(run, models, machine, place)
    if not singles and suffice(changes):
        for change in reversed(smaller):
            fewer = [one for one in changes if one != change]
            changes = fewer if suffice(fewer) else changes
        yield f"write {', '.join(words for words, _ in changes)}"


def _changed(run: RunConfig, changes: Sequence[Change]) -> RunConfig:
    document = run.model_dump(mode="json")
    for _, change in changes:
        document = overlay(document, change)
    return RunConfig.model_validate(document)


def _larger(run: RunConfig, models: Models, machine: Machine, place: Place) -> Iterator[str]:
    """The smallest machine of its kind with enough memory in this place."""
    if place == "host":
        size = _sum(_needs(run, models, machine, place))
        yield f"give the trainer's host {_gb(size)} (trainer.resources.limits.memory)"
        return
    for count in GPUS:
        of_engine = place == "engine"
        more = replace(machine, engine_gpus=count) if of_engine else replace(machine, gpus=count, hosts=1)
        if _fits(_needs(run, models, more, place), more, place):
            yield f"give {'an engine' if of_engine else 'the trainer'} {count} GPUs ({SETTINGS[place]})"
            return


def _words(needs: Sequence[Need]) -> str:
    return ", ".join(f"{need.name} {need.size}" for need in needs if not 0 < need.size_bytes < GB / 10)


def _gb(size: float) -> str:
    return f"{size / GB:.1f} GB"
