"""The agents' environments: `python -m tests.frameworks.environments` builds those that are missing.

`NAME.txt` pins every package of one Python environment, `node/` those of Node.js. They are in .cache/agents.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
CACHE = Path(__file__).parents[3] / ".cache" / "agents"
NODE = "node"


def build(name: str) -> None:
    """Installs an environment, or does nothing where it has the pinned packages.

    Raises: subprocess.CalledProcessError: pip or npm failed
    """
    pins = FOLDER / (NODE if name == NODE else f"{name}.txt")
    wanted = "".join(path.read_text() for path in (sorted(pins.iterdir()) if pins.is_dir() else [pins]))
    ready = CACHE / name / ".ready"
    if ready.exists() and ready.read_text() == wanted:
        return
    print(f"building {name}", flush=True)
    shutil.rmtree(CACHE / name, ignore_errors=True)
    if name == NODE:
        shutil.copytree(pins, CACHE / name)
        _run("npm", "ci", "--no-audit", "--no-fund", "--loglevel=error", f"--prefix={CACHE / name}")
    else:
        _run(sys.executable, "-m", "venv", f"{CACHE / name}")
        pip = (f"{CACHE / name / 'bin' / 'pip'}", "install", "--quiet", "--disable-pip-version-check", "--no-compile")
        # The pins are complete, so that nothing is resolved.
        _run(*pip, "--no-deps", "--requirement", f"{pins}")
    ready.write_text(wanted)


def command(name: str, agent: Path) -> list[str]:
    """The words that start an agent in its environment."""
    if name == NODE:
        # Node.js looks for packages beside the program.
        return ["node", f"{shutil.copy(agent, CACHE / NODE / f'{agent.parent.name}-{agent.name}')}"]
    return [f"{CACHE / name / 'bin' / 'python'}", f"{agent}"]


def version(name: str, package: str) -> str:
    """The installed version of a package."""
    if name == NODE:
        document = json.loads((CACHE / NODE / "node_modules" / package / "package.json").read_text())
        return str(document["version"])
    folders = [f"{folder}" for folder in (CACHE / name / "lib").glob("python*/site-packages")]
    (found,) = importlib.metadata.distributions(name=package, path=folders)
    return found.version


def names() -> list[str]:
    """Every environment."""
    return [*sorted(path.stem for path in FOLDER.glob("*.txt")), *([NODE] if (FOLDER / NODE).is_dir() else [])]


def _run(*command: str) -> None:
    subprocess.run(command, check=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"})
