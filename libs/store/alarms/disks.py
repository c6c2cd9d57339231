"""The rule about disks that services write to: every run that has not ended needs them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from leyden.libs.contracts.alarms import ALARM_RULES, Finding
from leyden.libs.contracts.api.waiting import NEEDED_DISK_BYTES, Volume

WORDS = {"versions": "versions and checkpoints", "database": "the database"}


def of_disks(volumes: Sequence[Volume]) -> Iterator[Finding]:
    """The disks that are nearly full, each once; one that is not known raises nothing.

    The subject is `database` where versions lie on the same disk, so that the first version changes no alarm.
    """
    shared: dict[str, Volume] = {one.same_disk_as: one for one in volumes if one.same_disk_as is not None}
    for one in volumes:
        if not one.nearly_full or one.same_disk_as is not None or one.free_bytes is None or one.total_bytes is None:
            continue
        other = shared.get(one.name)
        names = " and ".join(WORDS[name] for name in (one.name, *([other.name] if other else [])))
        sizes = {"free_bytes": one.free_bytes, "total_bytes": one.total_bytes, "limit_bytes": NEEDED_DISK_BYTES}
        free, total, limit = (f"{size / 2**30:.1f} GiB" for size in sizes.values())
        figures: dict[str, float | str] = {**sizes}
        if one.path is not None:
            figures["folder"] = one.path
        reason = f"the disk of {names} has {free} free of {total}, less than {limit}"
        yield Finding(ALARM_RULES["disk_low"].name, reason, figures, subject=other.name if other else one.name)


def is_unknown(subject: str, volumes: Sequence[Volume]) -> bool:
    """Whether nobody can tell if the disk of an alarm has room again."""
    return not any(one.name == subject and one.nearly_full is not None for one in volumes)
