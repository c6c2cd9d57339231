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
    """Assemble the learner of version 0, or restore the one right after a step.

    resumed: folder of the step's weights, folder of its checkpoint, and high-water mark; None for version 0.
    start: the weights of version 0; None for the base model's.
    from_checkpoint: the files of the step's version are lost, and its weights are those of the checkpoint alone.
    step: number from which a restored learner counts on; None for that of its high-water mark.
    reference: folder of the KL reference, and the hash on record where it is a version that the run wrote; None for the
        learner's own weights, or without a KL penalty.
    teacher: folder of the teacher's weights, and the hash on record where they are a run's version; None without
        distillation, where no step follows, and where the policy itself is the teacher.
    """

    base: Path
    config: RunConfig
    resumed: tuple[Path, Path, Progress] | None = None
    start: Path | None = None
    from_checkpoint: bool = False
    step: int | None = None
    reference: tuple[Path, str | None] | None = None
    teacher: tuple[Path, str | None] | None = None


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
class Read:
    """Compute your share of the log-probabilities of these token sequences, with the learner's weights."""

    token_ids: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Compare:
    """Compute your share of the log-probabilities of these samples' tokens, with the weights of an older version.

    base: the folder of the run's model.
    """

    base: Path
    weights: Path
    samples: Sequence[Sample]


@dataclass(frozen=True)
class Gather:
    """Send rank 0 your parts of some of the learner's weights."""

    names: Sequence[str]


@dataclass(frozen=True)
class Save:
    """Write your part of the optimiser's state into `folder`, in the background."""

    folder: Path
