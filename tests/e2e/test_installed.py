"""The wheel works on its own: installed without the checkout, it trains an agent's model and runs the demo."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.campaigns.soak import bandit_run
from tests.support.long import long_only
from tests.support.shared import ROOT
from tests.support.tiny_model import make_tiny_model

PARTS = ("leyden", "libs", "services", "examples", "pyproject.toml", "README.md", "LICENSE")


class Installation:
    """A virtual environment that holds the wheel, and sees the dependencies of the interpreter that runs the tests."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "venv" / "bin"
        self.outside = folder / "outside"
        self.outside.mkdir()
        self.model = make_tiny_model(folder / "model", vocab_size=2048)
        _speak_of_tools(self.model)

    def run(self, *words: str, seconds: float = 60.0) -> str:
        """The standard output of a program of the environment, run outside of the checkout."""
        # Without what would lead to the checkout.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LEYDEN"))}
        variables = {"LEYDEN_HOME": str(self.outside / "home"), "LEYDEN_MODEL_PATH": str(self.model)}
        threads = {"OMP_NUM_THREADS": "1"}
        ended = subprocess.run(
            [str(self.bin / words[0]), *words[1:]],
            cwd=self.outside,
            env=inherited | variables | threads,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert ended.returncode == 0, f"{words}: {ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
        return ended.stdout


def _speak_of_tools(model: Path) -> None:
    """Most tokens of the tiny model become a call of one of the flight agent's tools, so that its rewards differ."""
    for file in model.glob("*.json"):
        text = file.read_text()
        for filler in range(2048):
            # The space changes nothing for the flight agent, and is the bandit's other arm.
            tool = (" memory", "search")[filler % 2]
            text = text.replace(f'"<filler_{filler}>"', f'"{tool}: {filler}"')
        file.write_text(text)


@pytest.fixture
def installation() -> Iterator[Installation]:
    # Not pytest's folder: agents may run as another user, who must be able to start this environment's Python.
    folder = Path(tempfile.mkdtemp(prefix="leyden-installed-"))
    folder.chmod(0o755)
    try:
        _install(folder, _build(folder / "build"))
        yield Installation(folder)
    finally:
        shutil.rmtree(folder)


def _build(folder: Path) -> Path:
    """The wheel of a copy of the checkout: setuptools would pick up what an earlier build left in its own folder."""
    source = folder / "source"
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, source / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, source / part)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--quiet", "--wheel-dir", str(folder), str(source)], check=True)
    [wheel] = folder.glob("leyden-*.whl")
    return wheel


def _install(folder: Path, wheel: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index"]
    subprocess.run([*command, "--quiet", str(wheel)], check=True)
    [packages] = (folder / "venv").glob("lib/python*/site-packages")
    # A path file brings folders alone: the path file of the checkout's own editable installation is not read.
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))


def test_the_wheel_holds_every_part_and_sees_nothing_of_the_checkout(installation: Installation) -> None:
    run = installation.run
    place = run("python", "-c", "import leyden; from leyden import Client; print(leyden.__file__)").strip()
    assert Path(place).is_relative_to(installation.bin.parent), place
    for gone in ("libs", "services", "examples", "tests", "leyden.tests"):
        assert run("python", "-c", f"import importlib.util as u; print(u.find_spec({gone!r}))") == "None\n", gone

    page = run("python", "-c", "from leyden.services.api.console_page import STATIC; print(*STATIC.rglob('*.*'))")
    assert [suffix for suffix in (".html", ".js", ".css") if suffix not in page] == [], page
    assert "demo" in run("leyden", "--help")


@long_only
@pytest.mark.timeout(900)
def test_the_wheel_trains_and_demonstrates_outside_of_the_checkout(installation: Installation, tmp_path: Path) -> None:
    run = installation.run
    agent = ROOT / "tests" / "agents" / "bandit.py"
    shutil.copy(agent.with_name("plain_http.py"), installation.outside)
    document = bandit_run(tmp_path / "received.log", "installed", 1, sampling={"group_size": 4, "groups_per_step": 1})
    document["agent"]["command"][-1] = str(shutil.copy(agent, installation.outside))
    (installation.outside / "run.json").write_text(json.dumps(document))
    (installation.outside / "bandit.jsonl").write_text('{"number": 1}\n{"number": 2}\n')
    assert "/#sign-in=" in run("leyden", "up", "--detach", "--free-ports", seconds=120)
    try:
        run("leyden", "dataset", "upload", "bandit.jsonl")
        made = json.loads(run("leyden", "run", "create", "run.json", "--json"))["id"]
        run("leyden", "run", "watch", made, seconds=120)
        ended = json.loads(run("leyden", "run", "show", made, "--json"))
    finally:
        assert "stopped" in run("leyden", "down", seconds=120)
    assert (ended["phase"], ended["progress"]["step"]) == ("completed", 1)

    shown = run("leyden", "demo", "--steps", "1", "--evaluation-tasks", "1", seconds=240)
    last = json.loads(shown.splitlines()[-1])
    assert (last["steps"], last["held_out_tasks"]) == (1, 1)
    assert "<svg" in Path(last["report"]).read_text() and "/#sign-in=" in shown
