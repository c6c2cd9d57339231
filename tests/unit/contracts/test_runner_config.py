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


def test_a_run_document_says_its_runner_or_leaves_it_out() -> None:
    document = builders.run_document()
    for section in ({}, {"runner": {"timeout_seconds": 9}}, {"runner": {"type": "process", "timeout_seconds": 9}}):
        read = RunConfig.model_validate({**document, **section})
        assert read.runner == ProcessRunner(**section.get("runner", {}))
        assert read.model_dump(mode="json")["runner"]["type"] == "process"
