"""The rule about phases of the next step that stay open: agents at work, grading, credit, training.

A phase of a step lasts as long as its longest part: the attempt that took most, the last grade, the last group.
Engines that keep an old version have a rule of their own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from sqlalchemy import text

from leyden.libs.contracts.alarms import ALARM_RULES, Finding
from leyden.libs.contracts.config import RunConfig
from leyden.libs.store.database import ReadSession

SHORTEST_SECONDS = 60.0
"""Phases of a small model take seconds, and a pause of some seconds is none."""
WORDS = {
    "sample": (
        "an agent has been at work",
        "read the rollout's calls so far (`leyden rollout show`); `leyden status` tells whether engines answer, and the"
        " runner's time-out ends the attempt",
    ),
    "grade": (
        "an attempt has waited for its grade",
        "do graders run and judges answer? (`leyden status`, `leyden logs grader`)",
    ),
    "credit": (
        "a complete group has waited for its credit",
        "does credit run? (`leyden status`, `leyden logs credit`)",
    ),
    "train": (
        "the trainer has had all groups of its step",
        "read its log (`leyden logs trainer`): does it run, and has it memory and disk?",
    ),
}
"""The phases with the reason of a long one and its remedy."""

# The newest steps, each with the longest of its rollouts and groups in each phase, in seconds.
_EARLIER = text("""
    SELECT step, extract(epoch FROM max(tried.finished_at - tried.started_at))::float8 AS sample,
        extract(epoch FROM max(gradings.settled_at - tried.finished_at))::float8 AS grade,
        extract(epoch FROM max(credit.created_at - groups.finished_at))::float8 AS credit,
        extract(epoch FROM max(steps.created_at) - greatest(max(credit.created_at), max(before.created_at)))::float8
            AS train
    FROM steps LEFT JOIN steps AS before ON before.run_id = steps.run_id AND before.number = steps.number - 1
    JOIN step_groups AS used ON used.run_id = steps.run_id AND used.step = steps.number
    JOIN groups ON groups.id = used.group_id
    JOIN group_credits AS credit ON credit.group_id = groups.id AND credit.run_id = used.run_id
    LEFT JOIN rollouts ON rollouts.group_id = groups.id AND rollouts.rerolls_of IS NULL
    LEFT JOIN attempts AS tried ON tried.rollout_id = rollouts.id AND tried.number = rollouts.attempt
    LEFT JOIN gradings ON gradings.rollout_id = rollouts.id AND gradings.attempt = rollouts.attempt
    WHERE steps.run_id = :run AND steps.number > (SELECT max(number) FROM steps WHERE run_id = :run) - :window
    GROUP BY step ORDER BY step
""")

# The oldest part of each phase that is open now. Groups beyond those of the step wait for the one after it.
_OPEN = text("""
    WITH waiting AS (
        SELECT rollouts.* FROM rollouts JOIN groups ON groups.id = rollouts.group_id
        WHERE rollouts.run_id = :run AND rollouts.state = 'queued' AND rollouts.rerolls_of IS NULL
            AND groups.evaluation_id IS NULL
    ), ready AS (
        SELECT groups.id, groups.finished_at, credit.created_at, credit.verdict
        FROM groups LEFT JOIN group_credits AS credit ON credit.group_id = groups.id AND credit.run_id = groups.run_id
        WHERE groups.run_id = :run AND groups.evaluation_id IS NULL AND groups.state = 'complete'
            AND NOT EXISTS (SELECT FROM step_groups AS used
                            WHERE used.group_id = groups.id AND used.run_id = groups.run_id)
    ), found AS (
        (SELECT 'sample' AS phase, tried.rollout_id AS oldest, tried.started_at AS since
         FROM waiting JOIN attempts AS tried ON tried.rollout_id = waiting.id AND tried.state = 'running'
         WHERE tried.started_at IS NOT NULL ORDER BY since LIMIT 1)
        UNION ALL
        (SELECT 'grade', waiting.id, tried.finished_at
         FROM waiting JOIN attempts AS tried
             ON tried.rollout_id = waiting.id AND tried.number = waiting.grading_attempt
         WHERE waiting.grading_attempt > waiting.excused_attempt AND tried.finished_at IS NOT NULL
         ORDER BY tried.finished_at LIMIT 1)
        UNION ALL
        (SELECT 'credit', id, finished_at FROM ready WHERE verdict IS NULL AND finished_at IS NOT NULL
         ORDER BY finished_at LIMIT 1)
        UNION ALL
        (SELECT 'train', id, greatest(created_at, (SELECT max(created_at) FROM steps WHERE run_id = :run))
         FROM ready WHERE verdict = 'credited' ORDER BY ready.created_at OFFSET :groups - 1 LIMIT 1)
    )
    SELECT found.phase, found.oldest,
        extract(epoch FROM clock_timestamp() - greatest(found.since, status.updated_at))::float8 AS seconds
    FROM found JOIN run_status AS status ON status.run_id = :run
""")


class OpenPhase(NamedTuple):
    """A phase that is open. `oldest`: the rollout or group that has been in it longest; `seconds`: for so long."""

    phase: str
    oldest: str
    seconds: float


async def of_phases(session: ReadSession, run_id: str, config: RunConfig) -> AsyncIterator[Finding]:
    """The rule for a run that works; grades of people take their time."""
    window = ALARM_RULES["phase_slow"].window
    rows = (await session.execute(_EARLIER, {"run": run_id, "window": window})).mappings().all()
    earlier = {phase: [row[phase] for row in rows if row[phase] is not None] for phase in WORDS}
    groups = config.sampling.groups_per_step + config.sampling.refills
    found = await session.execute(_OPEN, {"run": run_id, "groups": groups})
    waits = config.reward is not None and config.reward.wait is not None
    phases = [OpenPhase(*row) for row in found if not (waits and row.phase == "grade")]
    for finding in judge_phases(phases, earlier):
        yield finding


def judge_phases(phases: Sequence[OpenPhase], earlier: Mapping[str, Sequence[float]]) -> Iterator[Finding]:
    """Args: earlier: by phase the seconds that it took in each of the newest steps"""
    rule = ALARM_RULES["phase_slow"]
    for one in phases:
        before = earlier[one.phase]
        if len(before) < rule.at_least:
            continue
        usual = median(before)
        limit = max(SHORTEST_SECONDS, rule.limit * usual)
        if one.seconds > limit:
            words, remedy = WORDS[one.phase]
            reason = f"{words} for {one.seconds:.0f} s: in the last {len(before)} steps it took {usual:.1f} s (median)"
            figures: dict[str, float | str] = {"oldest": one.oldest, "seconds": one.seconds, "steps": len(before)}
            figures |= {"median_seconds": usual, "limit_seconds": limit}
            yield Finding(rule.name, f"{one.phase}: {reason}", figures, remedy, one.phase)
