"""The commands of the how-to pages run, with stand-ins for Docker and the cluster: what is installed was pushed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from tests.contract.chart.chart import CHART, ROOT
from tests.support.tools import HELM, HELM_3

PAGE = (ROOT / "docs" / "how-to" / "kubernetes.md").read_text()
OPERATE = (ROOT / "docs" / "how-to" / "operate-kubernetes.md").read_text()
SHELL = re.compile(r"^( *)```sh\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
IMAGE = re.compile(r"image: \"?(\S+?)\"?$", re.MULTILINE)
SHIM = """#!/bin/sh
echo "$(basename "$0") $*" >> "$SHIMS/log"
"""
HELM_SHIM = """#!/bin/sh
case "$1" in
package) exec "$REAL_HELM" "$@" ;;
install) shift; exec "$REAL_HELM" template "$@" ;;
upgrade) shift; exec "$REAL_HELM" template $(printf '%s ' "$@" | sed 's/--reset-then-reuse-values//') ;;
esac
echo "helm $*" >> "$SHIMS/log"
"""


def blocks(page: str) -> list[str]:
    return [text for _, text in SHELL.findall(page)]


def one_with(page: str, words: str) -> str:
    [found] = [block for block in blocks(page) if words in block]
    return found


def commit(folder: Path) -> None:
    """Makes the folder a repository of what is in it."""
    words = ["git", "-c", "user.name=x", "-c", "user.email=x@example", "-C", str(folder)]
    for command in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--no-verify", "--message", "x"]):
        subprocess.run([*words, *command], check=True)


@dataclass
class Shell:
    """Runs blocks in a copy of what they read; the programs of others write down how they were called."""

    folder: Path
    helm: Path
    output: str = ""
    shims: Path = field(init=False)

    def __post_init__(self) -> None:
        self.shims = self.folder / "shims"
        self.shims.mkdir()
        for name in ("docker", "kind", "helm", "kubectl", "leyden"):
            (self.shims / name).write_text(HELM_SHIM if name == "helm" else SHIM)
            (self.shims / name).chmod(0o755)
        # With what `make images` needs to see that the console's page is built.
        page = ("constraints.txt", "libs", "services", ".cache", ".venv")
        for name in ("helm", "Makefile", "pyproject.toml", "docker", *page):
            (self.folder / name).symlink_to(ROOT / name)
        commit(self.folder)

    def run(self, *texts: str) -> None:
        environment = {
            "PATH": f"{self.shims}:{os.environ['PATH']}",
            "SHIMS": str(self.shims),
            "REAL_HELM": str(self.helm),
            "HOME": str(self.folder),
        }
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", "\n".join(texts)],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        self.output = done.stdout

    def called(self, program: str, *words: str) -> set[str]:
        """The last word of each call that begins so."""
        begin = " ".join([program, *words]) + " "
        lines = (self.shims / "log").read_text().splitlines()
        return {line.split()[-1] for line in lines if line.startswith(begin)}

    def images(self) -> set[str]:
        """Those of the rendered pods; the trainer's is in a ConfigMap."""
        objects = [one for one in yaml.safe_load_all(self.output[self.output.index("---\n") :]) if one]
        assert len(objects) > 35
        return set(IMAGE.findall(self.output))


@pytest.fixture(params=[HELM, HELM_3], ids=["helm4", "helm3"])
def shell(request: pytest.FixtureRequest, tmp_path: Path) -> Shell:
    return Shell(tmp_path, request.param)


OTHERS = {"docker.io/library/postgres:17", "docker.io/valkey/valkey:8.1"}


def test_the_first_installation_finds_every_image_that_was_pushed(shell: Shell) -> None:
    build, _, rest = one_with(PAGE, "make images push package").partition("# trainer with CUDA")
    assert "IMAGES=cpu" in rest
    shell.run(f"{build} IMAGES=cpu", one_with(PAGE, "values-dev.yaml --set global.imageRegistry"))
    pushed = shell.called("docker", "push")
    assert shell.images() - pushed == OTHERS
    assert all(name.startswith("registry.example/leyden/") for name in pushed)
    built = {word for line in (shell.shims / "log").read_text().splitlines() for word in line.split() if ":" in word}
    assert pushed <= built


def test_the_installation_on_gpus_finds_every_image_that_was_pushed(shell: Shell) -> None:
    values = re.search(r"```yaml\n(   global:.*?)```", PAGE, re.DOTALL)
    assert values
    build = one_with(PAGE, "make images push package").partition("# trainer with CUDA")[0]
    # Written after the build, beside the Makefile.
    write = f"cat > values.yaml <<'END'\n{values[1]}\nEND"
    shell.run(build, write, one_with(PAGE, "--values values.yaml"))
    assert shell.images() - shell.called("docker", "push") == OTHERS


def test_the_installation_on_kind_finds_every_image_that_was_loaded(shell: Shell) -> None:
    shell.run(one_with(PAGE, "kind load docker-image"))
    assert shell.images() - shell.called("kind", "load", "docker-image") == OTHERS


def test_an_upgrade_finds_its_chart(shell: Shell) -> None:
    upgrade = one_with(OPERATE, "helm upgrade")
    shell.run("export IMAGE_PREFIX=registry.example/leyden", "make images push package", upgrade)
    tag = {image.rpartition(":")[2] for image in shell.called("docker", "push")}
    assert len(tag) == 1
    assert {image.rpartition(":")[2] for image in shell.images()} - tag == {"17", "8.1"}


def test_other_code_has_another_tag(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    commit(tmp_path)

    def tag() -> str:
        command = ["make", "--silent", "image-tag"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    def changed(text: str) -> str:
        with (tmp_path / "Makefile").open("a") as makefile:
            makefile.write(f"# {text}\n")
        return tag()

    before = tag()
    assert len({before, changed("one"), changed("two")}) == 3
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert about["version"] == about["appVersion"]
    assert before.startswith(f"{about['version']}-g")
