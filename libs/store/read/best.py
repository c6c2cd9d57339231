"""A run's versions beside each other by its evaluations: the one that earned most, and the values of early stopping.

Evaluations are compared on the tasks that each of them counted: a task counts where each of the run's agents has a
rollout of it with a reward. The rollouts that one agent lost are no fair draw.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal, NamedTuple

from sqlalchemy import select, text

from leyden.libs.contracts.config import BrokenDocument, RunConfig
from leyden.libs.contracts.rewards import gain
from leyden.libs.store import tables
from leyden.libs.store.database import ReadSession
from leyden.libs.store.policies import IS_RUN, policies_by_id
from leyden.libs.store.rewards import GIVEN_OF_RUNS, REWARD, REWARD_BESIDE, SIBLING, TRAINING_REWARD, UNGRADED

_SHOWN = 3
"""Evaluations that a reason names."""

# The plan's evaluations are the run's first; one on other tasks, or asked for fewer, compares nothing with them.
_ON_THE_SAME_TASKS = text("""
    SELECT e.id FROM evaluations e JOIN datasets d ON d.id = e.dataset_id
    JOIN (SELECT DISTINCT ON (run_id) * FROM evaluations WHERE run_id = ANY(:runs) ORDER BY run_id, number) first
        USING (run_id, dataset_id)
    WHERE least(d.task_count, e.max_tasks) >= least(d.task_count, first.max_tasks)
""")

_TASKS = """
    SELECT id, run_id, number, rollouts_per_task, asked, task_number, min(version) AS version,
        sum(ended)::bigint AS ended, sum(ungraded)::bigint AS ungraded,
        CASE WHEN count(mean) = agents THEN avg(mean) END AS mean
    FROM (
        SELECT e.id, e.run_id, e.number, e.agents, e.rollouts_per_task * e.agents AS rollouts_per_task,
            least(d.task_count, e.max_tasks) AS asked, groups.task_number,
            min(groups.admitted_version) AS version,
            count(*) FILTER (WHERE rollouts.state NOT IN ('queued', 'cancelled')) AS ended,
            count(*) FILTER (WHERE graded.is_open) AS ungraded, avg(earned.reward) AS mean
        FROM evaluations e JOIN datasets d ON d.id = e.dataset_id
        JOIN groups ON groups.evaluation_id = e.id JOIN rollouts ON rollouts.group_id = groups.id
        JOIN runs ON runs.id = groups.run_id
        CROSS JOIN LATERAL (SELECT {ungraded} AS is_open) AS graded
        CROSS JOIN LATERAL (SELECT CASE WHEN NOT graded.is_open THEN {reward} END AS reward) AS earned
        WHERE e.id = ANY(:evaluations) GROUP BY e.id, d.task_count, groups.task_number, groups.agent
    ) AS of_agents
    GROUP BY id, run_id, number, agents, rollouts_per_task, asked, task_number ORDER BY number
"""
_TASKS_ALONE = text(_TASKS.format(ungraded=UNGRADED, reward=REWARD))
_TASKS_BESIDE = text(_TASKS.format(ungraded=UNGRADED, reward=REWARD_BESIDE))

_BEST_TRAINED = text(f"""
    WITH given AS MATERIALIZED ({GIVEN_OF_RUNS})
    SELECT DISTINCT ON (v.run_id) v.run_id, v.version, avg({TRAINING_REWARD}) AS reward FROM policy_versions v
    JOIN runs ON runs.id = v.run_id
    JOIN groups ON groups.run_id = v.run_id AND groups.admitted_version = v.version AND groups.state = 'complete'
    JOIN rollouts ON rollouts.group_id = groups.id AND rollouts.state = 'finished' AND {SIBLING}
    LEFT JOIN given ON given.id = rollouts.id
    WHERE v.run_id = ANY(:run_ids) AND v.version > 0 AND v.pruned_at IS NULL AND groups.evaluation_id IS NULL
    GROUP BY v.run_id, v.version HAVING count({TRAINING_REWARD}) > 0
    ORDER BY v.run_id, round(avg({TRAINING_REWARD})::numeric, 9) DESC, v.version DESC
