"""Alarms on a terminal, a line each: rule, severity, since when, reason and remedy."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from rich.text import Text

from leyden.libs.cli.view.output import as_text
from leyden.libs.contracts.api.alarms import Alarm, ListedAlarm
from leyden.libs.contracts.api.runs import Run

Alarms = dict[tuple[str, int], tuple[str, Alarm]]
"""Alarms of a run's policies by their id and number, each with the words before it."""


def alarms_of(run: Run) -> list[tuple[str, Alarm]]:
    """The alarms that last of a run and of its further policies; words name such a policy."""
    further = [(f"policy {name}: ", one) for name, policy in run.policies.items() for one in policy.alarms]
    return [*(("", one) for one in run.alarms), *further]


def alarm_lines(run: Run) -> list[Text]:
    """A line for each alarm of a run and of its policies that lasts."""
    return [_coloured(words + alarm_line(one), one) for words, one in alarms_of(run)]


def alarm_news(run: Run, told: Alarms) -> list[Text]:
    """A line for each alarm that began or ended since the call before. Args: told: those that last, which it keeps"""
    now = {(one.run_id, one.number): (words, one) for words, one in alarms_of(run)}
    began = [words + alarm_line(one) for key, (words, one) in now.items() if key not in told]
    ended = [f"{words}{_rule(one)} has ended" for key, (words, one) in told.items() if key not in now]
    told.clear()
    told.update(now)
    return list(map(as_text, [*ended, *began]))


def listed_lines(alarms: Sequence[ListedAlarm]) -> list[Text]:
    """A line for each alarm of the list of all runs, with its run and its end."""
    return [_coloured(_listed(one), one) for one in alarms]


def alarm_line(alarm: Alarm, end: str = "") -> str:
    """Rule, reason and remedy of an alarm, and since when it lasts. Args: end: words for its end"""
    return f"{_rule(alarm)}, {alarm.severity} since {_second(alarm.since)}{end}: {alarm.reason}: {alarm.remedy}"


def _listed(alarm: ListedAlarm) -> str:
    ends = {
        "active": "",
        "lasted": f" until the run's end{f' at {_second(alarm.run_finished_at)}' if alarm.run_finished_at else ''}",
        "ended": f" until {_second(alarm.ended_at)}" if alarm.ended_at else "",
    }
    policy = f", policy {alarm.policy}" if alarm.policy else ""
    return f"{alarm.run_name} ({alarm.run_id}{policy}): {alarm_line(alarm, ends[alarm.state])}"


def _rule(alarm: Alarm) -> str:
    return f"alarm {alarm.name}{f' ({alarm.subject})' if alarm.name == 'setting' else ''}"


def _coloured(words: str, alarm: Alarm) -> Text:
    is_over = isinstance(alarm, ListedAlarm) and alarm.state != "active"
    return as_text(words, "" if is_over else "red" if alarm.severity == "critical" else "yellow")


def _second(moment: datetime) -> str:
    return moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")
