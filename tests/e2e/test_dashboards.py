"""Every query of the dashboards returns data: SQL from Postgres with a run in it, PromQL from a real Prometheus."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
import yaml

from leyden.libs.cli.local.platform import Platform
from leyden.libs.client import Client
from tests.campaigns.soak import QUICK, bandit_run
from tests.support.long import long_only
from tests.support.shared import PROMETHEUS, ROOT, free_port

DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in (ROOT / "helm/leyden/dashboards").glob("*.json")}
ABSENT = {"Attempts without success, by cause"}
"""Panels that are empty in a run without trouble."""


def queries(key: str) -> dict[str, str]:
    """Title → query of every panel's target that has the key, `expr` or `rawSql`."""
    return {
        f"{name}: {panel['title']} {target['refId']}": target[key]
        for name, dashboard in DASHBOARDS.items()
        for panel in dashboard["panels"]
        for target in panel["targets"]
        if key in target
    }


@contextmanager
def prometheus(platform: Platform, folder: Path) -> Iterator[httpx.Client]:
    """A Prometheus that scrapes every service each second."""
    # SGLang serves its metrics beside its routes.
    targets = {**platform.facts.internal_ports, "engine": platform.facts.ports["engine"]}
    jobs = [{"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]} for job, port in targets.items()]
    config = folder / "prometheus.yml"
    config.write_text(yaml.safe_dump({"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}))
    port = free_port()
    command = [
        PROMETHEUS / "prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30) as http,
    ):
        try:
            yield http
        finally:
            process.terminate()


def evaluate(http: httpx.Client, expression: str) -> list[Any]:
    """The value of PromQL now; empty while Prometheus starts."""
    # Grafana's value of a picker for all.
    query = expression.replace("$__rate_interval", "1m").replace("$namespace", ".*").replace("$release", ".*")
    try:
        answer = http.get("/api/v1/query", params={"query": query})
    except httpx.TransportError:
        return []
    if answer.status_code == 503:
        return []
    assert answer.status_code == 200, f"{expression}: {answer.text}"
    return [one for one in answer.json()["data"]["result"] if one["value"][1] != "NaN"]


@long_only
@pytest.mark.timeout(600)
def test_every_query_returns_data(platform: Platform, client: Client, received: Path, tmp_path: Path) -> None:
    evaluation = {"dataset": "bandit", "rollouts_per_task": 1}
    pending = queries("expr")
    with prometheus(platform, tmp_path) as http:
        run = client.create_run(bandit_run(received, "watched", 4, evaluation=evaluation, **QUICK))
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and (pending or client.run(run.id).phase not in {"completed", "failed"}):
            pending = {title: expression for title, expression in pending.items() if not evaluate(http, expression)}
            time.sleep(0.5)
    assert pending == {}
    assert client.run(run.id).phase == "completed"
    assert no_rows(platform.facts.database_url, run.id) == ABSENT


def no_rows(dsn: str, run_id: str) -> set[str]:
    """Titles of the panels whose SQL returns no row, or no number, for the run."""
    found = set()
    with psycopg.connect(dsn, options="-c default_transaction_read_only=on") as connection:
        for title, query in queries("rawSql").items():
            rows = connection.execute(filled(query, run_id).encode()).fetchall()
            if not any(any(value is not None for value in row[1:] or row) for row in rows):
                found.add(title.partition(": ")[2].removesuffix(" A"))
        for dashboard in DASHBOARDS.values():
            for variable in dashboard["templating"]["list"]:
                if variable["type"] == "query" and variable["name"] == "run":
                    assert (run_id,) in [row[1:] for row in connection.execute(variable["query"].encode()).fetchall()]
            for annotation in dashboard["annotations"]["list"]:
                query = filled(annotation["target"]["rawSql"], run_id)
                assert connection.execute(query.encode()).fetchall()
    return found


def filled(query: str, run_id: str) -> str:
    """The query as Grafana sends it."""
    parts = query.replace("${run:sqlstring}", f"'{run_id}'").split("$__timeFilter(")
    return parts[0] + "".join(
        f"({column}) IS NOT NULL{rest}" for column, _, rest in (part.partition(")") for part in parts[1:])
    )
