"""Free disk space of the folders that services write to, where the API's machine has them."""

from __future__ import annotations

import shutil

from leyden.libs.contracts.api.waiting import NEEDED_DISK_BYTES, Volume

NO_VERSION = "no run has trained a version whose files are there"
ELSEWHERE = "Postgres is on another machine, or tells its folder to none but administrators"


def measured(versions: str | None, database: str | None) -> list[Volume]:
    """Args: versions, database: folders; None: not known"""
    return [
        Volume.model_validate({"name": name, "path": path, **_space(path, otherwise)})
        for name, path, otherwise in (("versions", versions, NO_VERSION), ("database", database, ELSEWHERE))
    ]


def _space(path: str | None, otherwise: str) -> dict[str, int | str | None]:
    """Args: otherwise: the reason where no path is known"""
    unknown: dict[str, int | str | None] = {"free_bytes": None, "total_bytes": None, "nearly_full": None}
    if path is None:
        return {**unknown, "reason": otherwise}
    try:
        found = shutil.disk_usage(path)
    except FileNotFoundError:
        return {**unknown, "reason": f"the API's machine has no folder {path}"}
    except OSError as error:
        return {**unknown, "reason": f"the API cannot read {path}: {error}"}
    return {"free_bytes": found.free, "total_bytes": found.total, "nearly_full": found.free < NEEDED_DISK_BYTES}
