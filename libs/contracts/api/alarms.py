"""Alarms of runs, as every reader gets them."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import Field

from leyden.libs.contracts.api.body import Body, Page

Severity = Literal["warning", "critical"]
"""`critical`: the run makes no progress. `warning`: it learns less than it could, or may soon make none."""


class Alarm(Body):
    """Trouble of a run, by one rule of the table of alarms (`docs/reference/alarms.md`)."""

    run_id: str
    number: int
    """From 1 within the run, in the order in which they were raised."""
    name: str
    """The rule."""
    subject: str | None = None
    """The tool, component, field or phase that it is about; null for the run as a whole."""
    severity: Severity
    since: datetime
    ended_at: datetime | None = None
    """Null while it lasts, and where it lasted until the end of the run."""
    reason: str
    evidence: dict[str, float | str] = Field(default_factory=dict)
    """The figures by which the rule judged last, by name."""
    remedy: str


AlarmState = Literal["active", "lasted", "ended"]
"""`active`: the rule holds, and the run goes on. `lasted`: the alarm lasted until the end of its run. `ended`: the rule
did not hold any more."""


class ListedAlarm(Alarm):
    """An alarm with its run, in the list of the alarms of all runs."""

    run_id: str
    """The run, of whichever of its policies the alarm is."""
    policy: str | None
    """The further policy of the run whose alarm it is; null for the run itself."""
    run_name: str
    run_finished_at: datetime | None
    """The end of an alarm that lasted until the end of its run."""
    state: AlarmState


class AlarmPage(Page[ListedAlarm], use_attribute_docstrings=True):
    """A page of alarms: active ones first, then those that began last."""

    names: dict[str, int] | None = None
    """Alarms by rule that match the filter, its name apart; on the first page alone."""


EventName = Literal["completed", "failed", "stalled", "alarm", "alarm_ended"]


class RunEvent(Body):
    """The body that the controller posts to the operator's webhook."""

    id: str
    """The same in every delivery of the event: a receiver that has seen it ignores it."""
    event: EventName
    at: datetime
    run_id: str
    policy: str | None = None
    """The further policy of the run whose alarm it is; null for the run itself."""
    run_name: str
    phase: str
    reason: str | None
    """The reason of the run's phase."""
    alarm: Alarm | None = None
    """The alarm that began or ended; null for `completed` and `failed`."""
