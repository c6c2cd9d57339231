"""A policy version that an engine should serve."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from leyden.libs.contracts.ids import weight_version


class TargetVersion(NamedTuple):
    """The policy version that every engine should serve, the folder of its weights, and their hash on record."""

    run_id: str
    version: int
    path: str
    content_sha256: str

    @property
    def label(self) -> str:
        """The `weight_version` of an engine that serves it."""
        return weight_version(self.run_id, self.version)

    @property
    def is_own(self) -> bool:
        """Whether the run made or copied the weights; version 0 is otherwise the base model."""
        return self.version > 0 or self.run_id in Path(self.path).parts
