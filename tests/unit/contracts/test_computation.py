"""One module resolves the settings that a document leaves to the trainer's device."""

from __future__ import annotations

from typing import Any

import pytest

from leyden.libs.contracts.config import CPU, Device, RunConfig
from tests.support.builders import run_document

CUDA = Device("cuda", flex=True)


def resolved(changes: dict[str, Any], device: Device) -> tuple[str, str, str, str]:
    found = RunConfig.model_validate(run_document(**changes)).computation(device)
    return found.precision, found.attention, found.export_dtype, found.correction.type


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (CPU, ("float32", "dense", "float32", "bypass")),
        (CUDA, ("bfloat16", "flex", "bfloat16", "decoupled")),
        (Device("cuda"), ("bfloat16", "dense", "bfloat16", "decoupled")),
        (Device("mps"), ("float32", "dense", "float32", "bypass")),
    ],
)
def test_null_is_resolved_by_the_device(device: Device, expected: tuple[str, str, str, str]) -> None:
    assert resolved({}, device) == expected


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_a_document_decides_what_it_names(device: Device) -> None:
    named = {"precision": "float32", "attention": "dense", "export_dtype": "float32"}
    changes = {"training": named, "algorithm": {"type": "ppo_clip", "correction": {"type": "bypass"}}}
    assert resolved(changes, device) == ("float32", "dense", "float32", "bypass")


def test_versions_on_a_cpu_are_float32_whatever_its_products_are() -> None:
    assert resolved({"training": {"precision": "bfloat16"}}, CPU) == ("bfloat16", "dense", "float32", "bypass")
    assert resolved({"training": {"precision": "float32"}}, CUDA)[2] == "float32"


@pytest.mark.parametrize(
    ("algorithm", "correction"),
    [
        ({"type": "gspo"}, "decoupled"),
        ({"type": "cispo"}, "decoupled"),
        ({"type": "sapo"}, "decoupled"),
        # Its bounds could not act on a ratio that is 1.
        ({"type": "ppo_clip", "clip_high": 0.3}, "bypass"),
        ({"type": "ppo_clip", "clip_high": 0.3, "mini_batches": 2}, "decoupled"),
        # Defined by the ratio to the engine, or without one.
        ({"type": "dppo_tv"}, "bypass"),
        ({"type": "importance_sampling"}, "bypass"),
        ({"type": "reinforce"}, "bypass"),
        ({"type": "sft"}, "bypass"),
    ],
)
def test_a_loss_that_bounds_a_ratio_corrects_for_the_engine_on_cuda(algorithm: dict[str, Any], correction: str) -> None:
    changes = {"algorithm": algorithm, "sampling": {"groups_per_step": 2}}
    assert resolved(changes, CUDA)[3] == correction
    assert resolved(changes, CPU)[3] == "bypass"


@pytest.mark.parametrize(
    ("training", "device", "expected"),
    [
        ({"lora": {}}, CUDA, "bfloat16"),
        ({"lora": {}}, CPU, "float32"),
        ({"lora": {}, "precision": "bfloat16"}, CPU, "float32"),
        ({"lora": {}, "precision": "float32"}, CUDA, "float32"),
        ({"lora": {"base_dtype": "bfloat16"}}, CPU, "bfloat16"),
        ({"lora": {"base_dtype": "float32"}}, CUDA, "float32"),
        ({}, CUDA, "float32"),
    ],
)
def test_the_base_model_of_adapters_lies_in_bfloat16_on_cuda(
    training: dict[str, Any], device: Device, expected: str
) -> None:
    run = RunConfig.model_validate(run_document(training=training))
    found = run.computation(device)
    assert found.base_dtype == expected
    assert run.computed_as(found).computation(CPU).base_dtype == expected
    assert ("base_dtype" in str(run.storable())) == ("base_dtype" in str(training))


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_a_resolved_document_keeps_its_settings_on_every_device(device: Device) -> None:
    run = RunConfig.model_validate(run_document())
    found = run.computation(device)
    again = RunConfig.stored(run.computed_as(found).storable())
    for other in (CPU, CUDA):
        assert again.computation(other) == found.model_copy(update={"device": other.kind})


def test_a_stored_document_has_no_null_that_the_release_before_refuses() -> None:
    run = RunConfig.model_validate(run_document())
    document = run.storable()
    assert not {"precision", "attention"} & document["training"].keys()
    assert "correction" not in document["algorithm"]
    assert RunConfig.stored(document) == run
