"""The part of MLflow's REST API that a tracker calls, as MLflow 3 on a SQL database answers."""

from __future__ import annotations

import json
from typing import Any

import httpx


class FakeMLflow:
    """In memory; use it as the handler of `httpx.MockTransport`."""

    def __init__(self) -> None:
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.rows: set[tuple[str, str, int, int, float]] = set()
        """Run, name, step, timestamp and value: the primary key of MLflow's table."""
        self.batches: list[int] = []
        self.lost: set[str] = set()
        """Paths whose next answer is lost after the request was carried out."""

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path.removeprefix("/api/2.0/mlflow/")
        content = json.loads(request.content) if request.content else dict(request.url.params)
        answer = self._answers()[path](content)
        if path in self.lost:
            self.lost.remove(path)
            raise httpx.ReadError("the connection was closed", request=request)
        return answer

    def _answers(self) -> dict[str, Any]:
        return {
            "experiments/get-by-name": self._experiment,
            "experiments/create": self._make_experiment,
            "runs/search": self._search,
            "runs/create": self._make_run,
            "runs/update": self._update,
            "runs/log-batch": self._log,
            "metrics/get-history": self._history,
        }

    def _experiment(self, content: dict[str, Any]) -> httpx.Response:
        found = self.experiments.get(content["experiment_name"])
        if found is None:
            return httpx.Response(404, json={"error_code": "RESOURCE_DOES_NOT_EXIST"})
        return httpx.Response(200, json={"experiment": {"experiment_id": found}})

    def _make_experiment(self, content: dict[str, Any]) -> httpx.Response:
        self.experiments[content["name"]] = "1"
        return httpx.Response(200, json={"experiment_id": "1"})

    def _search(self, content: dict[str, Any]) -> httpx.Response:
        wanted = content["filter"].split("'")[1]
        found = [run for run in self.runs.values() if run["tags"][0]["value"] == wanted]
        for run in found:
            names = sorted({row[1] for row in self.rows if row[0] == run["info"]["run_id"]})
            run["data"] = {"metrics": [{"key": name} for name in names]} if names else {}
        return httpx.Response(200, json={"runs": found} if found else {})

    def _make_run(self, content: dict[str, Any]) -> httpx.Response:
        made = f"m{len(self.runs)}"
        info = {"run_id": made, "status": "RUNNING", "start_time": content["start_time"]}
        self.runs[made] = {"info": info, "data": {}, "tags": content["tags"]}
        return httpx.Response(200, json={"run": self.runs[made]})

    def _update(self, content: dict[str, Any]) -> httpx.Response:
        self.runs[content["run_id"]]["info"]["status"] = content["status"]
        return httpx.Response(200, json={})

    def _log(self, content: dict[str, Any]) -> httpx.Response:
        self.batches.append(len(content["metrics"]))
        for one in content["metrics"]:
            self.rows.add((content["run_id"], one["key"], one["step"], one["timestamp"], one["value"]))
        return httpx.Response(200, json={})

    def _history(self, content: dict[str, Any]) -> httpx.Response:
        """Pages of two."""
        rows = sorted(row for row in self.rows if row[:2] == (content["run_id"], content["metric_key"]))
        start = int(content.get("page_token", 0))
        metrics = [{"key": key, "step": step, "value": value} for _, key, step, _, value in rows[start : start + 2]]
        more = {"next_page_token": str(start + 2)} if start + 2 < len(rows) else {}
        return httpx.Response(200, json={"metrics": metrics, **more})