""")  # noqa: S608  # constants alone


class BestVersion(NamedTuple):
    """The best version of a run; None with a reason is unknown, None without one has no reward yet.

    `reason`: how it was found, or why none is called best. `reward`: its mean reward, by what `reward_of` says.
    """

    version: int | None = None
    reason: str | None = None
    reward: float | None = None
    reward_of: Literal["evaluations", "training"] | None = None


@dataclass
class Measurement:
    """An evaluation all of whose rollouts have ended, none of them cancelled, and none of which waits for a reward."""

    id: str
    run_id: str
    number: int
    version: int
    asked: int
    """Number of its tasks."""
    means: dict[int, float] = field(default_factory=dict)
    """Mean rewards of the tasks that count, by their numbers; each agent weighs the same."""

    @property
    def is_compared(self) -> bool:
        """Whether at least half of its tasks count: one that lost more would leave the others too few."""
        return 2 * len(self.means) >= self.asked

    @property
    def is_full(self) -> bool:
        """Whether all of its tasks count."""
        return len(self.means) >= self.asked

    def mean(self, tasks: AbstractSet[int]) -> float:
        """The mean over tasks that count, each weighing the same."""
        return fmean(self.means[task] for task in sorted(tasks))

    def __str__(self) -> str:
        return f"evaluation {self.number} (version {self.version}; {len(self.means)} of {self.asked} tasks counted)"


def shared_tasks(measured: Iterable[Measurement]) -> frozenset[int]:
    """The tasks that each of them counted; none without an evaluation."""
    found = [one.means.keys() for one in measured]
    return frozenset(found[0]).intersection(*found[1:]) if found else frozenset()


async def measurements(
    session: ReadSession, evaluation_ids: Iterable[str], *, beside: bool = False
) -> dict[str, Measurement]:
    """Those of the evaluations that have ended, by id, in the order of their numbers.

    Args: beside: whether runs are compared: a failure then earns the same in each of them
    """
    found: dict[str, Measurement] = {}
    missing: dict[str, int] = defaultdict(int)
    tasks = _TASKS_BESIDE if beside else _TASKS_ALONE
    for row in await session.execute(tasks, {"evaluations": list(evaluation_ids)}):
        if row.id not in found:
            found[row.id] = Measurement(row.id, row.run_id, row.number, row.version, row.asked)
            missing[row.id] = row.rollouts_per_task * row.asked
        found[row.id].version = min(found[row.id].version, row.version)
        missing[row.id] -= row.ended - row.ungraded
        if row.mean is not None:
            found[row.id].means[row.task_number] = row.mean
    return {name: one for name, one in found.items() if missing[name] <= 0}


async def counted_tasks(session: ReadSession, evaluation_ids: Iterable[str]) -> dict[str, int]:
    """The number of tasks that count so far, by evaluation; one without any is left out."""
    found = await session.execute(_TASKS_ALONE, {"evaluations": list(evaluation_ids)})
    return Counter(row.id for row in found if row.mean is not None)


async def measured_tasks(session: ReadSession, run_id: str) -> list[Measurement]:
    """The run's ended evaluations of the tasks of its first one, or of more of them, by number."""
    return (await _measured_tasks(session, [run_id]))[run_id]


async def _measured_tasks(session: ReadSession, run_ids: Sequence[str]) -> defaultdict[str, list[Measurement]]:
    found = defaultdict[str, list[Measurement]](list)
    asked = await session.scalars(_ON_THE_SAME_TASKS, {"runs": list(run_ids)})
    for one in (await measurements(session, asked)).values():
        found[one.run_id].append(one)
    return found


def own_evaluations(measured: Sequence[Measurement], config: RunConfig) -> list[Measurement]:
    """Those of the run's plan, which alone decide on which tasks versions are compared; without a plan, all."""
    if config.evaluation is None:
        return list(measured)
    planned = len(config.evaluation.planned_versions(config.training.steps))
    return [one for one in measured if one.number <= planned]


async def best_version(session: ReadSession, policy_id: str) -> BestVersion:
    """The version from 1, not removed, that earned most in evaluations, else in training. A tie goes to the newer one.

    A further policy has no rewards of its own: its best version has the number of the run's.
    """
    policy = (await policies_by_id(session, [policy_id])).get(policy_id)
    if policy is None:
        return BestVersion()
    best = (await best_versions(session, [policy.run_id]))[policy.run_id]
    if policy.is_own or best.version is None:
        return best
    if best.version in (await _versions(session, [policy_id]))[policy_id]:
        return BestVersion(best.version, best.reason)
    return BestVersion(None, f"the files of version {best.version}, the best of the run, were removed")


async def best_versions(session: ReadSession, run_ids: Sequence[str]) -> dict[str, BestVersion]:
    """The best version of each run, by id; without the means of the others."""
    return {run_id: best for run_id, (best, _) in (await measured_versions(session, run_ids)).items()}


async def measured_versions(
    session: ReadSession, run_ids: Sequence[str]
) -> dict[str, tuple[BestVersion, list[tuple[int, float]]]]:
    """The best version of each run, and its measured versions with their means on the compared tasks, by id."""
    table = tables.Run
    rows = await session.execute(select(table.id, table.config).where(table.id.in_(run_ids), IS_RUN))
    configs = {row.id: RunConfig.read(row.config) for row in rows}
    measured, versions = await _measured_tasks(session, run_ids), await _versions(session, run_ids)
    found: dict[str, BestVersion] = {}
    for run_id, config in configs.items():
        if isinstance(config, BrokenDocument):
            found[run_id] = BestVersion(None, str(config))
        elif (best := _best_by_evaluations(measured[run_id], config, versions[run_id])) is not None:
            found[run_id] = best
    others = [run_id for run_id in configs if run_id not in found]
    trained = await session.execute(_BEST_TRAINED, {"run_ids": others}) if others else ()
    by_training = {row.run_id: row for row in trained}
    for run_id in others:
        row = by_training.get(run_id)
        reason = "by training, each version on other tasks: no evaluation measured one"
        found[run_id] = BestVersion() if row is None else BestVersion(row.version, reason, row.reward, "training")
    return {run_id: (best, _means(measured[run_id], configs[run_id])) for run_id, best in found.items()}


