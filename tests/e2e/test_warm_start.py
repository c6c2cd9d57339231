"""A warm start: stored rollouts train a model by supervised fine-tuning, and a run of reinforcement goes on from it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from leyden.libs.cli.local.platform import Platform
from leyden.libs.cli.view.watch import watch_run
from leyden.libs.client import Client
from leyden.libs.contracts.api.runs import ResumeRequest, Run, RunParent
from tests.campaigns.soak import bandit_run, kill, small_platform
from tests.invariants import violations
from tests.replay import differing_versions
from tests.support.long import long_only
from tests.support.waiting import until

TEACHER = {
    "roles": [{"name": "solver", "policy": "teacher"}],
    "policies": {"teacher": {"provider": "elsewhere", "provider_model": "large"}},
}
EVALUATED = {"dataset": "bandit", "rollouts_per_task": 8}


def finished(client: Client, run_id: str) -> Run:
    run = watch_run(client, run_id, Console(quiet=True))
    assert (run.phase, run.reason) == ("completed", None)
    return run


def wait_for_step(client: Client, run_id: str, step: int) -> None:
    until(lambda: client.run(run_id).progress.step >= step, f"step {step}")


def rewards(client: Client, run: Run) -> list[float]:
    """The mean reward of each evaluation, in their order."""
    found = [one.results.reward for one in sorted(client.evaluations(run.id), key=lambda one: one.number)]
    return [one.mean for one in found if one is not None]


class Teacher(BaseHTTPRequestHandler):
    """A provider that solves every task of the bandit."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        choice = {"index": 0, "message": {"role": "assistant", "content": "1"}, "finish_reason": "stop"}
        body = json.dumps({"id": "x", "choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": 1}})
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def taught_platform(tmp_path: Path) -> Iterator[Platform]:
    """A platform whose gateway knows the provider `elsewhere`."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Teacher) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        providers = {"elsewhere": {"url": f"http://127.0.0.1:{server.server_port}/v1"}}
        try:
            with small_platform(tmp_path, GATEWAY_PROVIDERS=json.dumps(providers)) as platform:
                yield platform
        finally:
            server.shutdown()


@long_only
@pytest.mark.timeout(900)
def test_a_providers_solutions_teach_the_model(taught_platform: Platform, received: Path) -> None:
    platform, dsn = taught_platform, taught_platform.facts.database_url
    with Client(platform.facts.url("api"), platform.token, patience_seconds=60) as client:
        client.upload_dataset("bandit", [{"number": number} for number in range(16)])
        solved = bandit_run(received, "solved", 0, evaluation=EVALUATED) | TEACHER
        source = finished(client, client.create_run(solved).id)
        assert rewards(client, source)[0] == 1.0
        algorithm = {"type": "sft", "runs": [source.id], "per_task": 2}
        fast = {"optimizer": {"learning_rate": 0.02}, "sampling": {"groups_per_step": 6}}
        document = bandit_run(received, "taught", 8, evaluation=EVALUATED, algorithm=algorithm, **fast)
        run = finished(client, client.create_run(document).id)
        before, after = rewards(client, run)
        assert before < 0.9 < after
        for one in (source, run):
            assert violations(dsn, one.id) == {}


@long_only
@pytest.mark.timeout(900)
def test_rollouts_that_earned_their_reward_warm_a_model_up_through_kills(
    platform: Platform, client: Client, received: Path
) -> None:
    def run(name: str, steps: int, **sections: Any) -> dict[str, Any]:
        return bandit_run(received, name, steps, evaluation=EVALUATED, **sections)

    # A run without steps only evaluates: its rollouts are the demonstrations.
    source = finished(client, client.create_run(run("source", 0)).id)
    base = rewards(client, source)[0]
    assert 0.1 < base < 0.9
    algorithm = {"type": "sft", "runs": [source.id], "per_task": 2}
    document = run("warm", 12, algorithm=algorithm, optimizer={"learning_rate": 0.02}, sampling={"groups_per_step": 6})
    warm = client.create_run(document)
    for step in (1, 5):
        wait_for_step(client, warm.id, step)
        assert kill(platform, "trainer", warm.id)
    warm = finished(client, warm.id)
    before, after = rewards(client, warm)
    assert after > max(before, base)
    assert after > 0.9
    # Nothing but the evaluations was sampled.
    assert list(client.rollouts(run=warm.id, evaluation="none")) == []
    dsn = platform.facts.database_url
    for one in (source, warm):
        assert violations(dsn, one.id) == {}
    assert differing_versions(dsn, warm.id, platform.facts.model_path) == []

    changes = {"algorithm": {"type": "ppo_clip"}, "training": {"steps": 1}, "sampling": {"groups_per_step": 2}}
    further = finished(client, client.continue_run(warm.id, ResumeRequest(changes=changes)).id)
    assert further.parent == RunParent(run_id=warm.id, version=12)
    assert rewards(client, further)[0] > 0.9
    assert violations(dsn, further.id) == {}
