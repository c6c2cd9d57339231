"""The images are built of pinned versions, run as a numeric user, and hold what `make images` names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted([*ROOT.glob("docker/*.Dockerfile"), ROOT / "examples" / "flight_agent" / "Dockerfile"])


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, *map(str, DOCKERFILES)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_the_last_stage_runs_as_a_numeric_user(path: Path) -> None:
    # Kubernetes cannot check runAsNonRoot of a name.
    assert re.findall(r"^USER (\S+)", path.read_text(), re.MULTILINE)[-1] == "10001:10001"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_versions_are_pinned(path: Path) -> None:
    text = path.read_text()
    assert ":latest" not in text
    if "pip install" in text:
        assert "constraints.txt" in text


def test_the_context_holds_every_file_that_an_image_copies() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for path in DOCKERFILES:
        for sources in re.findall(r"^COPY (?!--from)(.*) \S+$", path.read_text(), re.MULTILINE):
            for source in sources.split():
                top = source.partition("/")[0]
                assert source.startswith("--chmod") or top in kept or (top == "docker" and "docker/*.sh" in kept), (
                    source
                )


def test_trainer_and_engine_share_the_layers_of_torch() -> None:
    def layers(name: str) -> list[str]:
        text = (ROOT / "docker" / name).read_text().partition("python3 -m venv")[2].partition("accelerate")[0]
        return [line for line in text.splitlines() if not line.startswith("#")]

    assert layers("trainer.Dockerfile") == layers("engine.Dockerfile")


def test_the_trainer_for_cuda_has_the_libraries_by_which_nccl_finds_rdma() -> None:
    [stage] = re.findall(
        r"^FROM \S+ AS base-cuda$(.*?)^FROM ",
        (ROOT / "docker" / "trainer.Dockerfile").read_text(),
        re.DOTALL | re.MULTILINE,
    )
    assert {"libibverbs1", "ibverbs-providers"} <= set(stage.split())
