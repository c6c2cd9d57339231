"""Rules about the work between steps: what they consumed, the time since the last one, trainers and engines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from sqlalchemy import text

from leyden.libs.contracts.alarms import ALARM_RULES, Finding
from leyden.libs.contracts.call_counts import CallCounts, nothing_trains, tool_failures, total
from leyden.libs.contracts.config import Computation, RunConfig
from leyden.libs.contracts.judgements import judge
from leyden.libs.contracts.states import RunPhase
from leyden.libs.store.alarms.attempts import MAX_CAUSE
from leyden.libs.store.alarms.canaries import of_canaries
from leyden.libs.store.alarms.hacking import of_trends
from leyden.libs.store.alarms.phases import of_phases
from leyden.libs.store.alarms.steps import FIRST, NEWEST, MadeStep, judge_steps, seconds_between
from leyden.libs.store.database import ReadSession
from leyden.libs.store.read import step_figures
from leyden.libs.store.read.call_counts import absent_roles, of_steps, roles_seen
from leyden.libs.store.rewards import step_mean
from leyden.libs.store.runs.trainer_ends import trainer_ends
from leyden.libs.store.training import read_computation

MIN_TOOL_CALLS, MIN_CALLS, MIN_EQUAL_GROUPS = 10, 20, 4
"""Fewer prove nothing."""
SHORTEST_STALL_SECONDS = 60.0
"""Steps of a small model take seconds, and a pause of some seconds is none."""

_STEPS = text(f"""
    SELECT s.number, s.metrics, s.created_at, {step_mean("s.run_id", "s.number")} AS reward
    FROM steps s
    WHERE s.run_id = :run AND (s.number <= :first
        OR s.number > (SELECT max(number) FROM steps WHERE run_id = :run) - :newest)
    ORDER BY s.number
""")  # noqa: S608  # constants alone

_STALE = text("""
    SELECT (SELECT count(*) FROM step_groups g WHERE g.run_id = :run AND g.verdict = 'stale'
            AND g.created_at >= (SELECT created_at FROM steps WHERE run_id = :run AND number = :step)) AS stale,
           (SELECT count(*) FROM step_groups g WHERE g.run_id = :run AND g.step > :step) AS used
""")

# A group without a token that can be trained shows nothing.
_GROUPS = text("""
    SELECT has_variance, reward_mean, reward_std FROM group_credits
    WHERE run_id = :run AND verdict = 'credited' AND min_policy_version IS NOT NULL
    ORDER BY created_at DESC LIMIT :groups
""")

_EXCLUDED = text("""
    SELECT count(*) AS groups, count(*) FILTER (WHERE verdict = 'excluded') AS excluded,
           (array_agg(reason ORDER BY created_at DESC) FILTER (WHERE verdict = 'excluded'))[1] AS reason
    FROM (SELECT verdict, reason, created_at FROM group_credits
          WHERE run_id = :run ORDER BY created_at DESC LIMIT :groups) AS newest
""")

_WAITED = text("""
    SELECT extract(epoch FROM clock_timestamp() - greatest(
        s.updated_at, (SELECT max(created_at) FROM steps WHERE run_id = s.run_id)))::float8 AS seconds
    FROM run_status s WHERE s.run_id = :run
""")

_OLD_ENGINES = text("""
    SELECT e.url, e.detail, coalesce(a.policy_version, e.policy_version) AS version, newest.version AS newest,
           extract(epoch FROM clock_timestamp() - greatest(s.updated_at, newest.created_at))::float8 AS seconds
    FROM run_status s
    JOIN policy_versions newest ON newest.run_id = s.run_id
        AND newest.version = (SELECT max(version) FROM policy_versions WHERE run_id = s.run_id)
    JOIN engines e ON e.state <> 'unreachable'
    LEFT JOIN engine_adapters a ON a.url = e.url AND a.run_id = s.run_id
    WHERE s.run_id = :run AND (e.run_id = :run OR a.run_id = :run)
        AND coalesce(a.policy_version, e.policy_version) < newest.version
    ORDER BY e.url
