"""A prompt to optimise: its tasks, the model that rewrites it, and the command as a process.

The agent answers with the question itself, and in capital letters, as the tasks want, where the prompt says so.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.fakes.judge import Said, ScriptedJudge
from tests.support.shared import ROOT

AGENT = ROOT / "tests/agents/prompted.py"
KEY = "key-of-the-rewriter"
BETTER = "Answer in capital letters. {task.secret}"
TASKS = [{"question": word, "answer": word.upper()} for word in ("one", "two", "three", "four")]


def rewritten(body: dict[str, Any], number: int) -> Said:
    """The second rewriting helps: the reflection shows the wrong answers and the right ones."""
    [message] = body["messages"]
    assert "answer: " in message["content"] and "Reward: 0" in message["content"]
    return Said(f"Of course:\n```\n{BETTER if number else 'Answer.'}\n```")


def document(**environment: str) -> dict[str, Any]:
    return {
        "name": "capitals",
        "dataset": "words",
        "agent": {
            "command": ["{python}", "-I", "-S", str(AGENT)],
            "environment": {"SYSTEM_PROMPT": "Repeat.", **environment},
        },
        "evaluation": {"dataset": "words"},
    }


@contextmanager
def optimising(url: str, token: str, rewriter: ScriptedJudge, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The command as a process, which is killed at the block's end. Args: folder: with run.json; results are in out"""
    words = ("prompts", "optimise", str(folder / "run.json"), "--prompt", "SYSTEM_PROMPT", "--reflection", "rewriter")
    options = ("--budget", "60", "--examples", "2", "--to", str(folder / "out"), "--json")
    process = subprocess.Popen(
        [sys.executable, "-m", "leyden.libs.cli", "--url", url, "--token", token, *words, *options],
        stdout=subprocess.PIPE,
        env={**os.environ, "LEYDEN_REFLECTION_URL": rewriter.url, "LEYDEN_REFLECTION_API_KEY": KEY},
    )
    with process:
        try:
            yield process
        finally:
            process.kill()
