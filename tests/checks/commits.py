"""Subjects of commits: `python -m tests.checks.commits`, part of `make lint`.

A subject is an imperative of at most 65 characters, after an optional part: `gateway: record partial calls`. The check
reads commits that origin/main does not have yet, since those can still be amended, and none before this file was added.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LENGTH = 65
# Words that end like a past tense, a participle or a plural, and are imperatives all the same.
IMPERATIVES = {
    "address",
    "bring",
    "bypass",
    "compress",
    "discuss",
    "embed",
    "express",
    "feed",
    "focus",
    "need",
    "pass",
    "ping",
}
IMPERATIVES |= {"press", "process", "proceed", "shed", "shred", "speed", "string", "suppress", "swing", "weed"}
NO_VERBS = {"a", "an", "the", "no", "one", "each", "every", "this", "that", "it", "its", "not", "more", "new", "old"}
NO_VERBS |= {
    "what",
    "who",
    "whose",
    "whom",
    "where",
    "which",
    "of",
    "when",
    "while",
    "for",
    "from",
    "in",
    "on",
    "to",
    "with",
}


def main() -> int:
    """Prints every wrong subject; exit status 1 when there is one."""
    wrong = [f"{commit[:9]} {subject}: {problem}" for commit, subject in _subjects() if (problem := check(subject))]
    print("\n".join(wrong))
    return 1 if wrong else 0


def check(subject: str) -> str | None:
    """The error of a subject; None for a good one."""
    _, _, words = subject.rpartition(": ") if re.match(r"[\w-]+(?:, [\w-]+)*: ", subject) else ("", "", subject)
    first = words.split(" ", 1)[0].lower()
    if len(words) > LENGTH:
        return f"{len(words)} characters; write at most {LENGTH}"
    if first in NO_VERBS or (first not in IMPERATIVES and re.search(r"(?:ed|ing|[^s]s)$", first)):
        return f"begins with {first!r}; begin with an imperative, such as `add` or `record`"
    return None


def _subjects() -> list[tuple[str, str]]:
    """Commits after the one that added this file and not on origin/main, without merges."""
    if _git("rev-parse", "--is-shallow-repository") != "false":
        return []
    added = _git("log", "--diff-filter=A", "--format=%H", "--", "tests/checks/commits.py").splitlines()
    if not added:
        return []
    pushed = ["^origin/main"] if _git("rev-parse", "--verify", "--quiet", "origin/main") else []
    log = _git("log", "--no-merges", "--format=%H %s", f"{added[-1]}..HEAD", *pushed)
    return [(line[:40], line[41:]) for line in log.splitlines()]


def _git(*words: str) -> str:
    """The output of git; empty where there is no repository."""
    ended = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return ended.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
