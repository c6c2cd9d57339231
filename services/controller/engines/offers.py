"""One version that is offered to one engine until the engine serves it: since when, how often, and when again."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import UTC, datetime

from leyden.services.controller.engines.targets import TargetVersion

LONGEST_PAUSE_SECONDS = 300.0


def utc_now() -> datetime:
    """The time of day, to the second."""
    return datetime.now(UTC).replace(microsecond=0)


def since(moment: datetime) -> str:
    """Words for the beginning of a trouble; they stay equal, so that a run's reason is written once."""
    return f"since {moment:%H:%M:%S} UTC"


@dataclass
class Offer:
    """The version that an engine is to serve, with the engine's failures to load it.

    `label`: the weights that the engine served after the last failure; other ones mean that it restarted.
    """

    target: TargetVersion
    began: datetime = field(default_factory=utc_now)
    failures: int = 0
    cause: str | None = None
    label: str | None = None
    retry_at: float = 0.0

    def replaced(self, target: TargetVersion) -> Offer:
        """The offer of another version to an engine that has not loaded this one: the trouble is as old as before."""
        return Offer(target, self.began if self.failures else utc_now())

    def is_due(self, label: str | None = None) -> bool:
        """Whether to offer the version now.

        Args: label: the weights that the engine serves; None where nobody asked
        """
        return time.monotonic() >= self.retry_at or label != self.label

    def fail(self, cause: str, pause_seconds: float, label: str | None = None) -> None:
        """Counts a failure. Pauses double from `pause_seconds` to five minutes."""
        self.failures += 1
        self.cause, self.label = cause, label
        self.retry_at = time.monotonic() + min(pause_seconds * 2 ** min(self.failures - 1, 20), LONGEST_PAUSE_SECONDS)

    def wait_for_files(self, cause: str) -> None:
        """Names files that are damaged or away, which is no failure of the engine; every poll looks again."""
        self.cause = cause

    def retry_now(self) -> None:
        """Offers the version at the next poll: the engine was away, and may have restarted."""
        self.retry_at = 0.0

    def trouble(self, patience_seconds: float) -> str | None:
        """Says, for users, why the engine does not serve the version; None while it loads for the first time.

        Args: patience_seconds: a first load of this time is no trouble
        """
        if self.cause is not None:
            tries = {0: "", 1: "1 try "}.get(self.failures, f"{self.failures} tries ")
            return f"{self.cause} ({tries}{since(self.began)})"
        if (utc_now() - self.began).total_seconds() < patience_seconds:
            return None
        return f"loading version {self.target.version} {since(self.began)}"
