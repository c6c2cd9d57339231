"""Scripts beside an example's agent: the one that writes its tasks, and servers that print their port."""

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


def write_example_tasks(interpreter: str, agent: Path, out: Path, seed: int, *further: str) -> None:
    """Writes `train.jsonl` and `heldout.jsonl` of a seed into the folder `out`. Args: further: of `tasks.py`"""
    subprocess.run([interpreter, "tasks.py", "--out", str(out), "--seed", str(seed), *further], cwd=agent, check=True)
