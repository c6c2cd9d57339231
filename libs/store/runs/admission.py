"""Groups that the controller admits, and the past of a run that decides on their tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from sqlalchemy import func, select, text
from sqlalchemy.dialects.postgresql import insert

from leyden.libs.contracts.ids import rollout_id
from leyden.libs.store import tables
from leyden.libs.store.database import ReadSession, Session
from leyden.libs.store.rewards import SIBLING, SOLVE_RATE


@dataclass(frozen=True)
class NewGroup:
    """A group to be admitted; ids are deterministic, so admitting it twice makes one row.

    `agent`: the one of the run's agents that plays it; `runner_type`: that one's; `has_greedy`: its last sibling is
    decoded greedily; `replaces`: the lost group whose task it samples again.
    """

    id: str
    run_id: str
    evaluation_id: str | None
    number: int
    dataset_id: str
    task_number: int
    size: int
    admitted_version: int
    agent: str | None = None
    runner_type: str = "process"
    has_greedy: bool = False
    replaces: str | None = None

    @property
    def rollout_ids(self) -> list[str]:
        """The siblings, in order."""
        return [rollout_id(self.id, sibling) for sibling in range(self.size)]


@dataclass(frozen=True)
class LostGroup:
    """A training group that credit excluded, or that the trainer refused as too old."""

    id: str
    task_number: int


@dataclass(frozen=True)
class Replacements:
    """The run's groups that sample a lost group's task again: `made` so far, and the lost groups that still `wait`."""

    made: int = 0
    waiting: tuple[LostGroup, ...] = ()


_SOLVE_RATES = text(f"""
    SELECT g.task_number, {SOLVE_RATE} AS rate
    FROM (
        SELECT id, task_number FROM groups WHERE run_id = :run AND evaluation_id IS NULL AND state = 'complete'
        ORDER BY number DESC LIMIT :window
    ) g JOIN rollouts ON rollouts.group_id = g.id AND rollouts.state = 'finished' AND {SIBLING}
    GROUP BY g.task_number
""")  # noqa: S608  # constants alone

# A task that is lost twice is not sampled a third time before its next turn: it may be the task that is broken. Each
# policy of the run judges its groups for itself.
_LOST = text("""
    SELECT g.id, g.task_number FROM (
        SELECT c.group_id FROM policies JOIN group_credits c ON c.run_id = policies.id
        WHERE policies.run_id = :run AND c.verdict = 'excluded'
        UNION
        SELECT s.group_id FROM policies JOIN step_groups s ON s.run_id = policies.id
        WHERE policies.run_id = :run AND s.verdict = 'stale'
    ) lost JOIN groups g ON g.id = lost.group_id
    WHERE g.run_id = :run AND g.evaluation_id IS NULL AND g.replaces IS NULL
    AND NOT EXISTS (SELECT FROM groups other WHERE other.run_id = :run AND other.replaces = g.id)
    ORDER BY g.number
""")


async def admit_groups(session: Session, groups: Sequence[NewGroup], trace_parents: Mapping[str, str]) -> None:
    """Writes groups and their rollouts. Idempotency key: the deterministic ids; what exists stays as it is.

    Args: trace_parents: rollout id to W3C trace context.
    """
    if not groups:
        return
    rows = [{name: value for name, value in asdict(group).items() if name != "has_greedy"} for group in groups]
    await session.execute(insert(tables.Group).on_conflict_do_nothing(), rows)
    rollouts = [
        {
            "id": rollout,
            "run_id": group.run_id,
            "group_id": group.id,
            "sibling": sibling,
            "greedy": group.has_greedy and sibling == group.size - 1,
            "trace_parent": trace_parents.get(rollout),
        }
        for group in groups
        for sibling, rollout in enumerate(group.rollout_ids)
    ]
    await session.execute(insert(tables.Rollout).on_conflict_do_nothing(), rollouts)


async def solve_rates(session: ReadSession, run_id: str, window: int) -> dict[int, float]:
    """The share of known rewards that solved their task, by task, in the newest `window` complete training groups.

    A reward of at least 1 solves it; a task without a known reward has no share.
    """
    rows = await session.execute(_SOLVE_RATES, {"run": run_id, "window": window})
    return {row.task_number: row.rate for row in rows if row.rate is not None}


async def find_replacements(session: ReadSession, run_id: str) -> Replacements:
    """The run's lost groups whose task no other group has sampled since, in their order, and the number of others."""
    table = tables.Group
    made = select(func.count()).where(table.run_id == run_id, table.replaces.is_not(None))
    lost = await session.execute(_LOST, {"run": run_id})
    return Replacements(await session.scalar(made) or 0, tuple(LostGroup(*row) for row in lost))
