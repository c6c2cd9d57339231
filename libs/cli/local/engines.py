"""The engine that `leyden up` uses: the CPU engine, an SGLang that it starts, or engines that already run."""

from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from leyden.libs.cli.errors import CommandError, Exit
from leyden.libs.cli.local.services import Sglang

SGLANG = "sglang==0.5.23"
"""The version that the tests run; 0.5.20 is the oldest that answers as the platform expects."""
FIND_SGLANG = "import importlib.util, sys; sys.exit(importlib.util.find_spec('sglang') is None)"


@dataclass(frozen=True)
class EngineChoice:
    """The options of `leyden up` about engines; `urls` have no trailing slash."""

    kind: Literal["cpu", "sglang"] = "cpu"
    urls: tuple[str, ...] = ()
    arguments: str = ""
    python: Path | None = None

    def options(self) -> list[str]:
        """The same choice as options of the command."""
        words = [word for url in self.urls for word in ("--engine-url", url)]
        words += ["--engine", self.kind] if self.kind != "cpu" else []
        words += [f"--engine-args={self.arguments}"] if self.arguments else []
        return words + (["--engine-python", str(self.python)] if self.python else [])

    def sglang(self) -> Sglang | None:
        """The SGLang to start; None where none is.

        Raises: CommandError: the options contradict each other, a URL is none, or the environment has no SGLang
        """
        for url in self.urls:
            if not _is_address(url):
                raise CommandError(f"--engine-url {url}: write an address such as http://127.0.0.1:30000", Exit.USAGE)
        if self.kind == "cpu":
            if self.arguments or self.python:
                raise CommandError("--engine-args and --engine-python need --engine sglang", Exit.USAGE)
            return None
        if self.urls:
            raise CommandError("choose --engine-url or --engine sglang, not both", Exit.USAGE)
        try:
            arguments = tuple(shlex.split(self.arguments))
        except ValueError as error:
            raise CommandError(f"--engine-args {self.arguments}: {error}", Exit.USAGE) from error
        # Not resolved: the link in a virtual environment is what names the environment.
        python = (self.python or Path(sys.executable)).absolute()
        if not _has_sglang(python):
            raise CommandError(
                f"{python} has no sglang: install it into an environment of its own (`python -m venv ENV && "
                f"ENV/bin/pip install {SGLANG}`) and name it with --engine-python ENV/bin/python"
            )
        return Sglang(python, arguments)


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return parts.scheme in {"http", "https"} and bool(parts.hostname)


def _has_sglang(python: Path) -> bool:
    try:
        return subprocess.run([python, "-c", FIND_SGLANG], check=False, capture_output=True).returncode == 0
    except OSError as error:
        raise CommandError(f"--engine-python {python}: {error.strerror}", Exit.USAGE) from error
