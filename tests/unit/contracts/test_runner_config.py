from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from leyden.libs.contracts.config import ProcessRunner, RunConfig, RunnerConfig
from tests.support import builders

RUNNER: TypeAdapter[Any] = TypeAdapter(RunnerConfig)


def test_a_document_without_a_type_is_the_process_backends() -> None:
    assert RUNNER.validate_python({}) == RUNNER.validate_python({"type": "process"}) == ProcessRunner()
    assert RUNNER.validate_python({"cpu_seconds": 5}) == ProcessRunner(cpu_seconds=5)
    with pytest.raises(ValidationError, match="'process'"):
        RUNNER.validate_python({"type": "ship"})
    with pytest.raises(ValidationError, match="image"):
        RUNNER.validate_python({"image": "agent:1"})


@pytest.mark.parametrize(
    "image", ["agent:1", "host:5000/a/agent:v1.2", f"agent@sha256:{'0' * 64}", "ghcr.io/a/b:x", "oci/a:1", "docker:28"]
)
def test_an_image_with_a_tag_or_a_digest_is_accepted(image: str) -> None:
    for kind in ("kubernetes", "container"):
        assert RUNNER.validate_python({"type": kind, "image": image}).image == image


@pytest.mark.parametrize(
    "image",
    [
        *("oci-archive:agent.tar", "oci-archive:/tmp/agent.tar", "dir:/etc", "dir:etc", "dir:5/etc", "oci:/tmp/x:1"),
        *("docker-archive:/x.tar:agent:1", "docker-daemon:agent:1", "containers-storage:agent:1", "docker://agent:1"),
    ],
)
def test_an_image_comes_from_a_registry_and_no_file(image: str) -> None:
    for kind in ("kubernetes", "container"):
        with pytest.raises(ValidationError, match="names a place other than a registry"):
            RUNNER.validate_python({"type": kind, "image": image})


@pytest.mark.parametrize("image", ["agent", "agent:latest", "host:5000/agent", "a b:1", "", "agent:", "agent@sha256:0"])
def test_an_image_that_may_change_during_a_run_is_refused(image: str) -> None:
    with pytest.raises(ValidationError, match="image"):
        RUNNER.validate_python({"type": "kubernetes", "image": image})


@pytest.mark.parametrize(
    ("amount", "right"), [("500m", True), ("1.5", True), ("2Gi", True), ("2 GB", False), ("-1", False)]
)
def test_a_quantity_is_kubernetes(amount: str, right: bool) -> None:
    document = {
        "type": "kubernetes",
        "image": "a:1",
        "resources": {"limits": {"memory": amount, "nvidia.com/gpu": "1"}},
    }
    if right:
        assert RUNNER.validate_python(document).resources.limits["memory"] == amount
    else:
        with pytest.raises(ValidationError, match="memory"):
            RUNNER.validate_python(document)


def test_a_folder_of_the_runner_is_refused_for_an_image() -> None:
    document = builders.run_document(runner={"type": "kubernetes", "image": "a:1"})
    assert RunConfig.model_validate(document).runner.type == "kubernetes"
    document["agent"] = {**document["agent"], "directory": "/srv/agent"}
    with pytest.raises(ValidationError, match=r"agent.directory .* put the files into runner.image"):
        RunConfig.model_validate(document)


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
    RunConfig.model_validate(document("decoupled", **clip, epochs=2))
    stored = RunConfig.model_validate(document("decoupled")).model_dump(mode="json")
    assert RunConfig.model_validate(stored).algorithm.correction.type == "decoupled"
    with pytest.raises(ValidationError, match=f"{next(iter(clip))} cannot act .* write correction 'bypass'") as refused:
        RunConfig.model_validate(document("decoupled", **clip))
    assert refused.value.errors()[0]["loc"] == ("algorithm", kind)


def test_more_mini_batches_than_groups_are_refused() -> None:
    algorithm = {"type": "ppo_clip", "mini_batches": 3}
    with pytest.raises(ValidationError, match=r"mini_batches 3 exceeds sampling\.groups_per_step 2"):
        RunConfig.model_validate(builders.run_document(algorithm=algorithm, sampling={"groups_per_step": 2}))


def test_a_stored_document_may_have_what_a_newer_version_added() -> None:
    document = builders.run_document()
    newer = document | {"new": 1, "agent": document["agent"] | {"new": {"er": 1}}}
    assert RunConfig.stored(newer) == RunConfig.model_validate(document)
    with pytest.raises(ValidationError):
        RunConfig.model_validate(newer)


@pytest.mark.parametrize("pattern", ["/etc/passwd", "../x", "src/../../x", "a//b", "./a", "src/", "", "a\x00"])
def test_artifacts_lie_below_the_working_folder(pattern: str) -> None:
    agent = {"command": ["x"], "artifacts": [pattern]}
    with pytest.raises(ValidationError, match=r"agent.artifacts.0"):
        RunConfig.model_validate(builders.run_document(agent=agent))


def test_artifacts_are_of_agents_on_a_runners_machine() -> None:
    agent = {"command": ["x"], "artifacts": ["report.md", "src/**"]}
    run = RunConfig.model_validate(builders.run_document(agent=agent))
    assert RunConfig.stored(run.storable()).agent.artifacts == ["report.md", "src/**"]
    assert "artifacts" not in RunConfig.model_validate(builders.run_document()).storable()["agent"]
    pods = {"type": "kubernetes", "image": "tests:1"}
    with pytest.raises(ValidationError, match=r"keep none: let the agent print them, or use runner\.type 'process'"):
        RunConfig.model_validate(builders.run_document(agent=agent, runner=pods))


def test_an_external_agent_has_no_command_and_is_stored_so() -> None:
    document = {"name": "r", "dataset": "d", "runner": {"type": "external"}, "agent": {"environment": {"A": "b"}}}
    run = RunConfig.model_validate(document)
    assert (run.agent.command, run.agent.environment, run.runner.type) == ([], {"A": "b"}, "external")
    assert RunConfig.stored(run.storable()) == run
    del document["agent"]
    assert RunConfig.model_validate(document).agent.command == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("command", ["x"]), ("directory", "/a"), ("task", "stdin"), ("task_file", "input.json"), ("artifacts", ["a"])],
)
def test_what_starts_an_agent_is_refused_for_an_external_one(name: str, value: object) -> None:
    document = {"name": "r", "dataset": "d", "runner": {"type": "external"}, "agent": {name: value}}
    with pytest.raises(ValidationError) as caught:
        RunConfig.model_validate(document)
    [error] = caught.value.errors()
    assert error["loc"] == ("agent", name) and "remove it, or runner.type" in error["msg"]
