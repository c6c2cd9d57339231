"""Every token knows the policy version that sampled it, and the trainer refuses what is older than the allowed lag."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pytest
import torch
from numpy.typing import NDArray
from sqlalchemy import select

from leyden.libs.cli.local.platform import Platform
from leyden.libs.client import Client
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.store.records.chains import FullCall, full_calls
from leyden.services.trainer.model.load import read_model
from tests.campaigns.soak import bandit_run
from tests.invariants import lost_calls, violations
from tests.support.chaos import RunWatch, kill
from tests.support.long import long_only

STEPS = 8
LAG = 2
TOKENS = 192
WAIT_SECONDS = 240.0


def _wait_for_steps(client: Client, run_id: str, steps: int) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while client.run(run_id).progress.step < steps:
        assert time.monotonic() < deadline, f"step {steps} was not made: {client.run(run_id)}"
        time.sleep(0.1)


def _rows(platform: Platform, statement: str, run_id: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(platform.facts.database_url) as connection:
        return connection.execute(statement, {"run": run_id}).fetchall()


async def _calls_across_versions_first(dsn: str, run_id: str) -> list[tuple[tables.ModelCall, FullCall]]:
    table, database = tables.ModelCall, Database(dsn)
    completed = (table.run_id == run_id) & (table.status == "completed")
    order = (table.min_policy_version == table.max_policy_version, table.id)
    async with database.read() as session:
        rows = (await session.scalars(select(table).where(completed).order_by(*order).limit(24))).all()
        full = await full_calls(session, rows)
    await database.close()
    return [(row, one) for row, one in zip(rows, full, strict=True) if isinstance(one, FullCall)]


def _gaps(path: str, calls: Sequence[tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]]) -> list[Any]:
    """For each call, how far each sampled token's log-probability is from that of the model in a folder."""
    model = read_model(Path(path)).eval()
    gaps = []
    for prompt, sampled, logprobs in calls:
        tokens = torch.from_numpy(np.concatenate([prompt, sampled]).astype(np.int64))[None]
        with torch.no_grad():
            all_logprobs = model(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        own = all_logprobs.gather(1, torch.from_numpy(sampled.astype(np.int64))[:, None])[:, 0].numpy()
        gaps.append(np.abs(own - logprobs))
    return gaps


@long_only
@pytest.mark.timeout(900)
def test_tokens_name_the_weights_that_sampled_them_and_a_late_group_is_refused(
    platform: Platform, client: Client, received: Path, tmp_path: Path
) -> None:
    gate = received.with_name("gate")
    document = bandit_run(
        received,
        "versions",
        STEPS,
        agent={
            **bandit_run(received, "", 1)["agent"],
            "environment": {"BANDIT_LOG": str(received), "BANDIT_TOKENS": str(TOKENS), "BANDIT_GATE": str(gate)},
        },
        runner={"timeout_seconds": 600},
        sampling={"group_size": 4, "groups_per_step": 2, "max_policy_lag": LAG},
        optimizer={"learning_rate": 0.01},
        training={"steps": STEPS, "keep_checkpoints": STEPS + 1},
    )
    run = client.create_run(document)
    _wait_for_steps(client, run.id, 2)
    assert kill(platform, "engine", run.id)
    _wait_for_steps(client, run.id, 4)
    assert kill(platform, "engine", run.id)
    _wait_for_steps(client, run.id, 5)
    # Group 0 has been asking since version 0, through every swap; step 6 improves version 5.
    gate.touch()
    assert RunWatch(platform, run.id).wait_for_end(WAIT_SECONDS)

    ended = client.run(run.id)
    assert (ended.phase, ended.reason) == ("completed", None)
    assert violations(platform.facts.database_url, run.id) == {}
    assert lost_calls(platform.facts.database_url, run.id, received) == []
    _the_late_group_was_refused(platform, run.id)
    _every_token_has_the_probability_that_its_version_gives_it(platform, run.id)


def _the_late_group_was_refused(platform: Platform, run_id: str) -> None:
    judged = _rows(
        platform,
        "SELECT t.group_id, t.verdict, t.step, c.verdict, c.min_policy_version FROM step_groups t"
        " JOIN group_credits c ON c.group_id = t.group_id WHERE t.run_id = %(run)s AND t.verdict = 'stale'",
        run_id,
    )
    # On a busy machine another group may come too late, too.
    assert (f"{run_id}.0", "stale", None, "credited", 0) in judged
    trained = "SELECT count(*) FROM step_samples WHERE run_id = %(run)s AND sample_id LIKE %(run)s || '.0.%%'"
    assert _rows(platform, trained, run_id) == [(0,)]
    # A group took the place of each.
    groups = _rows(platform, "SELECT count(*) FROM groups WHERE run_id = %(run)s", run_id)
    assert groups == [(STEPS * 2 + len(judged),)]


def _every_token_has_the_probability_that_its_version_gives_it(platform: Platform, run_id: str) -> None:
    rows = asyncio.run(_calls_across_versions_first(platform.facts.database_url, run_id))
    calls = [
        (
            np.frombuffer(full.prompt_ids, "<i4"),
            np.frombuffer(row.sampled_ids, "<i4"),
            np.frombuffer(row.generator_logprobs, "<f4"),
        )
        for row, full in rows
    ]
    versions = [np.frombuffer(row.policy_versions, "<i4") for row, _ in rows]
    assert any(len(set(of_call.tolist())) > 1 for of_call in versions), "no answer was sampled across a weight swap"
    weights = "SELECT version, path, content_sha256 FROM policy_versions WHERE run_id = %(run)s"
    made = {version: (path, content) for version, path, content in _rows(platform, weights, run_id)}
    by_version = {version: _gaps(path, calls) for version, (path, _) in made.items()}
    for number, of_call in enumerate(versions):
        own = np.array([by_version[version][number][token] for token, version in enumerate(of_call)])
        assert own.max() < 1e-3
        # Not just any version would do: others give these tokens other probabilities. A step of groups that all have
        # nothing to learn makes a version of the same weights.
        alike = {made[version][1] for version in of_call.tolist()}
        others = [gaps[number].mean() for version, gaps in by_version.items() if made[version][1] not in alike]
        assert min(others) > 10 * own.mean()
