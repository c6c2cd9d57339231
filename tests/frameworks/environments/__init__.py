"""The agents' environments: `python -m tests.frameworks.environments` builds those that are missing.

`NAME.txt` pins every package of one Python environment, a folder `NAME` those of one of Node.js. They are in
.cache/agents. A line `# python: 3.12` names the interpreter of an environment whose packages need another one, and
`# asks for: smolagents openai` the packages that its agents name: with AGENTS_NEWEST=1 these have their newest versions
and bring what they need. Those environments are in .cache/agents-newest.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
NEWEST = os.environ.get("AGENTS_NEWEST") == "1"
CACHE = Path(__file__).parents[3] / ".cache" / ("agents-newest" if NEWEST else "agents")
DAY = f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}"


def build(name: str) -> None:
    """Installs an environment, or does nothing where it has the pinned packages, or today's newest ones.

    Raises: subprocess.CalledProcessError: pip or npm failed
    """
    pins = FOLDER / (name if _has_npm(name) else f"{name}.txt")
    wanted = "".join(path.read_text() for path in (sorted(pins.iterdir()) if pins.is_dir() else [pins]))
    wanted += DAY if NEWEST else ""
    ready = CACHE / name / ".ready"
    if ready.exists() and ready.read_text() == wanted:
        return
    print(f"building {name}", flush=True)
    shutil.rmtree(CACHE / name, ignore_errors=True)
    if _has_npm(name):
        shutil.copytree(pins, CACHE / name)
        asked = json.loads((pins / "package.json").read_text())["dependencies"]
        # Not `npm ci`: it refuses a lock without the optional packages of other systems.
        npm = ("npm", "install", "--no-audit", "--no-fund", "--loglevel=error", f"--prefix={CACHE / name}")
        _run(*npm, *(f"{package}@latest" for package in asked if NEWEST))
    else:
        _run(*_interpreter(wanted), "-m", "venv", f"{CACHE / name}")
        pip = (f"{CACHE / name / 'bin' / 'pip'}", "install", "--quiet", "--disable-pip-version-check", "--no-compile")
        # The pins are complete, so that nothing is resolved.
        _run(*pip, *(_header(wanted, "asks for").split() if NEWEST else ("--no-deps", "--requirement", f"{pins}")))
    ready.write_text(wanted)


def command(name: str, agent: Path) -> list[str]:
    """The words that start an agent in its environment."""
    if agent.suffix == ".sh":
        programs = CACHE / name / ("node_modules/.bin" if _has_npm(name) else "bin")
        return ["env", f"PATH={programs}:{os.environ['PATH']}", "sh", f"{agent}"]
    if _has_npm(name):
        # Node.js looks for packages beside the program.
        return ["node", f"{shutil.copy(agent, CACHE / name / f'{agent.parent.name}-{agent.name}')}"]
    return [f"{CACHE / name / 'bin' / 'python'}", f"{agent}"]


def version(name: str, package: str) -> str:
    """The installed version of a package."""
    if _has_npm(name):
        document = json.loads((CACHE / name / "node_modules" / package / "package.json").read_text())
        return str(document["version"])
    folders = [f"{folder}" for folder in (CACHE / name / "lib").glob("python*/site-packages")]
    (found,) = importlib.metadata.distributions(name=package, path=folders)
    return found.version


def names() -> list[str]:
    """Every environment."""
    of_npm = (path.parent.name for path in FOLDER.glob("*/package-lock.json"))
    return [*sorted(path.stem for path in FOLDER.glob("*.txt")), *sorted(of_npm)]


def _has_npm(name: str) -> bool:
    return (FOLDER / name).is_dir()


def _interpreter(pins: str) -> list[str]:
    version = _header(pins, "python")
    if not version:
        return [sys.executable]
    # pyenv hides the versions that nobody named.
    return ["env", f"PYENV_VERSION={version}", f"python{version}"]


def _header(pins: str, name: str) -> str:
    """Returns the text of the line `# name: …` of an environment; empty where it has none."""
    lines = (line.removeprefix(f"# {name}: ") for line in pins.splitlines() if line.startswith(f"# {name}: "))
    return next(lines, "")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"})
