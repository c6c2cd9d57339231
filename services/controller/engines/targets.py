"""A policy version that an engine should serve."""

from __future__ import annotations

from typing import NamedTuple


class TargetVersion(NamedTuple):
    """The policy version that every engine should serve, the folder of its weights, and their hash on record."""

    run_id: str
    version: int
    path: str
    content_sha256: str
