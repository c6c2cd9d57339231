from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from leyden.libs.contracts import config
from leyden.libs.contracts.config import ProcessRunner, RunConfig, RunnerConfig
from tests import builders


class PodRunner(config._Runner):
    """A second backend, as a later one will be."""

    type: Literal["pod"] = "pod"
    image: str = "agent"


ONE: TypeAdapter[Any] = TypeAdapter(RunnerConfig)
TWO: TypeAdapter[Any] = TypeAdapter(
    Annotated[ProcessRunner | PodRunner, Field(discriminator="type"), BeforeValidator(config._process_by_default)]
)


@pytest.mark.parametrize("union", [ONE, TWO])
def test_a_document_without_a_type_is_the_process_backends(union: TypeAdapter[Any]) -> None:
    assert union.validate_python({}) == union.validate_python({"type": "process"}) == ProcessRunner()
    assert union.validate_python({"cpu_seconds": 5}) == ProcessRunner(cpu_seconds=5)
    with pytest.raises(ValidationError, match="'process'"):
        union.validate_python({"type": "ship"})


def test_a_second_backend_is_one_class() -> None:
    assert TWO.validate_python({"type": "pod", "timeout_seconds": 7}) == PodRunner(timeout_seconds=7)
    with pytest.raises(ValidationError, match="image"):
        TWO.validate_python({"image": "agent"})


def test_the_runner_of_a_run_config_is_optional() -> None:
    document = builders.run_document()
    for section in ({}, {"runner": {"timeout_seconds": 9}}, {"runner": {"type": "process", "timeout_seconds": 9}}):
        read = RunConfig.model_validate({**document, **section})
        assert read.runner == ProcessRunner(**section.get("runner", {}))
        assert read.model_dump(mode="json")["runner"]["type"] == "process"


@pytest.mark.parametrize(
    ("kind", "clip"),
    [
        ("ppo_clip", {"clip_high": 0.3}),
        ("ppo_clip", {"dual_clip": None}),
        ("gspo", {"clip_low": 0.1}),
        ("cispo", {"clip_high": 2.0}),
    ],
)
def test_a_clip_that_cannot_act_is_refused_with_its_path(kind: str, clip: dict[str, Any]) -> None:
    def document(correction: str, **changes: Any) -> dict[str, Any]:
        return builders.run_document(algorithm={"type": kind, "correction": {"type": correction}, **changes})

    RunConfig.model_validate(document("bypass", **clip))
    stored = RunConfig.model_validate(document("decoupled")).model_dump(mode="json")
    assert RunConfig.model_validate(stored).algorithm.correction.type == "decoupled"
    with pytest.raises(ValidationError, match=f"{next(iter(clip))} cannot act .* write correction 'bypass'") as refused:
        RunConfig.model_validate(document("decoupled", **clip))
    assert refused.value.errors()[0]["loc"] == ("algorithm", kind)
