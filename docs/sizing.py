"""Writes docs/reference/sizing.md: the memory of published models on machines that clouds rent."""

from __future__ import annotations

from typing import Any

from docs.shapes import PUBLISHED
from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.judgements import GB, Machine, Shape
from leyden.libs.contracts.judgements.smallest import place_bytes, smallest_in_words
from leyden.libs.contracts.overlay import overlay
from leyden.libs.contracts.recipes import RECIPES

MACHINES = ((1, 24), (1, 48), (1, 80), (1, 141), (2, 80), (2, 141), (8, 80), (8, 141))
TRAININGS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "all weights, `moments: 8bit`, `offload`": {"optimizer": {"moments": "8bit", "offload": True}},
    "LoRA, rank 32": {"training": {"lora": {"rank": 32}}},
}
ON_A_CPU = {"flight-cpu"}
MODELS = [name for name, (_, size) in PUBLISHED.items() if size > 3e8]
INTRODUCTION = """
`leyden run check` computes these numbers from a model's `config.json`; [one GPU](../gpu.md#measured) has measured a
model of 0.6B. A cell has the GB that each GPU of the trainer needs, in bold where they fit, with `precision:
bfloat16`, `activation_checkpointing` and 4096 tokens a pass. The last column is the memory of a host with 8 GPUs.
An engine has a GPU of its own.
"""


def sizing_page(note: str) -> str:
    """The page, behind a note that it is generated."""
    head = ["model", "training", *(f"{gpus} × {size} GB" for gpus, size in MACHINES), "host of 8"]
    lines = [note, "# Sizing", INTRODUCTION, _row(head), _row(["---", "---", *["--:"] * (len(MACHINES) + 1)])]
    for name in MODELS:
        lines += [_row([name, words, *_cells(name, changes)]) for words, changes in TRAININGS.items()]
    lines += ["", "## Recipes", "", "The smallest machines of one host for each recipe.", ""]
    lines += [_row(["recipe", "model", "machines"]), _row(["---"] * 3)]
    lines += [_row([name, recipe.model, recipe.machine]) for name, recipe in RECIPES.items()]
    return "\n".join(lines) + "\n"


def recipe_machine(name: str) -> str:
    """The smallest machines of a recipe, computed."""
    shape, document = shape_of(RECIPES[name].model), run({"recipe": name})
    return smallest_in_words(document, shape, gpus=name not in ON_A_CPU)


def shape_of(model: str) -> Shape:
    """The shape of a published model."""
    found = Shape.of(PUBLISHED[model][0])
    assert found is not None
    return found


def run(changes: dict[str, Any]) -> RunConfig:
    """A run with nothing but these settings."""
    return RunConfig.model_validate({"name": "a", "dataset": "b", "agent": {"command": ["c"]}, **changes})


def _cells(model: str, changes: dict[str, Any]) -> list[str]:
    shape = shape_of(model)
    document = run(overlay({"training": {"precision": "bfloat16", "activation_checkpointing": True}}, changes))
    needed = [(place_bytes(document, shape, Machine(gpus), "gpu"), size * GB) for gpus, size in MACHINES]
    cells = [f"**{size / GB:.0f}**" if size <= limit else f"{size / GB:.0f}" for size, limit in needed]
    return [*cells, f"{place_bytes(document, shape, Machine(8), 'host') / GB:.0f}"]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
