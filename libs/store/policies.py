"""The policies of runs. Only this module and the view `policies`, which queries read, know how they are stored.

A policy's id is the key of its versions, steps, verdicts and samples, of its trainer, and of its pool's engines. The
run's own model is the policy without a name, and its id is the run's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from sqlalchemy import select, text

from leyden.libs.contracts.states import RunIntent
from leyden.libs.store import tables
from leyden.libs.store.database import ReadSession, Session

OWN = ""
"""The name of the run's own model among its policies."""

_BY_ID = text("SELECT id, run_id, name, trains FROM policies WHERE id = ANY(:ids)")
_OF_RUNS = text("""
    SELECT id, run_id, name, trains FROM policies WHERE run_id = ANY(:runs) ORDER BY name
""")
_SET_INTENT = text("UPDATE runs SET intent = :intent WHERE id = :run OR lead_run_id = :run")


@dataclass(frozen=True)
class PolicyKey:
    """A policy of a run; `trains`: whether it has steps to make."""

    id: str
    run_id: str
    name: str
    trains: bool

    @property
    def is_own(self) -> bool:
        """Whether this is the run's own model."""
        return self.name == OWN


class UnknownPolicy(LookupError):
    """The run has no policy of this name with a model that the platform serves."""


async def policies_by_id(session: ReadSession, ids: Collection[str]) -> dict[str, PolicyKey]:
    """Policies by id, without those that are unknown."""
    rows = await session.execute(_BY_ID, {"ids": list(ids)})
    return {row.id: PolicyKey(*row) for row in rows}


async def policies_of(session: ReadSession, run_ids: Collection[str]) -> dict[str, list[PolicyKey]]:
    """The policies of each run, its own model first, then by name."""
    found = defaultdict[str, list[PolicyKey]](list)
    for row in await session.execute(_OF_RUNS, {"runs": list(run_ids)}):
        found[row.run_id].append(PolicyKey(*row))
    return found


async def further_policies(session: ReadSession, run_id: str) -> dict[str, PolicyKey]:
    """A run's policies by name, without its own model."""
    found = (await policies_of(session, [run_id])).get(run_id, [])
    return {one.name: one for one in found if not one.is_own}


async def base_models(session: ReadSession, ids: Collection[str]) -> dict[str, str]:
    """The folder of the model with which each policy began, by id, once its trainer has recorded that."""
    table = tables.RunBase
    rows = await session.execute(select(table.run_id, table.path).where(table.run_id.in_(ids)))
    return {row.run_id: row.path for row in rows}


async def set_intent(session: Session, run_id: str, intent: RunIntent) -> None:
    """Sets the intent of a run for all of its policies."""
    await session.execute(_SET_INTENT, {"run": run_id, "intent": intent})


def policy_columns(run_id: str, name: str) -> Mapping[str, str]:
    """The columns that make a new row of `runs` a further policy of a run."""
    return {"lead_run_id": run_id, "policy": name}


IS_RUN = tables.Run.lead_run_id.is_(None)
"""Holds for rows of `runs` that are runs, not further policies of one."""
