"""A tiny image for tests of agents in containers: busybox, which `make test-containers` gets, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

IMAGE = "localhost/leyden-test-agent:1"
PROGRAM = os.environ.get("TEST_CONTAINERS", "")
"""Podman or docker, as `make test-containers` sets it."""
BUSYBOX = Path(__file__).parents[2] / ".cache" / "busybox" / "bin" / "busybox"

containers_only = pytest.mark.skipif(not PROGRAM, reason="make test-containers runs it: it needs podman or docker")


def build_image() -> None:
    """Makes the image from busybox, without a registry."""
    _build(IMAGE)


def build_image_with_volume() -> str:
    """Makes that image with a volume at /data, into which everybody may write; returns its name."""
    name = IMAGE.replace(":1", ":volume")
    _build(name, "RUN mkdir /data && echo of the image > /data/kept && chmod 777 /data", "VOLUME /data")
    return name


def _build(image: str, *further: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(BUSYBOX, folder)
        lines = ("FROM scratch", "COPY busybox /bin/busybox", 'RUN ["/bin/busybox", "--install", "/bin"]', *further)
        (Path(folder) / "Dockerfile").write_text("\n".join(lines))
        subprocess.run([PROGRAM, "build", "--quiet", "--tag", image, folder], check=True, capture_output=True)


def containers(work_folder: Path) -> list[str]:
    """The containers of the runners of a work folder, running or not."""
    label = f"label=leyden.dev/work-folder={work_folder.resolve()}"
    command = [PROGRAM, "ps", "--all", "--quiet", "--filter", label]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
