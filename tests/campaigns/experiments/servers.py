"""Servers of examples: scripts that print the port on which they answer."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def example_server(command: Sequence[str], folder: Path) -> Iterator[str]:
    """Runs the command in the folder; yields the address of its chat completions."""
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
        finally:
            process.terminate()