def _means(measured: Sequence[Measurement], config: RunConfig | BrokenDocument) -> list[tuple[int, float]]:
    """Versions with their means over the tasks on which they are compared, in the order of versions."""
    if isinstance(config, BrokenDocument):
        return []
    _, tasks, compared = _compared(measured, own_evaluations(measured, config))
    means = defaultdict[int, list[float]](list)
    for one in compared:
        means[one.version].append(one.mean(tasks))
    return [(version, fmean(means[version])) for version in sorted(means)]


def _best_by_evaluations(
    measured: Sequence[Measurement], config: RunConfig, versions: AbstractSet[int]
) -> BestVersion | None:
    own = own_evaluations(measured, config)
    found = best_measured(measured, own, versions)
    stopping = config.training.early_stopping
    if found is None or stopping is None or stopping.metric != "evaluation_reward" or all(one.is_full for one in own):
        return found
    words = "early stopping compares the same, and only all tasks together reach a target"
    return found._replace(reason=f"{found.reason}; {words if found.version else 'nor does training stop early'}")


async def _versions(session: ReadSession, policy_ids: Sequence[str]) -> defaultdict[str, set[int]]:
    """The versions of policies whose files are there."""
    table = tables.PolicyVersion
    query = select(table.run_id, table.version).where(table.run_id.in_(policy_ids), table.pruned_at.is_(None))
    found = defaultdict[str, set[int]](set)
    for row in await session.execute(query):
        found[row.run_id].add(row.version)
    return found


async def undecided_versions(session: ReadSession, policy_id: str) -> set[int]:
    """The versions from 1 that may still prove best: measured ones that no evaluation compares, which a regrade may
    repair, and all measured ones while none is called best."""
    policy = (await policies_by_id(session, [policy_id])).get(policy_id)
    if policy is None:
        return set()
    config = RunConfig.read((await session.get_one(tables.Run, policy.run_id)).config)
    measured = await measured_tasks(session, policy.run_id)
    own = measured if isinstance(config, BrokenDocument) else own_evaluations(measured, config)
    is_known = (await best_version(session, policy_id)).version is not None
    decided = {one.version for one in _compared(measured, own)[2]} if is_known else set()
    return {one.version for one in measured if one.version > 0} - decided


def _compared(
    measured: Sequence[Measurement], own: Sequence[Measurement]
) -> tuple[list[Measurement], frozenset[int], list[Measurement]]:
    """The evaluations that decide on which tasks, these tasks, and the evaluations that are compared on them."""
    deciding = [one for one in own if one.is_compared] or [one for one in measured if one.is_compared]
    tasks = shared_tasks(deciding)
    return deciding, tasks, [one for one in measured if tasks and one.means.keys() >= tasks]


def best_measured(
    measured: Sequence[Measurement], own: Sequence[Measurement], versions: AbstractSet[int]
) -> BestVersion | None:
    """The best of versions by evaluations; None where training decides, before one from 1 was measured.

    Args: own: those of `measured` that decide on which tasks; others are compared where they counted all of these
    """
    deciding, tasks, compared = _compared(measured, own)
    means: dict[int, list[float]] = defaultdict(list)
    for one in compared:
        if one.version in versions and one.version > 0:
            means[one.version].append(one.mean(tasks))
    left_out = [str(one) for one in measured if one not in compared]
    if means:
        highest = max(fmean(values) for values in means.values())
        best = max(version for version, values in means.items() if not gain(fmean(values), highest))
        reason = "; ".join(["by evaluations" + _on(tasks, deciding), *_not_compared(left_out)])
        return BestVersion(best, reason, fmean(means[best]), "evaluations")
    if not any(one.version > 0 for one in (*own, *compared)):
        return None
    if deciding and not tasks:
        return BestVersion(None, f"no task has a reward in each of its {len(deciding)} evaluations")
    return BestVersion(None, "; ".join(_not_compared(left_out)) or "the files of the measured versions were removed")


def _on(tasks: AbstractSet[int], deciding: Sequence[Measurement]) -> str:
    """Args: tasks: shared by the deciding evaluations"""
    asked = min(one.asked for one in deciding)
    return "" if len(tasks) >= asked else f", on the {len(tasks)} of {asked} tasks that each of them counted"


def _not_compared(names: Sequence[str]) -> list[str]:
    """A part of a reason; nothing for none."""
    more = [f"{len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    return [f"not compared: {', '.join([*names[:_SHOWN], *more])}"] if names else []
