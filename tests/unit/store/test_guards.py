"""Triggers and constraints of Postgres refuse invalid changes from any client."""

from __future__ import annotations

import itertools
from enum import StrEnum
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import StatementError

from leyden.libs.contracts import states
from leyden.libs.store import tables
from leyden.libs.store.database import BadValue, Database, Refused
from tests.support import builders

LIVES: list[tuple[Any, str, str, type[StrEnum], Any]] = [
    (tables.RunStatus, "run", "phase", states.RunPhase, states.RUN_TRANSITIONS),
    (tables.Group, "group", "state", states.GroupState, states.GROUP_TRANSITIONS),
    (tables.Rollout, "rollout", "state", states.RolloutState, states.ROLLOUT_TRANSITIONS),
    (tables.Attempt, "attempt", "state", states.AttemptState, states.ATTEMPT_TRANSITIONS),
]


async def execute(database: Database, statement: str, **parameters: Any) -> None:
    async with database.session() as session:
        await session.execute(text(statement), parameters)


@pytest.mark.parametrize("life", LIVES, ids=[life[1] for life in LIVES])
async def test_only_the_transitions_of_the_contracts_are_allowed(database: Database, life: Any) -> None:
    table, entity, column, known, transitions = life
    run = await builders.add_run(database)
    _, rollouts = await builders.add_group(database, run)
    await builders.add_attempt(database, rollouts[0])
    name = table.__tablename__
    for old, new in itertools.permutations(known, 2):
        async with database.session() as session:
            # The state to start from is put there past the guard.
            await session.execute(text("SET LOCAL session_replication_role = replica"))
            await session.execute(text(f"UPDATE {name} SET {column} = :state"), {"state": old})
        change = execute(database, f"UPDATE {name} SET {column} = :state", state=new)
        if new in transitions[old]:
            await change
        else:
            with pytest.raises(Refused, match=f"{entity} may not go from {old} to {new}"):
                await change


async def test_writing_the_same_state_again_is_no_transition(database: Database) -> None:
    run = await builders.add_run(database)
    await execute(database, "UPDATE run_status SET phase = phase, reason = 'x' WHERE run_id = :run", run=run.id)


async def test_an_unknown_state_is_refused(database: Database) -> None:
    await builders.add_run(database)
    with pytest.raises(Refused, match="intent_known") as refused:
        await execute(database, "UPDATE runs SET intent = 'stopped'")
    assert not isinstance(refused.value, BadValue)


@pytest.mark.parametrize("statement", ["UPDATE {table} SET run_id = run_id || '0'", "DELETE FROM {table}"])
@pytest.mark.parametrize("table", ["outcomes", "model_calls", "spans", "samples", "group_credits"])
async def test_history_is_never_changed(database: Database, table: str, statement: str) -> None:
    run = await builders.add_run(database)
    group, [rollout, _] = await builders.add_group(database, run)
    await builders.add_outcome(database, rollout)
    await builders.add_call(database, rollout)
    await builders.add_tool_span(database, rollout, "memory")
    await builders.add_sample(database, rollout)
    await builders.add_credited_group(database, group)
    with pytest.raises(Refused, match="is append-only") as caught:
        await execute(database, statement.format(table=table))
    assert isinstance(getattr(caught.value.__cause__, "orig", None), psycopg.errors.RestrictViolation)


async def test_a_reward_of_telemetry_only_ever_gets_the_place_that_it_lacks(database: Database) -> None:
    run = await builders.add_run(database)
    _, [rollout, _] = await builders.add_group(database, run)
    sent = {"rollout_id": rollout.id, "attempt": 1, "run_id": run.id, "name": "n", "value": 1.0}
    async with database.session() as session:
        session.add(tables.Reward(**sent, key="t", source="telemetry"))
        session.add(tables.Reward(**sent, key="e", source="endpoint"))
    await execute(database, "UPDATE rewards SET response_id = 'r' WHERE key = 't'")
    await execute(database, "UPDATE rewards SET tool_call_id = 'c' WHERE key = 't'")
    for change in ("response_id = 's'", "response_id = NULL", "tool_call_id = 'd'", "tool_call_id = NULL", "value = 2"):
        with pytest.raises(Refused, match="is append-only"):
            await execute(database, f"UPDATE rewards SET {change} WHERE key = 't'")
    for statement in ("UPDATE rewards SET response_id = 'r' WHERE key = 'e'", "DELETE FROM rewards"):
        with pytest.raises(Refused, match="is append-only"):
            await execute(database, statement)


async def test_policy_versions_have_no_gaps(database: Database) -> None:
    run = await builders.add_run(database)
    with pytest.raises(Refused, match="would leave a gap: the newest is none"):
        await builders.add_policy_version(database, run, 1)
    await builders.add_policy_version(database, run, 0)
    await builders.add_policy_version(database, run, 1)
    with pytest.raises(Refused, match=f"policy version 3 of {run.id} would leave a gap: the newest is 1"):
        await builders.add_policy_version(database, run, 3)
    with pytest.raises(Refused, match="pk_policy_versions"):
        await builders.add_policy_version(database, run, 0)


async def test_a_policy_version_only_ever_loses_its_files(database: Database) -> None:
    run = await builders.add_run(database)
    await builders.add_policy_version(database, run, 0)
    await execute(database, "UPDATE policy_versions SET pruned_at = now()")
    for statement in ("UPDATE policy_versions SET path = 'elsewhere'", "DELETE FROM policy_versions"):
        with pytest.raises(Refused, match="is append-only"):
            await execute(database, statement)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf")])
async def test_a_reward_is_finite(database: Database, reward: float) -> None:
    run = await builders.add_run(database)
    _, rollouts = await builders.add_group(database, run)
    with pytest.raises(Refused, match="reward_finite"):
        await builders.add_outcome(database, rollouts[0], reward=reward)


async def test_a_rollout_has_one_live_attempt(database: Database) -> None:
    run = await builders.add_run(database)
    _, rollouts = await builders.add_group(database, run)
    await builders.add_attempt(database, rollouts[0], 1)
    with pytest.raises(Refused, match="uq_attempts_live"):
        await builders.add_attempt(database, rollouts[0], 2)


async def test_a_sample_is_trained_once(database: Database) -> None:
    run = await builders.add_run(database)
    statement = "INSERT INTO step_samples (run_id, sample_id, step) VALUES (:run, 's', :step)"
    await execute(database, statement, run=run.id, step=1)
    with pytest.raises(Refused, match="pk_step_samples"):
        await execute(database, statement, run=run.id, step=2)


async def test_a_read_session_writes_nothing(database: Database) -> None:
    run = await builders.add_run(database)
    async with database.read() as session:
        with pytest.raises(StatementError, match="read-only transaction"):
            await session.execute(text("UPDATE runs SET name = 'x' WHERE id = :run"), {"run": run.id})
