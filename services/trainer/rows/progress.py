"""How far a run's files have come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """The high-water mark: `step` is the last step whose effect is in the files; `content_sha256` is of its weights."""

    run_id: str
    step: int
    content_sha256: str
