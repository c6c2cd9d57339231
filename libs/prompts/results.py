"""The folder of an optimisation for people: each version with its scores, and the text of the best one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FILE = "versions.json"


@dataclass(frozen=True)
class Version:
    """One version of the prompts.

    `parents`: the versions that it was rewritten from. `scores`: the mean reward of each held-out task, in the order of
    the dataset; None where it was no better than its parent on the tasks of its reflection. `run`: the one with its
    rollouts.
    """

    number: int
    parents: tuple[int, ...]
    texts: Mapping[str, str]
    scores: tuple[float, ...] | None
    run: str | None

    @property
    def score(self) -> float | None:
        """The mean over the held-out tasks."""
        return sum(self.scores) / len(self.scores) if self.scores else None


def best_of(versions: Sequence[Version]) -> Version:
    """Returns the version with the highest score, the first of equal ones."""
    return max((one for one in versions if one.score is not None), key=lambda one: (one.score or 0.0, -one.number))


def best_run(folder: Path) -> str | None:
    """Returns the run of the best version in a folder with results; None without any."""
    try:
        found = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    run: str | None = next(one["run"] for one in found["versions"] if one["version"] == found["best"])
    return run


def write_results(folder: Path, versions: Sequence[Version], names: Sequence[str]) -> None:
    """Replaces `versions.json` and, for each prompt, `NAME.txt`."""
    best = best_of(versions)
    rows = [
        {
            "version": one.number,
            "parents": one.parents,
            "score": one.score,
            "scores": one.scores,
            "run": one.run,
            "prompts": dict(one.texts),
        }
        for one in versions
    ]
    _replace(folder / FILE, json.dumps({"best": best.number, "versions": rows}, indent=2, ensure_ascii=False) + "\n")
    for name in names:
        _replace(folder / f"{name}.txt", best.texts[name])


def _replace(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
