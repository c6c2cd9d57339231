"""Two runs train at once on one engine, each with a LoRA adapter of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest

from leyden.libs.client import Client
from tests.campaigns.soak import QUICK, bandit_run
from tests.e2e.pools import platform_with_pools
from tests.invariants import lost_calls, violations
from tests.support.long import long_only
from tests.support.tiny_model import make_tiny_model
from tests.support.waiting import until

STEPS = 4
SHARED = {"adapters": 2, "max_adapter_rank": 16}
VERSIONS = """
    SELECT run_id, array_agg(DISTINCT max_policy_version ORDER BY max_policy_version) FROM model_calls
    WHERE run_id = ANY(%s) GROUP BY run_id
"""


@long_only
@pytest.mark.timeout(900)
def test_two_runs_share_an_engine_and_train_at_once(tmp_path: Path) -> None:
    with (
        platform_with_pools(tmp_path, {"default": make_tiny_model(tmp_path / "tiny")}, **SHARED) as platform,
        Client(platform.facts.url("api"), platform.token, patience_seconds=60) as client,
    ):
        client.upload_dataset("bandit", [{"number": number} for number in range(16)])
        logs = [tmp_path / f"{name}.log" for name in "ab"]
        training: dict[str, Any] = {"steps": STEPS, "lora": {"rank": 4}}
        runs = [client.create_run(bandit_run(log, log.stem, STEPS, training=training, **QUICK)).id for log in logs]
        until(lambda: set(next(iter(client.pools())).run_ids) == set(runs), "both runs to have the engine")
        until(lambda: all(client.run(run).phase == "completed" for run in runs), "the end of both", 600)

        dsn = platform.facts.database_url
        with psycopg.connect(dsn) as connection:
            sampled = dict(connection.execute(VERSIONS, [runs]).fetchall())
        for run, log in zip(runs, logs, strict=True):
            assert [version.version for version in client.policies(run)] == list(range(STEPS + 1))
            assert len(sampled[run]) > 1, "no call had an adapter"
            assert violations(dsn, run) == {}
            assert lost_calls(dsn, run, log) == []