""")

# Draining engines end on purpose.
_SILENT_ENGINES = text("""
    SELECT e.url, e.detail, extract(epoch FROM clock_timestamp() - greatest(s.updated_at, e.silent_since))::float8
        AS seconds
    FROM run_status s
    JOIN pools p ON s.run_id = ANY(p.run_ids)
    JOIN engines e ON e.pool = p.name AND e.state IN ('updating', 'unreachable') AND e.silent_since IS NOT NULL
    WHERE s.run_id = :run
    ORDER BY e.url
""")

_MERGES = text("SELECT adapters IS NULL FROM pools WHERE name = :pool")

_DAMAGED = text("""
    SELECT count(*), (array_agg(step ORDER BY created_at DESC))[1], (array_agg(cause ORDER BY created_at DESC))[1]
    FROM damaged_steps WHERE run_id = :run
""")


@dataclass(frozen=True)
class JudgedRun:
    """A run with what decides on the rules that apply to it."""

    id: str
    config: RunConfig
    phase: RunPhase


async def made_steps(session: ReadSession, run_id: str) -> list[MadeStep]:
    """The first and the newest steps of a run, in their order."""
    rows = await session.execute(_STEPS, {"run": run_id, "first": FIRST, "newest": NEWEST})
    # A run without a reference has a KL of 0, which no rule is about.
    found = ((row, step_figures.known(row.metrics, has_reference=True)) for row in rows)
    return [MadeStep(row.number, metrics, row.created_at, row.reward) for row, metrics in found]


async def of_progress(session: ReadSession, run: JudgedRun) -> AsyncIterator[Finding]:
    """The rules that hold about the document, steps, groups, trainers and engines."""
    computation = await read_computation(session, run.id)
    for one in judge(run.config, computation):
        if one.severity == "warns":
            yield Finding("setting", one.reason, {"field": one.path}, one.remedy, one.path)
    scope = {"run": run.id}
    steps = await made_steps(session, run.id)
    learns = run.config.algorithm.learns_from_rewards
    for finding in judge_steps(steps, run.config.training.max_logprob_gap):
        if learns or finding.name != "reward_flat":
            yield finding
    if learns:
        window = ALARM_RULES["groups_without_variance"].window
        groups = (await session.execute(_GROUPS, {**scope, "groups": window})).all()
        figures = [(row.has_variance, row.reward_mean, row.reward_std) for row in groups]
        for finding in judge_groups(figures, run.config.credit.baseline.min_spread):
            yield finding
        async for finding in of_trends(session, run.id, run.config, steps[-1].number if steps else 0):
            yield finding
    async for finding in _of_exclusions(session, run.id):
        yield finding
    async for finding in _of_calls(session, run, steps):
        yield finding
    async for finding in _of_time(session, run, steps):
        yield finding
    is_due = run.phase is RunPhase.RUNNING and steps and steps[-1].number < run.config.training.steps
    if is_due and run.config.algorithm.type != "sft":
        async for finding in of_phases(session, run.id, run.config):
            yield finding
    async for finding in _of_trainers(session, run, steps, computation):
        yield finding
    async for finding in of_canaries(session, run.id):
        yield finding


def judge_groups(
    groups: Sequence[tuple[bool, float | None, float | None]], min_spread: float = 0.0
) -> Iterator[Finding]:
    """Args: groups: of each whether its rewards differ by more than `min_spread`, their mean and their deviation, the
    newest first
    """
    rule = ALARM_RULES["groups_without_variance"]
    equal = [mean for differs, mean, _ in groups if not differs]
    near = sum(not differs and bool(deviation) for differs, _, deviation in groups) if min_spread else 0
    proves = len(groups) >= rule.at_least or len(equal) == len(groups) >= MIN_EQUAL_GROUPS
    if not proves or len(equal) < rule.limit * len(groups):
        return
    zero = sum(mean == 0 for mean in equal)
    figures = {"equal": len(equal), "zero": zero, "groups": len(groups), "share": len(equal) / len(groups)}
    which = (
        f"each of the last {len(groups)}" if len(equal) == len(groups) else f"{len(equal)} of the last {len(groups)}"
    )
    reason = f"in {which} groups all rewards are equal: there is nothing to learn from them"
    if near > len(equal) / 2:
        reason = f"in {which} groups no rewards differ by more than credit.baseline.min_spread ({min_spread:g})"
        remedy = f"write a smaller one: the rewards of {near} of these groups differ by less"
        yield Finding(rule.name, f"{reason}: none of them teaches", {**figures, "near": near}, remedy)
    elif zero == len(equal):
        remedy = "the tasks are too hard or the agent fails; read one with `leyden rollout show`"
        yield Finding(rule.name, f"{reason}; they are all 0", figures, remedy)
    else:
        yield Finding(rule.name, reason, figures)


def judge_tools(steps: Mapping[int, CallCounts]) -> Iterator[Finding]:
    """Tools most of whose calls failed in these steps. In its first steps a policy may not know a tool yet."""
    rule = ALARM_RULES["tool_fails"]
    if len(steps) < rule.at_least:
        return
    for tool, (failed, known) in tool_failures(total(steps.values())).items():
        if known >= MIN_TOOL_CALLS and failed > rule.limit * known:
            reason = (
                f"tool {tool} failed in {failed} of the {known} calls of the last {len(steps)} steps whose end is known"
            )
            figures = {"failed": failed, "calls": known, "share": failed / known, "steps": len(steps)}
            yield Finding(rule.name, reason, figures, subject=tool)


def judge_texts(steps: Mapping[int, CallCounts], weights: Set[str]) -> Iterator[Finding]:
    """Tools with an intermediate reward whose results have no status in most calls. Args: weights: tools with one"""
    rule = ALARM_RULES["tool_without_status"]
    counts = total(steps.values())
    known = {tool: calls for tool, (_, calls) in tool_failures(counts).items() if calls >= MIN_TOOL_CALLS}
    for tool in sorted(weights & known.keys()) if len(steps) >= rule.at_least else ():
        bare = counts.tools[tool].get("bare", 0)
        if bare > rule.limit * known[tool]:
            reason = (
                f"tool {tool} has an intermediate reward, and {bare} of its {known[tool]} results of the last"
                f" {len(steps)} steps are texts that show neither a success nor a failure"
            )
            figures = {"bare": bare, "calls": known[tool], "share": bare / known[tool], "steps": len(steps)}
            yield Finding(rule.name, reason, figures, subject=tool)


def judge_cut(steps: Mapping[int, CallCounts]) -> Iterator[Finding]:
    """Answers that were cut off in the newest of these steps."""
    rule = ALARM_RULES["answers_cut"]
    newest = total(steps[number] for number in sorted(steps)[-rule.window :])
    if len(steps) >= rule.at_least and newest.calls >= MIN_CALLS and newest.cut >= rule.limit * newest.calls:
        reason = (
            f"{newest.cut} of the {newest.calls} answers of the last {min(len(steps), rule.window)} steps were cut off"
        )
        yield Finding(rule.name, reason, {"cut": newest.cut, "calls": newest.calls, "share": newest.cut / newest.calls})


async def _of_exclusions(session: ReadSession, run_id: str) -> AsyncIterator[Finding]:
    rule = ALARM_RULES["groups_excluded"]
    row = (await session.execute(_EXCLUDED, {"run": run_id, "groups": rule.window})).one()
    if row.groups >= rule.at_least and row.excluded > rule.limit * row.groups:
        reason = f"credit excluded {row.excluded} of the last {row.groups} groups; the last: {row.reason}"
        figures = {"excluded": row.excluded, "groups": row.groups, "share": row.excluded / row.groups}
        yield Finding(rule.name, reason, figures)


async def _of_calls(session: ReadSession, run: JudgedRun, steps: Sequence[MadeStep]) -> AsyncIterator[Finding]:
    run_id, air = run.id, run.config.credit.air
    newest = [step.number for step in steps[-ALARM_RULES["tool_fails"].window :]]
    counts = await of_steps(session, run_id, newest)
    if steps and not steps[-1].metrics.get("trainable_tokens", 1):
        why, remedy = nothing_trains(counts.get(steps[-1].number, CallCounts()))
        reason = f"step {steps[-1].number} had no token that can be trained: {why}"
        yield Finding("nothing_trains", reason, {"trainable_tokens": 0, "step": steps[-1].number}, remedy)
    weights = air.weights.keys() if air is not None else set[str]()
    for finding in (*judge_tools(counts), *judge_texts(counts, weights), *judge_cut(counts)):
        yield finding
    for absent in (await absent_roles(session, run_id)).values():
        seen = await roles_seen(session, run_id, absent.roles)
        if roles := [role for role in absent.roles if role not in seen]:
            still = absent._replace(roles=roles)
            yield Finding("role_without_calls", still.reason, {"roles": ", ".join(roles), "calls": 0})
    rule = ALARM_RULES["stale_groups"]
    if len(newest) >= rule.at_least:
        row = (await session.execute(_STALE, {"run": run_id, "step": newest[0]})).one()
        groups = row.stale + row.used
        if row.stale >= rule.at_least and row.stale > rule.limit * groups:
            figures = {"stale": row.stale, "groups": groups, "share": row.stale / groups}
            reason = (
                f"{row.stale} of the last {groups} groups were older than the lag bound allows, and were not trained"
            )
            yield Finding(rule.name, reason, figures)


async def _of_time(session: ReadSession, run: JudgedRun, steps: Sequence[MadeStep]) -> AsyncIterator[Finding]:
    """Nothing while a run evaluates, waits for engines or for people: no step is due."""
    pace = seconds_between(steps)
    if run.phase is not RunPhase.RUNNING or pace is None or steps[-1].number >= run.config.training.steps:
        return
    rule = ALARM_RULES["stalled"]
    limit = max(SHORTEST_STALL_SECONDS, rule.limit * pace)
    waited = await session.scalar(_WAITED, {"run": run.id})
    awaits_people = run.config.reward is not None and run.config.reward.wait is not None
    if waited is not None and waited > limit and not awaits_people:
        reason = f"no step for {waited:.0f} s: usually one takes {pace:.0f} s"
        yield Finding(rule.name, reason, {"seconds": waited, "median_seconds": pace, "limit_seconds": limit})
    for row in await session.execute(_OLD_ENGINES, {"run": run.id}):
        if row.seconds > limit:
            cause = f": {row.detail[:MAX_CAUSE]}" if row.detail else ""
            behind = f"version {row.version}, {row.seconds:.0f} s after version {row.newest} was made"
            reason = f"engine {row.url} still serves {behind}{cause}"
            figures = {"version": row.version, "newest": row.newest, "seconds": row.seconds, "limit_seconds": limit}
            yield Finding("engines_stale", reason, figures, subject=row.url)
    for row in await session.execute(_SILENT_ENGINES, {"run": run.id}):
        if row.seconds > limit:
            cause = f": {row.detail[:MAX_CAUSE]}" if row.detail else ""
            reason = f"engine {row.url} has served no weights for {row.seconds:.0f} s{cause}"
            yield Finding("engines_stale", reason, {"seconds": row.seconds, "limit_seconds": limit}, subject=row.url)


async def _of_trainers(
    session: ReadSession, run: JudgedRun, steps: Sequence[MadeStep], computation: Computation | None
) -> AsyncIterator[Finding]:
    rule, made = ALARM_RULES["trainer_ends"], steps[-1].number if steps else 0
    ends, last_end = await trainer_ends(session, run.id)
    if last_end is not None and last_end.step > made - rule.window:
        reason = (
            f"a trainer of the run ended {ends} times; the last, after step {last_end.step}:"
            f" {last_end.reason[:MAX_CAUSE]}"
        )
        yield Finding(rule.name, reason, {"ends": ends, "step": last_end.step, "state": last_end.state})
    if computation is not None and computation.export_dtype == "bfloat16" and run.config.training.lora is not None:
        pool, place = run.config.pool, "training.lora"
        if await session.scalar(_MERGES, {"pool": pool}):
            reason = (
                f"engines of pool {pool!r} load adapters merged into weights in bfloat16: rounding loses small updates"
            )
            yield Finding("setting", reason, {"field": place}, "give the pool `adapters` (docs/gpu.md)", place)
    if computation is not None and computation.moved_to is not None:
        reason = (
            f"the trainer runs on {computation.moved_to}, and keeps the settings that it resolved on"
            f" {computation.device}: {computation.words}"
        )
        yield Finding("trainer_moved", reason, {"device": computation.moved_to, "resolved_on": computation.device})
    times, step, cause = (await session.execute(_DAMAGED, {"run": run.id})).one()
    if times:
        reason = (
            f"a trainer found files of steps damaged, {times} times, and went back to an older checkpoint. The last, of"
            f" step {step}: {cause[:MAX_CAUSE]}"
        )
        yield Finding("files_damaged", reason, {"times": times, "step": step})
