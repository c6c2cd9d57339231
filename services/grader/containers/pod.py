"""Works inside the pod of a container grader, before and after it: `python -m … unpack` and `python -m … collect`.

`unpack` writes the attempt's files below /logs/agent and empties /logs/verifier. `collect` makes the verdict the last
words of its container, which Kubernetes has for as long as the Job lives. It runs with the standard library alone.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import stat
import sys
from pathlib import Path

ATTEMPT = Path("/var/run/leyden/attempt.json.gz")
AGENT = Path("/logs/agent")
VERIFIER = Path("/logs/verifier")
LAST_WORDS = Path("/dev/termination-log")
EXIT = ".exit"
"""The file below VERIFIER with the verifier's exit status."""
VERDICTS = ("reward.json", "reward.txt")
"""The first of these files that exists counts."""
MAX_BYTES = 2_500
"""The largest verdict. Why: Kubernetes has 4,096 bytes for last words, and JSON may escape some."""


def unpack(attempt: Path = ATTEMPT, agent: Path = AGENT, verifier: Path = VERIFIER) -> None:
    """Writes the files of the attempt, and removes any verdict of before."""
    for name, text in json.loads(gzip.decompress(attempt.read_bytes())).items():
        (agent / name).parent.mkdir(parents=True, exist_ok=True)
        (agent / name).write_text(text, encoding="utf-8")
    for left in verifier.iterdir():
        shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()


def collect(verifier: Path = VERIFIER, last_words: Path = LAST_WORDS) -> None:
    """Writes the verdict as it stands: the grader service judges it."""
    found: dict[str, object] = {"exit": _text(verifier / EXIT)}
    for name in VERDICTS:
        if (text := _text(verifier / name)) is not None:
            found |= {"file": name, "text": text}
            break
    last_words.write_text(json.dumps(found, ensure_ascii=False))


def _text(path: Path) -> str | None:
    """The first bytes of a regular file, no link; None for anything else."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        return file.read(MAX_BYTES + 1).decode(errors="replace")


if __name__ == "__main__":
    if sys.argv[1] == "unpack":
        unpack()
    else:
        collect()
