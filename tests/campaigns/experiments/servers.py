"""Scripts beside an example's agent: the one that writes its tasks, and servers that print their port."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def server_of(command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None) -> Iterator[int]:
    """Runs the command in the folder; yields the port that it prints."""
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.terminate()


@contextmanager
def example_server(command: Sequence[str], folder: Path) -> Iterator[str]:
    """Runs the command in the folder; yields the address of its chat completions."""
    with server_of(command, folder) as port:
        yield f"http://127.0.0.1:{port}/v1"


def write_example_tasks(interpreter: str, agent: Path, out: Path, seed: int, *further: str) -> None:
    """Writes `train.jsonl` and `heldout.jsonl` of a seed into the folder `out`. Args: further: of `tasks.py`"""
    subprocess.run([interpreter, "tasks.py", "--out", str(out), "--seed", str(seed), *further], cwd=agent, check=True)
