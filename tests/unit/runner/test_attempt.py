"""The specification of an attempt: the life of its key."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from leyden.libs.attempts.key import LATE_SECONDS
from leyden.libs.capability import KeyRing, read_key, write_keys
from leyden.services.runner.attempt import MODEL_KEY, RunnerContext, attempt_spec
from leyden.services.runner.settings import Settings
from tests.unit.attempts.test_environment import lease_of


def test_the_key_of_an_agent_that_waited_twice_for_its_start_outlives_it(tmp_path: Path) -> None:
    write_keys(tmp_path / "keys.json")
    lease = lease_of()
    leased_at = lease.expires_at.timestamp()
    keys = KeyRing(tmp_path / "keys.json", lambda: leased_at)
    context = RunnerContext(Settings(start_seconds=1800, grace_seconds=5), keys, {}, cast(Any, None))
    key = attempt_spec(lease, context).secrets[MODEL_KEY]
    ends_at = leased_at + 2 * 1800 + lease.runner.timeout_seconds + 5 + LATE_SECONDS
    assert read_key(keys, key).expires_at == int(ends_at)
