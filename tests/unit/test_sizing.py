"""Recipes name the smallest machines that hold them, and `run check` agrees on every class of machine."""

from __future__ import annotations

import pytest

from docs.sizing import MACHINES, ON_A_CPU, recipe_machine, run, shape_of
from leyden.libs.contracts.judgements import GB, Machine, Models, judge_memory
from leyden.libs.contracts.judgements.smallest import COUNTS, GPU_SIZES, place_bytes, smallest_machines
from leyden.libs.contracts.recipes import RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_names_its_smallest_machines(name: str) -> None:
    assert RECIPES[name].machine == recipe_machine(name)


@pytest.mark.parametrize("name", sorted(RECIPES.keys() - ON_A_CPU))
def test_smaller_machines_than_those_do_not_hold_a_recipe(name: str) -> None:
    document, shape = run({"recipe": name}), shape_of(RECIPES[name].model)
    smallest = {one.gpu_bytes: one.gpus for one in smallest_machines(document, shape)}
    assert smallest
    for size in GPU_SIZES:
        # Larger GPUs do with as few as smaller ones.
        fewest = min((gpus for other, gpus in smallest.items() if other <= size * GB), default=max(COUNTS) + 1)
        for gpus in COUNTS:
            assert (judge_memory(document, Models(shape), Machine(gpus, size * GB)) == []) == (gpus >= fewest)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(("gpus", "size"), MACHINES)
def test_a_check_judges_each_class_of_machine_by_the_sum(name: str, gpus: int, size: int) -> None:
    document, shape, machine = run({"recipe": name}), shape_of(RECIPES[name].model), Machine(gpus, size * GB)
    fits = place_bytes(document, shape, machine, "gpu") <= size * GB
    assert (judge_memory(document, Models(shape), machine) == []) == fits
