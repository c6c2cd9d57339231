"""After a training with debug logs no log, metric, table, command line or error contains a secret."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import psycopg
import pytest
from psycopg import sql

from leyden.libs.capability import KeyRing, sign
from leyden.libs.cli.local.platform import Platform
from leyden.libs.cli.local.services import ENGINE_ADMIN_KEY, ENGINE_KEY, KEYS, LOGS
from leyden.libs.client import Client
from leyden.libs.contracts.capability import Capability, Scope
from tests.campaigns.soak import bandit_run, small_platform

RUN_SECONDS = 240.0


def secrets_of(platform: Platform, token: str) -> dict[str, str]:
    """Secrets by name. All agents' keys share their beginning, which depends on the key ring."""
    facts = platform.facts
    any_key = Capability(run_id="r", rollout_id="r.0.0", attempt=1, scopes=frozenset(Scope), expires_at=2**31)
    urls = {"postgres": facts.database_url, "redis": facts.redis_url}
    return {
        "admin token": platform.token,
        "token": token,
        "engine key": (facts.home / ENGINE_KEY).read_text().strip(),
        "engine admin key": (facts.home / ENGINE_ADMIN_KEY).read_text().strip(),
        "an agent's key": sign(KeyRing(facts.home / KEYS), any_key).split(".")[0],
        **{f"ring {kid}": secret for kid, secret in json.loads((facts.home / KEYS).read_text()).items()},
        **{name: password for name, url in urls.items() if (password := urlsplit(url).password)},
    }


def found_in(text: str, secrets: dict[str, str]) -> list[str]:
    return [name for name, secret in secrets.items() if secret in text]


def command_lines() -> Iterator[str]:
    for process in psutil.process_iter(["cmdline"]):
        yield " ".join(process.info["cmdline"] or [])


def tables(dsn: str) -> Iterator[tuple[str, str]]:
    """Every row of every table, as text."""
    with psycopg.connect(dsn) as connection:
        names = connection.execute(
            "SELECT relname FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace"
        )
        for (name,) in names.fetchall():
            for (row,) in connection.execute(sql.SQL("SELECT t::text FROM {} t").format(sql.Identifier(name))):
                yield name, row


def errors(platform: Platform, secrets: dict[str, str]) -> Iterator[str]:
    """Answers of endpoints to keys that are not valid there."""
    facts = platform.facts
    addresses = [
        ("POST", facts.url("gateway") + "/r/run-x.0.0/1/v1/chat/completions"),
        ("POST", facts.url("collector") + "/r/run-x.0.0/1/v1/traces"),
        ("POST", facts.url("collector") + "/r/run-x.0.0/1/reward"),
        ("GET", facts.url("api") + "/v1/runs/nothing"),
        ("POST", facts.url("api") + "/v1/tokens"),
        ("POST", facts.url("engine") + "/generate"),
    ]
    with httpx.Client(trust_env=False, timeout=60) as http:
        for method, url in addresses:
            for secret in secrets.values():
                answer = http.request(method, url, json={}, headers={"authorization": f"Bearer {secret}"})
                yield f"{answer.headers} {answer.text}"


@pytest.mark.timeout(900)
def test_no_secret_is_found_anywhere(tmp_path: Path) -> None:
    with small_platform(tmp_path, LEYDEN_LOG_LEVEL="debug") as platform:
        facts = platform.facts
        with Client(facts.url("api"), platform.token, patience_seconds=60) as client:
            headers = {"authorization": f"Bearer {platform.token}"}
            asked = {"name": "ci", "scopes": ["read"]}
            token = httpx.post(f"{facts.url('api')}/v1/tokens", json=asked, headers=headers, timeout=60).json()["token"]
            secrets = secrets_of(platform, token)
            client.upload_dataset("bandit", [{"number": number} for number in range(4)])
            sampling = {"group_size": 4, "groups_per_step": 1, "max_attempts": 3}
            run = client.create_run(bandit_run(tmp_path / "received.log", "secrets", 1, sampling=sampling))
            deadline, seen = time.monotonic() + RUN_SECONDS, list[str]()
            while client.run(run.id).phase not in {"completed", "failed"}:
                assert time.monotonic() < deadline
                seen += [words for line in command_lines() for words in found_in(line, secrets)]
                time.sleep(0.1)
            assert client.run(run.id).phase == "completed"
        assert seen == []
        assert [found for answer in errors(platform, secrets) for found in found_in(answer, secrets)] == []
        for name in platform.pids():
            metrics = httpx.get(f"{facts.internal_url(name)}/metrics", trust_env=False, timeout=60).text
            assert found_in(metrics, secrets) == [], name
        assert [(name, found) for name, row in tables(facts.database_url) for found in found_in(row, secrets)] == []
    logs = [
        *(facts.home / LOGS).glob("*.log*"),
        *(facts.home / "postgres").glob("*.log"),
        *(facts.home / "redis").glob("*.log"),
    ]
    assert len(logs) > 7
    assert [(log.name, found) for log in logs for found in found_in(log.read_text(errors="replace"), secrets)] == []
