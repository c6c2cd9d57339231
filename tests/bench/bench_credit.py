"""Complete groups become samples: credit reads them from Postgres, computes, and writes them back."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

import numpy as np
import psycopg
from sqlalchemy import text

from leyden.libs.contracts.ids import sample_id
from leyden.libs.store.database import Database
from leyden.libs.store.records.calls import write_calls
from leyden.libs.telemetry import configure_logs
from leyden.services.credit.worker import GROUPS_PER_TRANSACTION, credit_pending
from tests.bench.rows import Row
from tests.bench.stored import Stored, stored
from tests.bench.trajectories import conversation
from tests.support.builders import add_group, add_run, run_document

GROUPS, SIBLINGS = 8, 8
"""In one measurement."""
CALLS, PROMPT_TOKENS, SAMPLED_TOKENS = 10, 2000, 500

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
    rates = []
    try:
        for _ in range(repeats):
            await _fill(database)
            rates.append(await _credit(store, database))
    finally:
        await database.close()
    work = f"rollouts credited, {CALLS} calls of {PROMPT_TOKENS} + {SAMPLED_TOKENS} tokens each"
    return [Row("credit", work, "rollouts a CPU second", rates, at_least=330)]


async def _fill(database: Database) -> None:
    """Adds complete groups; each call of a sibling continues the one before."""
    rng = random.Random(0)
    run = await add_run(database, config=run_document(sampling={"group_size": SIBLINGS, "groups_per_step": 1}))
    for number in range(GROUPS):
        _, rollouts = await add_group(database, run, number, size=SIBLINGS)
        for rollout in rollouts:
            made = conversation(rng, run.id, rollout.id, calls=CALLS, prompt=PROMPT_TOKENS, sampled=SAMPLED_TOKENS)
            await write_calls(database, made)
    async with database.session() as session:
        await session.execute(_FINISH, {"run": run.id})
        await session.execute(_COMPLETE, {"run": run.id})


async def _credit(store: Stored, database: Database) -> float:
    """Rollouts a second of CPU time, from complete groups to committed samples."""
    before = time.process_time() + store.cpu_seconds()
    credited: list[str] = []
    while found := await credit_pending(database, GROUPS_PER_TRANSACTION):
        credited += found
    busy = time.process_time() + store.cpu_seconds() - before
    if len(credited) != GROUPS:
        raise AssertionError(f"of {GROUPS} groups {len(credited)} were credited")
    _check(store.dsn, credited)
    return GROUPS * SIBLINGS / busy


def _check(dsn: str, groups: Sequence[str]) -> None:
    """Raises: AssertionError: a sample lacks a sampled token of a call, or its log-probability"""
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
        if not same or where.sum() != CALLS * SAMPLED_TOKENS or name != sample_id(rollout, 0):
            raise AssertionError(f"sample {name} differs from its calls")
