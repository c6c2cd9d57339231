"""Free disk space of the folders that services write to, where the API's machine has them."""

from __future__ import annotations

import shutil
from typing import Any

from leyden.libs.contracts.api.waiting import NEEDED_DISK_BYTES, Volume

NO_VERSION = "no run has trained a version whose files are there"
ELSEWHERE = "Postgres is on another machine, or tells its folder to none but administrators"


def measured(versions: str | None, database: str | None) -> list[Volume]:
    """Args: versions, database: folders; None: not known

    The database's stays unnamed: Postgres tells it to administrators alone.
    """
    return [
        Volume(name="versions", path=versions, **_space(versions, f"folder {versions}", NO_VERSION)),
        Volume(name="database", path=None, **_space(database, "folder of Postgres", ELSEWHERE)),
    ]


def _space(path: str | None, named: str, otherwise: str) -> dict[str, Any]:
    """Args: named: the folder in a reason; otherwise: the reason where no path is known"""
    unknown = {"free_bytes": None, "total_bytes": None, "nearly_full": None}
    if path is None:
        return {**unknown, "reason": otherwise}
    try:
        found = shutil.disk_usage(path)
    except FileNotFoundError:
        return {**unknown, "reason": f"the API's machine has no {named}"}
    except OSError as error:
        return {**unknown, "reason": f"the API cannot read the {named}: {error.strerror}"}
    return {"free_bytes": found.free, "total_bytes": found.total, "nearly_full": found.free < NEEDED_DISK_BYTES}
