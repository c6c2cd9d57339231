"""Rewards and facts of rollouts by evaluation, step and time, computed from outcomes at each request."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

from sqlalchemy import select, text

from leyden.libs.contracts.api.body import Page
from leyden.libs.contracts.api.runs import Evaluation, EvaluationResults, Fact, Metrics, Series, Step, StepComponent
from leyden.libs.contracts.call_counts import CallCounts, tool_failures
from leyden.libs.contracts.config import BrokenDocument, RunConfig
from leyden.libs.contracts.states import ShownRolloutState
from leyden.libs.store import tables
from leyden.libs.store.attempts import ROLLOUT_STATE
from leyden.libs.store.database import ReadSession
from leyden.libs.store.policies import OWN
from leyden.libs.store.read import call_counts, step_figures
from leyden.libs.store.read.agents import agents_rewards
from leyden.libs.store.read.best import counted_tasks
from leyden.libs.store.read.intervals import SolvedGroups, TaskSums, pass_at, statistic
from leyden.libs.store.read.paging import decode_cursor, page
from leyden.libs.store.rewards import GIVEN_OF_EACH, GROUP_REWARD, REWARD, SIBLING, UNGRADED, is_used

MAX_TEXTS = 20
"""Shown values of a text fact, most frequent first."""

# The reward of the line is a part of `rollouts.reward`, with the policy for failures applied. Numbers too large for
# statistics are left out: JSON has no bound, double precision has, and sums of squares have it sooner.
_FACTS_OF_TASKS = """
    SELECT groups.evaluation_id, groups.task_number, fact.key AS name, jsonb_typeof(fact.value) = 'string' AS is_text,
        CASE WHEN jsonb_typeof(fact.value) = 'string' THEN left(fact.value #>> '{}', 100) END AS text,
        CASE WHEN jsonb_typeof(fact.value) = 'string' THEN count(*) ELSE count(number.value) END AS n,
        sum(number.value) AS s, bool_and(number.value IN (0, 1)) AS is_binary
    FROM groups JOIN rollouts ON rollouts.group_id = groups.id AND rollouts.state = 'finished'
    JOIN outcomes ON outcomes.rollout_id = rollouts.id AND outcomes.attempt = rollouts.attempt
    CROSS JOIN LATERAL jsonb_each(outcomes.facts) AS fact
    CROSS JOIN LATERAL (SELECT CASE jsonb_typeof(fact.value)
        WHEN 'number' THEN CASE WHEN abs((fact.value #>> '{}')::numeric) < 1e100 THEN (fact.value #>> '{}')::float8 END
        WHEN 'boolean' THEN (fact.value #>> '{}')::boolean::int::float8 END AS value) AS number
    WHERE groups.evaluation_id = ANY(:evaluation_ids)
        AND jsonb_typeof(fact.value) IN ('number', 'boolean', 'string') AND fact.key NOT IN ('reward', 'rewards')
    GROUP BY 1, 2, 3, 4, 5
"""

# Over tasks, of which each has n rollouts with a number and s as the sum of their numbers: `TaskSums`.
_SUMS = """
    count(*) FILTER (WHERE n > 0) AS tasks, sum(n)::bigint AS count, sum(s) AS total, sum(s * s) AS squares,
    sum(n * s) AS products, sum(n * n)::float8 AS counts, bool_and(is_binary) AS is_binary
"""

_EVALUATION_FACTS = text(f"""
    SELECT evaluation_id, name, is_text, text, {_SUMS} FROM ({_FACTS_OF_TASKS}) AS of_tasks
    GROUP BY evaluation_id, name, is_text, text
""")  # noqa: S608  # constants alone

_REWARDS_OF_TASKS = f"""
    SELECT evaluation_id, agent, state, sum(rollouts)::bigint AS rollouts, min(version) AS version,
        sum(ungraded)::bigint AS ungraded, {_SUMS} FROM (
        SELECT groups.evaluation_id, groups.task_number, {{agent}} AS agent, count(*) AS rollouts,
            CASE WHEN earned.reward IS NOT NULL THEN 'finished' ELSE {ROLLOUT_STATE} END AS state,
            count(earned.reward) AS n, sum(earned.reward) AS s, bool_and(earned.reward IN (0, 1)) AS is_binary,
            min(groups.admitted_version) AS version, count(*) FILTER (WHERE graded.is_open) AS ungraded
        FROM groups JOIN rollouts ON rollouts.group_id = groups.id JOIN runs ON runs.id = groups.run_id
        CROSS JOIN LATERAL (SELECT {UNGRADED} AS is_open) AS graded
        CROSS JOIN LATERAL (SELECT CASE WHEN NOT graded.is_open THEN {REWARD} END AS reward) AS earned
        WHERE groups.evaluation_id = ANY(:evaluation_ids) {{condition}} GROUP BY 1, 2, 3, 5
    ) AS of_tasks GROUP BY 1, 2, 3
"""  # noqa: S608  # constants alone
_EVALUATION_ROLLOUTS = text(_REWARDS_OF_TASKS.format(agent="NULL::text", condition=""))
_EVALUATION_AGENTS = text(_REWARDS_OF_TASKS.format(agent="groups.agent", condition="AND groups.agent IS NOT NULL"))

_SOLVED_GROUPS = text(f"""
    SELECT evaluation_id, known, solved, count(*) AS groups FROM (
        SELECT groups.evaluation_id, count(earned.reward) AS known, sum(earned.reward)::bigint AS solved
        FROM groups JOIN rollouts ON rollouts.group_id = groups.id JOIN runs ON runs.id = groups.run_id
        CROSS JOIN LATERAL (SELECT {UNGRADED} AS is_open) AS graded
        CROSS JOIN LATERAL (SELECT CASE WHEN NOT graded.is_open THEN {REWARD} END AS reward) AS earned
        WHERE groups.evaluation_id = ANY(:evaluation_ids) GROUP BY groups.evaluation_id, groups.id
    ) AS of_groups WHERE known > 0 GROUP BY 1, 2, 3
""")  # noqa: S608  # constants alone

_EXPECTED = text("""
    SELECT evaluations.id, least(datasets.task_count, evaluations.max_tasks) AS tasks,
        CASE WHEN status.phase = 'completed' AND evaluations.policy_version > coalesce(
            (SELECT max(version) FROM policy_versions WHERE run_id = evaluations.run_id), 0)
        -- Training stopped early and made no such version.
        THEN 0 ELSE evaluations.rollouts_per_task * evaluations.agents
            * least(datasets.task_count, evaluations.max_tasks) END AS rollouts
    FROM evaluations JOIN datasets ON datasets.id = evaluations.dataset_id
    LEFT JOIN run_status AS status ON status.run_id = evaluations.run_id
    WHERE evaluations.id = ANY(:evaluation_ids)
""")

# A greedy rollout is a baseline, and shows what the policy would do, not what it samples.
_IS_USED = is_used(":run_id")
_ROLLOUTS_OF_A_RUN = f"""
    JOIN rollouts ON rollouts.group_id = step_groups.group_id AND rollouts.state = 'finished' AND {SIBLING}
        AND {_IS_USED}
"""
# Why: without OFFSET the planner joins, and a page of some hundred groups reads the rollouts of all runs.
_ROLLOUTS_OF_A_PAGE = f"""
    CROSS JOIN LATERAL (
        SELECT * FROM rollouts
        WHERE group_id = step_groups.group_id AND state = 'finished' AND {SIBLING} AND {_IS_USED} OFFSET 0
    ) AS rollouts
"""  # noqa: S608  # constants alone

_STEP_REWARDS = f"""
    SELECT step, count(*) AS rollouts, avg(reward) AS reward_mean, stddev_samp(reward) AS reward_std FROM (
        SELECT step_groups.step, {GROUP_REWARD} AS reward
        FROM step_groups JOIN groups ON groups.id = step_groups.group_id {{rollouts}}
        JOIN runs ON runs.id = rollouts.run_id {GIVEN_OF_EACH}
        WHERE step_groups.run_id = :run_id AND step_groups.step = ANY(:steps) OFFSET 0
    ) AS earned GROUP BY step
"""  # noqa: S608  # constants alone

_STEP_VERDICTS = text("""
    SELECT step, verdict, count(*) AS count FROM step_groups
    WHERE run_id = :run_id AND step = ANY(:steps) GROUP BY step, verdict
    UNION ALL
    SELECT step, 'replayed', count(*) FROM step_replays
    WHERE run_id = :run_id AND step = ANY(:steps) GROUP BY step
""")

_STEP_FACTS = """
    SELECT step_groups.step, fact.key AS name, avg(CASE jsonb_typeof(fact.value)
        WHEN 'number' THEN CASE WHEN abs((fact.value #>> '{}')::numeric) < 1e150 THEN (fact.value #>> '{}')::float8 END
        ELSE (fact.value #>> '{}')::boolean::int::float8 END) AS mean
    FROM step_groups {rollouts}
    JOIN outcomes ON outcomes.rollout_id = rollouts.id AND outcomes.attempt = rollouts.attempt
    CROSS JOIN LATERAL jsonb_each(outcomes.facts) AS fact
    WHERE step_groups.run_id = :run_id AND step_groups.step = ANY(:steps)
        AND jsonb_typeof(fact.value) IN ('number', 'boolean') AND fact.key NOT IN ('reward', 'rewards')
    GROUP BY step_groups.step, fact.key ORDER BY step_groups.step, fact.key
"""

# Rollouts that were excluded leave the means; only the share of failures counts them. A step shows the numbers that it
# trained on, whatever a later grading says.
_STEP_COMPONENTS = text(f"""
    SELECT step_groups.step, rewards.component, avg(rewards.value) FILTER (WHERE rollouts.state = 'finished') AS mean,
        avg((rewards.state = 'failed')::int)::float8 AS failed_share
    FROM step_groups
    CROSS JOIN LATERAL (
        SELECT * FROM rollouts WHERE group_id = step_groups.group_id AND {SIBLING} AND {_IS_USED} OFFSET 0
    ) AS rollouts
    JOIN rollout_rewards AS rewards ON rewards.rollout_id = rollouts.id
        AND rewards.attempt = coalesce(rollouts.attempt, rollouts.grading_attempt) AND rewards.revision = 1
    WHERE step_groups.run_id = :run_id AND step_groups.step = ANY(:steps)
    GROUP BY step_groups.step, rewards.component ORDER BY step_groups.step, min(rewards.position)
""")  # noqa: S608  # constants alone

# All policies of a run learn from its calls, and its document has the roles of each.
_RUN_OF_POLICY = text("""
    SELECT runs.id, runs.config, policies.name, own.config AS own_config
    FROM policies JOIN runs ON runs.id = policies.run_id JOIN runs AS own ON own.id = policies.id
    WHERE policies.id = :run_id
""")

# The mean over rollouts of the mean of their calls: one that made more calls does not weigh more.
_ROLE_RETURNS = text("""
    SELECT step, role, avg(mean) AS return_mean, sum(calls)::bigint AS calls FROM (
        SELECT step_groups.step, calls.role, rollouts.id, avg(credits.return) AS mean, count(*) AS calls
        FROM step_groups JOIN rollouts ON rollouts.group_id = step_groups.group_id AND rollouts.state = 'finished'
        JOIN model_calls AS calls ON calls.run_id = :of_calls AND calls.rollout_id = rollouts.id
            AND calls.attempt = rollouts.attempt AND calls.role = ANY(:roles)
        JOIN credits ON credits.run_id = :of_calls AND credits.call_id = calls.id
        WHERE step_groups.run_id = :run_id AND step_groups.step IS NOT NULL
        GROUP BY 1, 2, 3
    ) AS of_rollouts GROUP BY step, role ORDER BY step, role
""")

Record = Mapping[Any, Any]

_OPEN = (ShownRolloutState.QUEUED, ShownRolloutState.RUNNING, ShownRolloutState.GRADING)


async def list_evaluations(session: ReadSession, run_id: str, *, cursor: str | None, limit: int) -> Page[Evaluation]:
    """Evaluations of a run by number, with results."""
    table, name = tables.Evaluation, f"evaluations of {run_id}"
    conditions = [table.run_id == run_id]
    if key := decode_cursor(cursor, name, int):
        conditions.append(table.number > cast(int, key[0]))
    query = select(table).where(*conditions).order_by(table.number).limit(limit + 1)
    found = await _with_results(session, (await session.scalars(query)).all())
    return page(name, found, limit, lambda item: item, lambda item: (item.number,))


async def get_evaluation(session: ReadSession, evaluation_id: str) -> Evaluation | None:
    """One evaluation with its present results."""
    row = await session.get(tables.Evaluation, evaluation_id)
    return None if row is None else (await _with_results(session, [row]))[0]


async def _with_results(session: ReadSession, rows: Sequence[tables.Evaluation]) -> list[Evaluation]:
    ids = {"evaluation_ids": [row.id for row in rows]}
    states = _grouped((await session.execute(_EVALUATION_ROLLOUTS, ids)).mappings(), "evaluation_id")
    facts = _grouped((await session.execute(_EVALUATION_FACTS, ids)).mappings(), "evaluation_id")
    of_agents = _grouped((await session.execute(_EVALUATION_AGENTS, ids)).mappings(), "evaluation_id")
    expected = {record["id"]: record for record in (await session.execute(_EXPECTED, ids)).mappings()}
    repeated = [row.id for row in rows if row.rollouts_per_task > 1 and _is_binary(states[row.id])]
    solved = await _solved_groups(session, repeated)
    of_several = [row.id for row in rows if row.agents > 1]
    counted = await counted_tasks(session, of_several) if of_several else {}
    return [
        _evaluation(
            row,
            states[row.id],
            of_agents[row.id],
            facts[row.id],
            expected[row.id],
            solved[row.id],
            counted.get(row.id, 0) if row.agents > 1 else None,
        )
        for row in rows
    ]


def _is_binary(states: Sequence[Record]) -> bool:
    return any(_is_measured(record) and record["is_binary"] for record in states)


async def _solved_groups(session: ReadSession, evaluation_ids: Sequence[str]) -> defaultdict[str, list[SolvedGroups]]:
    found = defaultdict[str, list[SolvedGroups]](list)
    if evaluation_ids:
        for row in await session.execute(_SOLVED_GROUPS, {"evaluation_ids": evaluation_ids}):
            found[row.evaluation_id].append(SolvedGroups(row.known, row.solved, row.groups))
    return found


def _evaluation(
    row: tables.Evaluation,
    states: Sequence[Record],
    of_agents: Sequence[Record],
    facts: Sequence[Record],
    expected: Record,
    solved: Sequence[SolvedGroups],
    counted_tasks: int | None,
) -> Evaluation:
    """Args: counted_tasks: None where one agent plays them: those with a reward"""
    counts = {record["state"]: record["rollouts"] for record in states}
    terminal = sum(count for state, count in counts.items() if state not in _OPEN)
    ungraded = sum(record["ungraded"] for record in states) + counts.get(ShownRolloutState.GRADING, 0)
    finished = next(filter(_is_measured, states), None)
    return Evaluation(
        id=row.id,
        run_id=row.run_id,
        number=row.number,
        dataset_id=row.dataset_id,
        policy_version=row.policy_version,
        measured_version=min((record["version"] for record in states), default=None),
        rollouts_per_task=row.rollouts_per_task,
        max_tasks=row.max_tasks,
        tasks=expected["tasks"],
        created_at=row.created_at,
        results=EvaluationResults(
            rollouts=counts,
            pending=ungraded,
            complete=terminal >= expected["rollouts"] and not ungraded,
            reward=statistic(_sums(finished)) if finished else None,
            counted_tasks=(finished["tasks"] if finished else 0) if counted_tasks is None else counted_tasks,
            agents={record["agent"]: statistic(_sums(record)) for record in of_agents if _is_measured(record)},
            pass_at=pass_at(solved, row.rollouts_per_task),
            facts=_facts(facts),
        ),
    )


def _is_measured(record: Record) -> bool:
    return record["state"] == "finished" and bool(record["count"])


def _facts(records: Sequence[Record]) -> list[Fact]:
    found = []
    for name, values in sorted(_grouped(records, "name").items()):
        # A grader may write true in one rollout and 1 in another: both are one fact.
        number = next((record for record in values if not record["is_text"] and record["count"]), None)
        texts = [record for record in values if record["is_text"]]
        total = sum(record["count"] for record in values)
        if number is not None:
            kind = "share" if number["is_binary"] else "number"
            found.append(Fact(name=name, kind=kind, statistic=statistic(_sums(number)), total=total))
        elif texts:
            ordered = sorted(texts, key=lambda record: (-record["count"], record["text"]))[:MAX_TEXTS]
            counts = {record["text"]: record["count"] for record in ordered}
            found.append(Fact(name=name, kind="text", counts=counts, total=total))
    return found


def _sums(record: Record) -> TaskSums:
    return TaskSums(**{field.name: record[field.name] for field in fields(TaskSums)})


async def list_steps(session: ReadSession, run_id: str, *, cursor: str | None, limit: int) -> Page[Step]:
    """Optimiser steps from the first, with the rewards of their rollouts."""
    table, name = tables.Step, f"steps of {run_id}"
    conditions = [table.run_id == run_id]
    if key := decode_cursor(cursor, name, int):
        conditions.append(table.number > cast(int, key[0]))
    query = select(table).where(*conditions).order_by(table.number).limit(limit + 1)
    steps = await _with_rewards(session, run_id, (await session.scalars(query)).all(), _ROLLOUTS_OF_A_PAGE)
    return page(name, steps, limit, lambda step: step, lambda step: (step.number,))


async def _with_rewards(session: ReadSession, run_id: str, rows: Sequence[tables.Step], rollouts: str) -> list[Step]:
    """Args: rollouts: the SQL that joins rollouts to the groups of the steps"""
    scope: dict[str, Any] = {"run_id": run_id, "steps": [row.number for row in rows]}
    of_steps, of_facts = (text(query.replace("{rollouts}", rollouts)) for query in (_STEP_REWARDS, _STEP_FACTS))
    rewards = {record["step"]: record for record in (await session.execute(of_steps, scope)).mappings()}
    verdicts = _grouped((await session.execute(_STEP_VERDICTS, scope)).mappings(), "step")
    facts = _grouped((await session.execute(of_facts, scope)).mappings(), "step")
    components = _grouped((await session.execute(_STEP_COMPONENTS, scope)).mappings(), "step")
    calls = await call_counts.of_steps(session, run_id, scope["steps"])
    has_reference = (await _of_policy(session, run_id)).has_reference
    return [
        Step(
            number=row.number,
            metrics=step_figures.known(
                {name: value for name, value in row.metrics.items() if _is_number(value)}, has_reference=has_reference
            ),
            groups={record["verdict"]: record["count"] for record in verdicts[row.number]},
            calls=calls.get(row.number, CallCounts()),
            rollouts=rewards[row.number]["rollouts"] if row.number in rewards else 0,
            reward_mean=rewards[row.number]["reward_mean"] if row.number in rewards else None,
            reward_std=rewards[row.number]["reward_std"] if row.number in rewards else None,
            facts={record["name"]: record["mean"] for record in facts[row.number] if record["mean"] is not None},
            components={
                record["component"]: StepComponent(mean=record["mean"], failed_share=record["failed_share"])
                for record in components[row.number]
            },
            started_at=row.started_at,
            created_at=row.created_at,
        )
        for row in rows
    ]


async def get_metrics(session: ReadSession, run_id: str, names: Sequence[str]) -> Metrics:
    """Time series over the steps of a run: the trainer's metrics, `reward_mean`, `reward_std`, `fact.<name>`, for each
    component of the reward `component.<name>.mean` and `component.<name>.failed_share`, for each tool
    `tool.<name>.calls` and, of the calls whose end is known, `tool.<name>.failed_share`, and for each role of the
    policy `role.<name>.return_mean` and `role.<name>.calls`; for each of the run's `agents`
    `agent.<name>.reward_mean`; and the figures of `step_figures`. One that is unknown at
    a step has no point there.

    Args: run_id: or a further policy's id; names: the wanted series; empty for all
    """
    query = select(tables.Step).where(tables.Step.run_id == run_id).order_by(tables.Step.number)
    steps = await _with_rewards(session, run_id, (await session.scalars(query)).all(), _ROLLOUTS_OF_A_RUN)
    policy = await _of_policy(session, run_id)
    of_roles = _grouped(await _role_returns(session, policy), "step")
    of_agents: dict[int, dict[str, float]] = defaultdict(dict)
    for number, name, reward in await agents_rewards(session, run_id):
        of_agents[number][f"agent.{name}.reward_mean"] = reward
    figures = await step_figures.read_figures(session, run_id, policy.run_id, steps, policy.roles, policy.others)
    series: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
    for step in steps:
        seconds = (step.created_at - steps[0].started_at).total_seconds()
        for name, value in (
            *_values(step),
            *_role_values(of_roles[step.number]),
            *of_agents[step.number].items(),
            *figures[step.number].items(),
        ):
            series[name].append((step.number, seconds, value))
    chosen = names or sorted(series)
    return Metrics(
        run_id=run_id,
        names=sorted(series),
        series=[Series(name=name, points=series.get(name, [])) for name in chosen],
    )


@dataclass(frozen=True)
class _Policy:
    """A policy of a run: the roles whose calls it answers, and those of others; none where a document does not parse.

    `has_reference`: whether its loss has a KL term, where its document tells it.
    """

    id: str
    run_id: str
    has_reference: bool
    roles: list[str]
    others: list[str]


async def _of_policy(session: ReadSession, policy_id: str) -> _Policy:
    row = (await session.execute(_RUN_OF_POLICY, {"run_id": policy_id})).one()
    of_run, own = RunConfig.read(row.config), RunConfig.read(row.own_config)
    roles = [] if isinstance(of_run, BrokenDocument) else of_run.roles
    of_roles = {role.name: (role.policy or OWN) == row.name for role in roles}
    return _Policy(
        id=policy_id,
        run_id=row.id,
        has_reference=isinstance(own, RunConfig) and own.algorithm.kl_coefficient > 0,
        roles=[name for name, is_own in of_roles.items() if is_own],
        others=[name for name, is_own in of_roles.items() if not is_own],
    )


async def _role_returns(session: ReadSession, policy: _Policy) -> Sequence[Record]:
    """The returns of the roles whose calls a policy answers, by step and role."""
    scope = {"run_id": policy.id, "of_calls": policy.run_id, "roles": policy.roles}
    return (await session.execute(_ROLE_RETURNS, scope)).mappings().all() if policy.roles else []


def _values(step: Step) -> Iterable[tuple[str, float]]:
    yield from ((name, value) for name, value in step.metrics.items() if value is not None)
    if step.calls.calls:
        yield "untrainable_calls", sum(step.calls.untrainable.values())
        yield "context_overflows", step.calls.overflows
    for tool, statuses in step.calls.tools.items():
        yield f"tool.{tool}.calls", sum(statuses.values())
    for tool, (failed, known) in tool_failures(step.calls).items():
        yield f"tool.{tool}.failed_share", failed / known
    yield from ((f"fact.{name}", value) for name, value in step.facts.items())
    for name, component in step.components.items():
        if component.mean is not None:
            yield f"component.{name}.mean", component.mean
        yield f"component.{name}.failed_share", component.failed_share
    if step.reward_mean is not None:
        yield "reward_mean", step.reward_mean
    if step.reward_std is not None:
        yield "reward_std", step.reward_std


def _role_values(records: Iterable[Record]) -> Iterable[tuple[str, float]]:
    for record in records:
        yield f"role.{record['role']}.return_mean", record["return_mean"]
        yield f"role.{record['role']}.calls", record["calls"]


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _grouped(records: Iterable[Record], key: str) -> dict[Any, list[Record]]:
    grouped: dict[Any, list[Record]] = defaultdict(list)
    for record in records:
        grouped[record[key]].append(record)
    return grouped
