"""MLflow by its REST API: a run of MLflow for each run, in the experiment `leyden`.

MLflow's run has the id in the tag `leyden.id`, by which a later process finds it. A point that is sent again is the
same row: MLflow's key is name, time, step and value.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import httpx

from leyden.libs.trackers.destination import Point, Subject, TrackerError

EXPERIMENT = "leyden"
ID = "leyden.id"
BATCH = 1000
"""The most points that MLflow takes in one request."""
NAME_LETTERS = 250
STATUS = {"completed": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}
OUTAGE_SECONDS = 600.0
Json = dict[str, Any]


class MLflow:
    """One server. Args: url: such as `http://127.0.0.1:5000`, with user and password before the host if it asks"""

    def __init__(
        self, url: str, *, outage_seconds: float = OUTAGE_SECONDS, transport: httpx.BaseTransport | None = None
    ) -> None:
        self._http = httpx.Client(base_url=f"{url.rstrip('/')}/api/2.0/mlflow", timeout=60.0, transport=transport)
        self._outage_seconds = outage_seconds

    def open(self, subject: Subject) -> MLflowLog:
        """Finds or makes the subject's run."""
        experiment = self._experiment()
        if not (found := self._runs(experiment, subject)):
            tags = [{"key": ID, "value": subject.id}]
            made = {"experiment_id": experiment, "run_name": subject.title, "start_time": _now(), "tags": tags}
            self.ask("POST", "runs/create", made)
            found = self._runs(experiment, subject)
        # A request whose answer was lost is repeated and makes a second run: every process takes the same one.
        return MLflowLog(self, min(found, key=lambda run: (int(run["info"]["start_time"]), run["info"]["run_id"])))

    def _runs(self, experiment: str, subject: Subject) -> list[Json]:
        wanted = {"experiment_ids": [experiment], "filter": f"tags.`{ID}` = '{subject.id}'", "max_results": 100}
        return list(self.ask("POST", "runs/search", wanted).get("runs", []))

    def _experiment(self) -> str:
        found = self.ask("GET", "experiments/get-by-name", {"experiment_name": EXPERIMENT}, absent=True)
        if not found:
            return str(self.ask("POST", "experiments/create", {"name": EXPERIMENT})["experiment_id"])
        return str(found["experiment"]["experiment_id"])

    def ask(
        self, method: Literal["GET", "POST"], path: str, content: Mapping[str, Any], *, absent: bool = False
    ) -> Json:
        """An answer; a server that is away is asked again. Args: absent: a 404 is an empty answer

        Raises: TrackerError
        """
        deadline, pause = time.monotonic() + self._outage_seconds, 0.2
        while True:
            try:
                if method == "GET":
                    response = self._http.get(path, params=dict(content))
                else:
                    response = self._http.post(path, json=dict(content))
            except httpx.TransportError as error:
                failure = f"no answer from MLflow at {self._http.base_url.host}: {error or type(error).__name__}"
            else:
                if response.is_success:
                    return dict(response.json())
                if absent and response.status_code == 404:
                    return {}
                failure = f"MLflow answers {response.status_code} to {path}: {response.text[:300]}"
                if response.status_code < 500 and response.status_code != 429:
                    raise TrackerError(failure)
            if time.monotonic() + pause > deadline:
                raise TrackerError(f"{failure}; name another server with --to mlflow:URL")
            time.sleep(pause)
            pause = min(5.0, pause * 2)


class MLflowLog:
    """One run of MLflow."""

    def __init__(self, server: MLflow, run: Json) -> None:
        self._server, self._id = server, run["info"]["run_id"]
        names = [metric["key"] for metric in run["data"].get("metrics", [])]
        self.written = {(name, step) for name in names for step in self._steps(name)}

    def _steps(self, name: str) -> list[int]:
        """The steps of a name, of all pages."""
        steps, page = list[int](), ""
        while True:
            asked = {"run_id": self._id, "metric_key": name, "max_results": 25_000, "page_token": page}
            found = self._server.ask("GET", "metrics/get-history", {k: v for k, v in asked.items() if v})
            steps += [int(metric.get("step", 0)) for metric in found.get("metrics", [])]
            page = found.get("next_page_token", "")
            if not page:
                return steps

    def write(self, points: Sequence[Point]) -> None:
        """In requests of at most `BATCH` points. A name that MLflow does not take has another one there."""
        wanted = [point for point in points if (metric_name(point.name), point.step) not in self.written]
        wanted.sort(key=lambda point: point.step)
        for start in range(0, len(wanted), BATCH):
            metrics = [
                {"key": metric_name(p.name), "value": p.value, "timestamp": int(p.time * 1000), "step": p.step}
                for p in wanted[start : start + BATCH]
            ]
            self._server.ask("POST", "runs/log-batch", {"run_id": self._id, "metrics": metrics})
        self.written |= {key for p in points for key in (p.key, (metric_name(p.name), p.step))}

    def close(self, phase: str | None) -> None:
        """Tells MLflow how the run ended."""
        if phase in STATUS:
            ended = {"run_id": self._id, "status": STATUS[phase], "end_time": _now()}
            self._server.ask("POST", "runs/update", ended)


def metric_name(name: str) -> str:
    """A name that MLflow takes: letters, digits and `_-. ` stay, any other character is its code point.

    >>> metric_name("tool.find:flight.calls")
    'tool.find_3a_flight.calls'
    """
    return re.sub(r"[^\w. -]", lambda found: f"_{ord(found[0]):x}_", name, flags=re.ASCII)[:NAME_LETTERS]


def _now() -> int:
    return int(time.time() * 1000)
