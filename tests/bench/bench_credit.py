"""How fast complete groups become samples: read from Postgres, computed, and written back in one transaction each."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence

import numpy as np
import psycopg
from sqlalchemy import text

from leyden.libs.contracts.ids import sample_id
from leyden.libs.store.calls import CallWriter
from leyden.libs.store.database import Database
from leyden.libs.store.samples import load_siblings, lock_pending_groups
from leyden.libs.telemetry import configure_logs
from leyden.services.credit.worker import compute, credit_pending
from tests.bench.rows import Goal, Growth, Row
from tests.bench.stored import Stored, stored
from tests.bench.trajectories import conversation
from tests.builders import add_group, add_run, run_document

GROUPS, SIBLINGS = 8, 8
"""In one measurement."""
CALLS, PROMPT_TOKENS, SAMPLED_TOKENS = 10, 2000, 500
CALLS_GROWN = (4, 16, 64)
SAMPLED_GROWN = 20
GROUPS_A_TRANSACTION = 8

_FINISH = text("""
    UPDATE rollouts SET state = 'finished', attempt = 1, reward = sibling % 2, reason = 'succeeded', finished_at = now()
    WHERE run_id = :run AND state = 'queued'
""")
_COMPLETE = text("UPDATE groups SET state = 'complete', finished_at = now() WHERE run_id = :run AND state = 'open'")


def rows(repeats: int) -> list[Row]:
    """Rollouts credited a second of CPU time, of the worker and of Postgres together."""
    configure_logs("bench", "warning")
    with stored() as store:
        return asyncio.run(_rows(store, repeats))


async def _rows(store: Stored, repeats: int) -> list[Row]:
    database = Database(store.dsn)
    try:
        found, computed = [], []
        for _ in range(repeats):
            await _fill(database, GROUPS, CALLS, SAMPLED_TOKENS)
            computed.append(await _compute(database))
            found.append(await _credit(store, database, GROUPS, CALLS, SAMPLED_TOKENS))
        growth = [await _grown(store, database, calls) for calls in CALLS_GROWN]
    finally:
        await database.close()
    return [
        Row(
            part="credit",
            name=f"rollouts credited, {CALLS} calls of {PROMPT_TOKENS} + {SAMPLED_TOKENS} tokens each",
            unit="rollouts/CPU second",
            repeats=found,
            baseline_name="the computation alone, rows in memory",
            baseline=computed,
            goal=Goal(at_least=50),
            growth=Growth("calls of a rollout", "ms CPU a call", CALLS_GROWN, growth),
            note="CPU time of the worker and of Postgres; every sampled token is found once in the samples. Growing:"
            f" {SAMPLED_GROWN} tokens a call.",
        )
    ]


async def _grown(store: Stored, database: Database, calls: int) -> float:
    """The cost of a call in ms of CPU time, where every rollout has so many."""
    rates = []
    for _ in range(3):
        await _fill(database, 1, calls, SAMPLED_GROWN)
        rates.append(await _credit(store, database, 1, calls, SAMPLED_GROWN))
    return 1000 / statistics.median(rates) / calls


async def _fill(database: Database, groups: int, calls: int, sampled: int) -> None:
    """Complete groups whose siblings made so many calls, each continuing the one before."""
    rng = random.Random(groups)
    run = await add_run(database, config=run_document(sampling={"group_size": SIBLINGS, "groups_per_step": 1}))
    writer = CallWriter(database.dsn)
    for number in range(groups):
        _, rollouts = await add_group(database, run, number, size=SIBLINGS)
        for rollout in rollouts:
            await writer.write(
                conversation(rng, run.id, rollout.id, calls=calls, prompt=PROMPT_TOKENS, sampled=sampled)
            )
    await writer.close()
    async with database.session() as session:
        await session.execute(_FINISH, {"run": run.id})
        await session.execute(_COMPLETE, {"run": run.id})


async def _compute(database: Database) -> float:
    """Rollouts a second of CPU time, where nothing is read or written."""
    async with database.session() as session:
        groups = await lock_pending_groups(session, GROUPS)
        loaded = await load_siblings(session, groups)
    began = time.process_time()
    compute(groups, loaded)
    return len(loaded.rollouts) / (time.process_time() - began)


async def _credit(store: Stored, database: Database, groups: int, calls: int, sampled: int) -> float:
    """Rollouts a second of CPU time, from complete groups to committed samples."""
    before = time.process_time() + store.cpu_seconds()
    credited: list[str] = []
    while found := await credit_pending(database, GROUPS_A_TRANSACTION):
        credited += found
    busy = time.process_time() + store.cpu_seconds() - before
    if len(credited) != groups:
        raise AssertionError(f"of {groups} groups {len(credited)} were credited")
    _prove(store.dsn, credited, calls, sampled)
    return groups * SIBLINGS / busy


def _prove(dsn: str, groups: Sequence[str], calls: int, sampled: int) -> None:
    """Raises where samples do not hold what the calls sampled: each token of each call once, with its probability."""
    with psycopg.connect(dsn) as connection:
        samples = connection.execute(
            "SELECT rollout_id, id, token_ids, mask, generator_logprobs FROM samples WHERE group_id = ANY(%s)",
            (list(groups),),
        ).fetchall()
        said = connection.execute(
            "SELECT c.rollout_id, string_agg(c.sampled_ids, '' ORDER BY c.sequence),"
            " string_agg(c.generator_logprobs, '' ORDER BY c.sequence)"
            " FROM rollouts r JOIN model_calls c ON c.run_id = r.run_id AND c.rollout_id = r.id"
            " WHERE r.group_id = ANY(%s) GROUP BY c.rollout_id",
            (list(groups),),
        ).fetchall()
    spoken = {rollout: (np.frombuffer(ids, "<i4"), np.frombuffer(logprobs, "<f4")) for rollout, ids, logprobs in said}
    if len(samples) != len(spoken) or len(samples) != len(groups) * SIBLINGS:
        raise AssertionError(f"{len(spoken)} rollouts made {len(samples)} samples")
    for rollout, name, ids, mask, logprobs in samples:
        where = np.frombuffer(mask, np.uint8) == 1
        same = np.array_equal(np.frombuffer(ids, "<i4")[where], spoken[rollout][0])
        same = same and np.array_equal(np.frombuffer(logprobs, "<f4")[where], spoken[rollout][1])
        if not same or where.sum() != calls * sampled or name != sample_id(rollout, 0):
            raise AssertionError(f"sample {name} does not hold what its calls sampled")
