"""A grading by a container, and the attempt's files as its Secret holds them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass

from leyden.libs.store.attempts import AttemptKey

MAX_PACKED = 700_000
"""Bytes of the packed files. Why: a Secret holds 1 MiB, and base64 adds a third."""


@dataclass(frozen=True)
class Verification:
    """One grading. Args: name: of its Job, the same for the same grading; run: the run's id; files: texts by name"""

    name: str
    run: str
    attempt: AttemptKey
    files: Mapping[str, str]


class PackedTooLarge(ValueError):
    """The files are too large for a Secret."""


def packed(files: Mapping[str, str]) -> bytes:
    """Raises: PackedTooLarge"""
    found = gzip.compress(json.dumps(files, ensure_ascii=False).encode("utf-8", "replace"), mtime=0)
    if len(found) > MAX_PACKED:
        raise PackedTooLarge(f"the attempt has {len(found)} packed bytes, and a grader's Secret holds {MAX_PACKED}")
    return found
