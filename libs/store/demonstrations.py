"""Demonstrations: the stored rollouts on which a run of supervised fine-tuning trains, and the runs that await them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import text

from leyden.libs.contracts.config import RunConfig, Sft
from leyden.libs.contracts.rewards import ROUNDING
from leyden.libs.store.database import ReadSession, Session
from leyden.libs.store.rewards import REWARD, SIBLING

# A rollout of a pruned run has no calls any more.
_DEMONSTRATIONS = f"""
    SELECT g.id AS group_id, g.run_id, g.number, rollouts.id, earned.reward, row_number() OVER (
        PARTITION BY g.task_number ORDER BY earned.reward DESC, rollouts.finished_at DESC, rollouts.id) AS place
    FROM groups g JOIN rollouts ON rollouts.group_id = g.id AND rollouts.state = 'finished'
    CROSS JOIN LATERAL (SELECT {REWARD} AS reward) AS earned
    WHERE g.run_id = ANY(:runs) AND g.dataset_id = :dataset AND g.state = 'complete'
    AND rollouts.reward IS NOT NULL AND {SIBLING} AND earned.reward >= :min_reward - {ROUNDING}
    AND EXISTS (SELECT FROM model_calls c WHERE c.run_id = g.run_id AND c.rollout_id = rollouts.id
                AND c.attempt = rollouts.attempt AND c.status = 'completed')
"""  # noqa: S608  # constants alone
_GROUPS = text(f"""
    SELECT group_id, run_id, array_agg(id ORDER BY id) AS rollouts, array_agg(reward ORDER BY id) AS rewards
    FROM ({_DEMONSTRATIONS}) AS ranked WHERE place <= coalesce(CAST(:per_task AS integer), place)
    GROUP BY group_id, run_id, number ORDER BY number, group_id
""")  # noqa: S608  # constants alone
_EXISTS = text(f"SELECT EXISTS ({_DEMONSTRATIONS})")

_AWAITS = """
    FROM runs r LEFT JOIN run_status s ON s.run_id = r.id
    JOIN policies ON policies.id = r.id AND policies.name = ''
    WHERE r.algorithm = 'sft' AND r.steps > 0 AND r.intent NOT IN ('cancelled', 'deleted')
    AND coalesce(s.phase, 'pending') NOT IN ('completed', 'failed', 'cancelled')
    AND NOT EXISTS (SELECT FROM group_credits c WHERE c.run_id = r.id)
"""
_CLAIM = text(f"""
    WITH awaiting AS MATERIALIZED (SELECT r.id {_AWAITS} AND NOT (r.id = ANY(:broken)) ORDER BY r.created_at, r.id)
    SELECT id FROM awaiting WHERE pg_try_advisory_xact_lock(hashtextextended('credit-claim:' || id, 0)) LIMIT 1
""")  # noqa: S608  # constants alone
_CLAIMED = text(f"SELECT r.id, r.dataset_id, r.config {_AWAITS} AND r.id = :run")

_RUNNING = text(f"SELECT r.id, r.dataset_id, r.config {_AWAITS} AND s.phase = 'running'")

_TRAINING_ON = text("""
    SELECT c.run_id FROM groups g JOIN group_credits c ON c.group_id = g.id JOIN runs r ON r.id = c.run_id
    WHERE g.run_id = :run AND r.algorithm = 'sft' AND r.id <> :run LIMIT 1
""")


class SupervisedRun(NamedTuple):
    """A run of supervised fine-tuning that has no demonstrations yet."""

    id: str
    dataset_id: str
    config: RunConfig


class DemonstratedGroup(NamedTuple):
    """A group of run `run_id` with those of its rollouts that are demonstrations, and what each of them earned."""

    id: str
    run_id: str
    rollouts: Sequence[str]
    rewards: Sequence[float]


async def claim_supervised(session: Session) -> SupervisedRun | None:
    """The oldest run that awaits its demonstrations; until the session ends no other worker claims it."""
    broken: list[str] = []
    while (run_id := await session.scalar(_CLAIM, {"broken": broken})) is not None:
        # A second statement: it sees what another worker committed before this one had the lock.
        row = (await session.execute(_CLAIMED, {"run": run_id})).one_or_none()
        config = None if row is None else RunConfig.read(row.config)
        if row is None or config is None:
            return None
        if isinstance(config, RunConfig):
            return SupervisedRun(row.id, row.dataset_id, config)
        # The controller fails it; the others do not wait.
        broken.append(run_id)
    return None


async def find_demonstrations(session: ReadSession, algorithm: Sft, dataset_id: str) -> list[DemonstratedGroup]:
    """The rollouts on tasks of the dataset that meet the algorithm's conditions, by group."""
    scope = {**_scope(algorithm, dataset_id), "per_task": algorithm.per_task}
    return [DemonstratedGroup(*row) for row in await session.execute(_GROUPS, scope)]


async def has_demonstrations(session: ReadSession, algorithm: Sft, dataset_id: str) -> bool:
    """Whether any rollout is one."""
    return bool(await session.scalar(_EXISTS, _scope(algorithm, dataset_id)))


async def runs_without_demonstrations(session: ReadSession) -> dict[str, list[str]]:
    """Running runs that await their demonstrations and have none, with the runs of whose rollouts they were to be."""
    found = dict[str, list[str]]()
    # Such runs are few: credit selects within seconds.
    for row in (await session.execute(_RUNNING)).all():
        config = RunConfig.read(row.config)
        if not isinstance(config, RunConfig) or not isinstance(config.algorithm, Sft):
            continue
        if not await has_demonstrations(session, config.algorithm, row.dataset_id):
            found[row.id] = list(config.algorithm.runs)
    return found


async def run_training_on(session: ReadSession, run_id: str) -> str | None:
    """A run whose demonstrations are rollouts of this one; None without any."""
    found: str | None = await session.scalar(_TRAINING_ON, {"run": run_id})
    return found


def _scope(algorithm: Sft, dataset_id: str) -> dict[str, object]:
    return {"runs": algorithm.runs, "dataset": dataset_id, "min_reward": algorithm.min_reward}
