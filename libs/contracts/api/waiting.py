"""Rollouts that wait for people's grades, and the state of the services."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import Field

from leyden.libs.contracts.api.body import Body, Page


class MissingFeedback(Body):
    """A component of a rollout's reward that waits for values."""

    component: str
    needed: int
    """Values that `reward.wait.values` waits for."""
    given: int


class WaitingRollout(Body):
    """A rollout whose grading waits for feedback."""

    rollout_id: str
    run_id: str
    run_name: str
    attempt: int
    task_number: int
    task: str
    """The task as JSON; a long one is cut."""
    output: str
    """The end of the agent's output."""
    missing: list[MissingFeedback]
    """In the order of the run's document."""
    since: datetime
    """The end of the attempt."""
    due_at: datetime
    """It is graded without the missing values then (`reward.wait.seconds`)."""


class WaitingPage(Page[WaitingRollout], use_attribute_docstrings=True):
    """A page of rollouts that wait for feedback, those that ended first at its beginning."""

    total: int | None = None
    """Count of all of them; on the first page alone."""


class ServiceState(Body):
    """The processes of one service, as the database sees them."""

    name: str
    connections: int
    """Its connections to the database; 0: none of its processes is connected."""
    active_at: datetime | None
    """The last statement over one of them; null without a connection."""


NEEDED_DISK_BYTES = 5 * 2**30
"""Free bytes below which a disk is nearly full: a training may write as much within minutes."""


class Volume(Body):
    """A disk that services write to, as the API's machine sees it."""

    name: Literal["versions", "database"]
    """`versions`: the folder of the newest version, which has checkpoints beside it; `database`: that of Postgres."""
    path: str | None
    free_bytes: int | None
    total_bytes: int | None
    """Null where the API cannot tell, as is `free_bytes`."""
    nearly_full: bool | None
    """Whether less than 5 GiB is free, which `leyden doctor` asks for; null where that is not known."""
    same_disk_as: Literal["versions"] | None = None
    """The volume before this one that lies on the same disk, so that both have the same free bytes."""
    reason: str | None = None
    """Why the API cannot tell."""


class Platform(Body):
    """The services, the work that waits, and disk space."""

    services: list[ServiceState]
    queued_rollouts: int
    live_attempts: int
    waiting_grades: int
    """Ended attempts that a grader may take or has, those that wait for feedback left out."""
    waiting_feedback: int
    """Ended attempts that wait for feedback."""
    database_bytes: int
    weights_bytes: int
    """Sizes of all versions whose files are there, as trainers recorded them; checkpoints are not among them."""
    volumes: list[Volume] = Field(default_factory=list)
    """The disks of versions and database; empty in answers of an older platform."""
