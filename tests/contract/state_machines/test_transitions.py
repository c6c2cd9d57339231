"""Every life cycle against its table of transitions: two sessions move one row in any order, and Postgres is the judge.

What the table allows happens, what it does not is refused and changes nothing, what another session holds waits, and
what was not committed never was.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

import psycopg
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from psycopg import sql

from leyden.libs.contracts import states
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from tests.support import builders
from tests.support.state_machines import walk


@dataclass(frozen=True)
class Life:
    """A table, its column of states, the state of a new row, and what may follow what."""

    table: type[tables.Base]
    column: str
    key: str
    first: StrEnum
    transitions: Mapping[Any, frozenset[Any]]


LIVES = {
    "run": Life(tables.RunStatus, "phase", "run_id", states.RunPhase.PENDING, states.RUN_TRANSITIONS),
    "group": Life(tables.Group, "state", "id", states.GroupState.OPEN, states.GROUP_TRANSITIONS),
    "rollout": Life(tables.Rollout, "state", "id", states.RolloutState.QUEUED, states.ROLLOUT_TRANSITIONS),
    "attempt": Life(tables.Attempt, "state", "rollout_id", states.AttemptState.LEASED, states.ATTEMPT_TRANSITIONS),
}


class Row:
    """The row of a life, and connections that may each have a transaction open on it."""

    def __init__(self, dsn: str, life: Life, key: str) -> None:
        self._life, self._key = life, key
        self._dsn = dsn
        self.sessions = [self._connect() for _ in range(2)]
        self.reader = psycopg.connect(dsn, autocommit=True)

    def _connect(self) -> psycopg.Connection:
        # A session that finds the row taken gives up instead of waiting: the machine has one thread.
        return psycopg.connect(self._dsn, options="-c lock_timeout=10ms")

    def break_off(self, which: int) -> None:
        """Replaces a session by a new one; returns when the server has forgotten the old one's transaction."""
        pid = self.sessions[which].info.backend_pid
        self.sessions[which].close()
        while self.reader.execute("SELECT FROM pg_stat_activity WHERE pid = %s", (pid,)).fetchone() is not None:
            time.sleep(0.001)
        self.sessions[which] = self._connect()

    def move(self, which: int, state: str) -> None:
        statement = sql.SQL("UPDATE {} SET {} = %s WHERE {} = %s")
        names = (self._life.table.__tablename__, self._life.column, self._life.key)
        self.sessions[which].execute(statement.format(*map(sql.Identifier, names)), (state, self._key))

    def state(self) -> str:
        names = (self._life.column, self._life.table.__tablename__, self._life.key)
        query = sql.SQL("SELECT {} FROM {} WHERE {} = %s").format(*map(sql.Identifier, names))
        row = self.reader.execute(query, (self._key,)).fetchone()
        assert row is not None
        return str(row[0])

    def close(self) -> None:
        for connection in (*self.sessions, self.reader):
            connection.close()


async def new_row(dsn: str, entity: str) -> str:
    """The key of a fresh row in its first state."""
    database = Database(dsn, pool_size=1)
    try:
        run = await builders.add_run(database)
        if entity == "run":
            async with database.session() as session:
                row = await session.get_one(tables.RunStatus, run.id)
                await session.delete(row)
                await session.flush()
                session.add(tables.RunStatus(run_id=run.id, phase="pending"))
            return run.id
        group, [rollout, _] = await builders.add_group(database, run)
        if entity == "attempt":
            await builders.add_attempt(database, rollout, state="leased")
        return group.id if entity == "group" else rollout.id
    finally:
        await database.close()


class LifeMachine(RuleBasedStateMachine):
    dsn: ClassVar[str]
    entity: ClassVar[str]
    both = st.integers(0, 1)

    @initialize()
    def begin(self) -> None:
        self.life = LIVES[self.entity]
        self.row = Row(self.dsn, self.life, asyncio.run(new_row(self.dsn, self.entity)))
        self.committed: str = self.life.first
        self.open: dict[int, str] = {}

    def teardown(self) -> None:
        if hasattr(self, "row"):
            self.row.close()

    # Small numbers, so that a walk goes far along what is allowed and still tries what is not.
    @rule(which=both, data=st.data(), lawful=st.integers(0, 2))
    def move(self, which: int, data: st.DataObject, lawful: int) -> None:
        old = self.open.get(which, self.committed)
        allowed = self.life.transitions[type(self.life.first)(old)]
        state = data.draw(st.sampled_from(sorted(allowed if allowed and lawful else self.life.transitions)))
        if 1 - which in self.open:
            with pytest.raises(psycopg.errors.LockNotAvailable):
                self.row.move(which, state)
            self.rollback(which)
        elif state == old or state in allowed:
            self.row.move(which, state)
            self.open[which] = state
        else:
            with pytest.raises(psycopg.errors.CheckViolation, match=f"{self.entity} may not go from {old} to {state}"):
                self.row.move(which, state)
            self.rollback(which)

    @rule(which=both)
    def commit(self, which: int) -> None:
        self.row.sessions[which].commit()
        self.committed = self.open.pop(which, self.committed)

    @rule(which=both)
    def rollback(self, which: int) -> None:
        self.row.sessions[which].rollback()
        self.open.pop(which, None)

    @rule(which=both)
    def break_off(self, which: int) -> None:
        """The process dies in the middle of its transaction."""
        self.row.break_off(which)
        self.open.pop(which, None)

    @invariant()
    def everybody_sees_what_was_committed(self) -> None:
        if hasattr(self, "row"):
            assert self.row.state() == self.committed


@pytest.mark.parametrize("entity", LIVES)
def test_concurrent_sessions_can_make_only_allowed_transitions(postgres_dsn: str, entity: str) -> None:
    machine = type("Machine", (LifeMachine,), {"entity": entity})
    walk(machine, postgres_dsn, examples=12, steps=30)
