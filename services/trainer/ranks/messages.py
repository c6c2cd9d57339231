"""The messages of rank 0 to all ranks; `follower` obeys. Inside a message all ranks call the same collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from leyden.libs.contracts.config import RunConfig
from leyden.services.trainer.rows.batch import Sample
from leyden.services.trainer.rows.progress import Progress


@dataclass(frozen=True)
class Load:
    """Load the learner of version 0, or the one right after the step of `progress` from `weights` and `checkpoint`.

    `start`: the weights of version 0 where they are not the base model's; `step`, `reference`: see `resume_learner`.
    """

    base: Path
    config: RunConfig
    resumed: tuple[Path, Path, Progress] | None = None
    start: Path | None = None
    step: int | None = None
    reference: tuple[Path, str] | None = None


@dataclass(frozen=True)
class Step:
    """Make a step on the rows of `samples`; all ranks have all of them, and each computes its share."""

    samples: Sequence[Sample]
    zero_variance: Sequence[Sample]


@dataclass(frozen=True)
class Adopt:
    """Replace the learner's weights by those of a folder, whose hash is `content_sha256`."""

    weights: Path
    content_sha256: str


@dataclass(frozen=True)
class Gather:
    """Send rank 0 your parts of some of the learner's weights."""

    names: Sequence[str]


@dataclass(frozen=True)
class Save:
    """Write your part of the optimiser's state into `folder`, in the background."""

    folder: Path
