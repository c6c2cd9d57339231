"""The result of one check of `leyden doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """The result of one check. A `warning` costs speed or comfort; a `problem` keeps the platform from working."""

    name: str
    status: Literal["ok", "warning", "problem", "skipped"]
    detail: str
    remedy: str = ""
