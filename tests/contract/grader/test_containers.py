"""Attempts that a container grades, on Postgres and an API server in memory: one verdict, whatever dies."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_asyncio import client
from prometheus_client import REGISTRY

from leyden.libs.contracts.config import Reward
from leyden.libs.faults import FaultInjector
from leyden.libs.store.attempts import AttemptKey
from leyden.libs.store.database import Database
from leyden.libs.store.records.artifacts import Artifact, add_artifacts
from leyden.libs.store.runs.grading import Lane, lease_gradings
from leyden.libs.store.runs.trials import ask_trial, graded_by_trial
from leyden.services.grader.containers import jobs as jobs_module
from leyden.services.grader.containers import trajectory
from tests.contract.grader.test_code_worker import turns
from tests.contract.grader.test_worker import F1, add_ungraded, grading, gradings, killed_at, rewards, settled
from tests.fakes import kubernetes_api
from tests.fakes.kubernetes_api import FakeKubernetes, Object
from tests.support import builders
from tests.support.waiting import eventually
from tests.unit.grader.test_containers import TEMPLATE, words

POINTS = ("grader.container_created",)
TESTS = {"name": "tests", "grader": {"type": "container", "image": "tests/sort:1"}}


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POD_POLL_SECONDS", "JOB_POLL_SECONDS"):
        monkeypatch.setattr(jobs_module, name, 0.02)
    # Objects against schemas: tests/unit checks them, and each takes 0.1 s.
    monkeypatch.setattr(kubernetes_api, "CHECKED", 0)


class Pods:
    """The cluster of a test: it ends the pod of each Job whose Secret exists, with the words of `say`."""

    def __init__(self, server: FakeKubernetes, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.server = server
        self.made: list[str] = []
        self.say: Callable[[int], str | None] = lambda number: words('{"reward": 0.5}')
        server.on_job = self._create
        template = folder / "verifier.yaml"
        template.write_text(TEMPLATE)
        self.settings = {"container_jobs": 4, "namespace": "rollouts", "pod_template_file": template}
        self.environment = {
            "GRADER_CONTAINER_JOBS": "4",
            "GRADER_NAMESPACE": "rollouts",
            "GRADER_POD_TEMPLATE_FILE": str(template),
            "KUBECONFIG": str(self._kubeconfig(folder)),
        }

        async def connect() -> client.ApiClient:
            return client.ApiClient(client.Configuration(host=f"http://127.0.0.1:{server.port}"))

        monkeypatch.setattr(jobs_module, "connect", connect)

    def _kubeconfig(self, folder: Path) -> Path:
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{self.server.port}"}}],
            "users": [{"name": "test", "user": {}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        }
        path = folder / "kubeconfig"
        path.write_text(yaml.safe_dump(document))
        return path

    def _create(self, job: Object) -> None:
        name, number = job["metadata"]["name"], len(self.made)
        self.made.append(name)
        secret = next(one["secret"]["secretName"] for one in _pod(job)["volumes"] if "secret" in one)

        def end() -> None:
            # A pod waits for its Secret.
            if secret not in self.server.objects["secrets"]:
                asyncio.get_running_loop().call_later(0.02, end)
            elif name in self.server.objects["jobs"] and (said := self.say(number)) is not None:
                self.server.ended(name, 0, container="collect", message=said)

        asyncio.get_running_loop().call_later(0.02, end)

    def files(self) -> dict[str, Any]:
        """Those of the one Secret."""
        [secret] = self.server.objects["secrets"].values()
        found: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(secret["data"]["attempt.json.gz"])))
        return found


def _pod(job: Object) -> Object:
    spec: Object = job["spec"]["template"]["spec"]
    return spec


async def test_a_container_gets_the_trajectory_and_its_job_goes_once_the_verdict_is_stored(
    database: Database, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, (rollout,) = await add_ungraded(database, TESTS, F1, outputs=['{"answer": "Tower"}'])
    first = await builders.add_call(database, rollout, **turns("hello", answer="hi"))
    await builders.add_call(database, rollout, **turns("go on", answer="done"), parent_call_id=first.id, shared_turns=2)
    await builders.add_call(database, rollout, **turns("elsewhere", answer="yes"))
    left = [Artifact("src/a.py", 9, b"caf\xc3\xa9\xff")]
    async with database.session() as session:
        await add_artifacts(session, [(AttemptKey(rollout.id, 1), run.id, left)])
    async with FakeKubernetes().serving() as server:
        pods = Pods(server, monkeypatch, tmp_path)
        async with grading(database, redis_url, **pods.settings):
            (found,) = await settled(database, run, 1)
            await eventually(lambda: not server.objects["jobs"])
    assert found.total == pytest.approx(0.5 + 0.9 * 2 / 3)
    tests, _ = await rewards(database, run)
    assert (tests.state, tests.value, tests.source) == ("scored", 0.5, "container")
    assert pods.made == [f"grade-{rollout.id.replace('.', '-')}-1-0"]
    files = pods.files()
    assert (json.loads(files["task.json"]), files["output.txt"]) == ({"answer": "Eiffel Tower"}, '{"answer": "Tower"}')
    assert files["artifacts/src/a.py"] == "café\ufffd"
    longest = json.loads(files["trajectory.json"])
    assert (longest["schema_version"], longest["session_id"]) == ("ATIF-v1.7", rollout.id)
    said = [(step["source"], step["message"]) for step in longest["steps"]]
    assert said == [("user", "hello"), ("agent", "hi"), ("user", "go on"), ("agent", "done")]
    assert "logprobs" not in longest["steps"][1]["metrics"]
    assert len(json.loads(files["trajectories.json"])) == 2


@pytest.mark.parametrize(
    ("most", "part"), [(200, "conversations, beyond 200 bytes,"), (1500, "conversations")], ids=["stored", "written"]
)
async def test_an_attempt_that_no_secret_holds_earns_0_without_a_job(
    database: Database, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, part: str
) -> None:
    monkeypatch.setattr(trajectory, "MAX_BYTES", most)
    run, (rollout,) = await add_ungraded(database, TESTS, outputs=["x"])
    first = await builders.add_call(database, rollout, **turns("x" * 200, answer="hi"))
    # Each fork adds little, and its trajectory has all that came before it.
    for said in "abcd":
        forked = {"parent_call_id": first.id, "shared_turns": 2}
        await builders.add_call(database, rollout, **turns(said, answer=said), **forked)
    async with FakeKubernetes().serving() as server:
        pods = Pods(server, monkeypatch, tmp_path)
        async with grading(database, redis_url, **pods.settings):
            (found,) = await settled(database, run, 1)
    assert (found.total, found.reason, found.tries, pods.made) == (0.0, None, 1, [])
    said = f"the attempt's {part} are more than a grader's Secret holds: it earns 0"
    assert [one.explanation for one in await rewards(database, run)] == [said]


async def test_an_agent_that_prints_too_much_is_graded_with_shorter_texts(
    database: Database, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = base64.b64encode(os.urandom(700_000)).decode()
    run, (rollout,) = await add_ungraded(database, TESTS, outputs=[noise + "\nthe end"])
    await builders.add_call(database, rollout, **turns("hello " + "x" * 500, answer="hi"))
    async with FakeKubernetes().serving() as server:
        pods = Pods(server, monkeypatch, tmp_path)
        async with grading(database, redis_url, **pods.settings):
            (found,) = await settled(database, run, 1)
    assert (found.total, found.tries, len(pods.made)) == (0.5, 1, 1)
    output = pods.files()["output.txt"]
    assert output.startswith(noise[:50_000] + "\n[") and output.endswith("\nthe end")
    left_out = len(noise) + len("\nthe end") - 100_000
    assert len(output) < 101_000 and f"\n[{left_out} characters left out]\n" in output
    assert json.loads(pods.files()["trajectory.json"])["steps"][0]["message"] == "hello " + "x" * 500


async def test_a_verdict_that_is_none_is_tried_three_times_in_new_jobs_and_is_no_0(
    database: Database, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = await add_ungraded(database, TESTS, outputs=["x"])
    async with FakeKubernetes().serving() as server:
        pods = Pods(server, monkeypatch, tmp_path)
        pods.say = lambda _: words('{"reward": NaN}')
        async with grading(database, redis_url, **pods.settings):
            (found,) = await settled(database, run, 1)
        assert server.objects["jobs"] == {}
    assert (found.total, found.tries, len(pods.made)) == (None, 3, 3)
    assert found.reason == "tests: reward.json has reward nan, which is not within ±1e+06"
    assert [(one.state, one.value) for one in await rewards(database, run)] == [("failed", None)]


@pytest.mark.parametrize("point", [*POINTS, "grader.graded", "grader.total_written", "grader.settled"])
async def test_a_killed_grader_leaves_its_job_and_the_next_one_reads_its_verdict(
    database: Database, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    run, _ = await add_ungraded(database, TESTS, outputs=["x"])
    async with FakeKubernetes().serving() as server:
        pods = Pods(server, monkeypatch, tmp_path)
        # Another container would give another verdict.
        pods.say = lambda number: words(json.dumps({"reward": 0.5 + number}))
        await killed_at(point, FaultInjector(tmp_path / "faults"), database, redis_url, **pods.environment)
        assert len(server.objects["jobs"]) == 1
        async with grading(database, redis_url, **pods.settings):
            (found,) = await settled(database, run, 1)
    assert (found.total, len(pods.made)) == (0.5, 1)
    assert [one.value for one in await rewards(database, run)] == [0.5]
    # Killed once all is stored, it leaves the Job to its time limit.
    assert len(server.objects["jobs"]) == (point == "grader.settled")


async def test_a_grader_that_lost_its_lease_changes_nothing(
    database: Database, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = await add_ungraded(database, TESTS, outputs=["x"])
    async with FakeKubernetes().serving() as server:
        pods = Pods(server, monkeypatch, tmp_path)
        pods.say = lambda _: None
        async with grading(database, redis_url, lease_seconds=0.9, **pods.settings):
            await eventually(lambda: server.objects["secrets"])
            (mine,) = await gradings(database, run)
            async with database.session() as session:
                row = await session.get_one(type(mine), (mine.rollout_id, mine.attempt))
                row.lease_id, row.owner = "another", "another"
                row.lease_expires_at = datetime.now(tz=UTC) + timedelta(hours=1)
            # Its renewal finds the lease gone, and it leaves the Job to the other one.
            asked = server.requests["GET pods"]
            await eventually(lambda: not leased())
            assert (list(server.objects["jobs"]), server.requests["GET pods"] > asked) == (pods.made, True)
        (found,) = await gradings(database, run)
    assert (found.settled_at, found.lease_id) == (None, "another")


def leased() -> float | None:
    """The attempts that graders of this process hold."""
    return REGISTRY.get_sample_value("grader_attempts_leased")


async def test_a_trial_has_a_job_of_its_own(
    database: Database, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await builders.add_run(database)
    _, [rollout] = await builders.add_group(database, run, size=1)
    await builders.finish_rollout(database, rollout, stdout_tail="x")
    async with FakeKubernetes().serving() as server:
        pods = Pods(server, monkeypatch, tmp_path)
        async with grading(database, redis_url, **pods.settings):
            asked = [
                graded_by_trial(
                    database,
                    rollout.id,
                    Reward.model_validate({"components": [TESTS]}),
                    begin_seconds=30.0,
                    seconds=60.0,
                )
                for _ in range(2)
            ]
            found = await asyncio.gather(*asked)
            await eventually(lambda: not server.objects["jobs"])
    assert [one["total"] for one in found] == [0.5, 0.5]
    assert len(set(pods.made)) == 2


async def test_a_trial_ends_its_container_with_its_time(
    database: Database, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await builders.add_run(database)
    _, [rollout] = await builders.add_group(database, run, size=1)
    await builders.finish_rollout(database, rollout, stdout_tail="x")
    async with FakeKubernetes().serving() as server:
        pods = Pods(server, monkeypatch, tmp_path)
        pods.say = lambda _: None
        async with grading(database, redis_url, **pods.settings):
            # Its API dies.
            async with database.session() as session:
                await ask_trial(session, rollout.id, Reward.model_validate({"components": [TESTS]}), 5.0)
            await eventually(lambda: server.objects["jobs"])
            await eventually(lambda: not server.objects["jobs"])


async def test_containers_have_a_lane_of_their_own(database: Database) -> None:
    python = {"name": "code", "grader": {"type": "python", "function": "package:score"}}
    contained, _ = await add_ungraded(database, python, TESTS, outputs=["x"])
    coded, _ = await add_ungraded(database, python, outputs=["x"])
    for lane, run in ((Lane.CONTAINER, contained), (Lane.CODE, coded), (Lane.JUDGE, None), (Lane.INSTANT, None)):
        async with database.session() as session:
            leased = await lease_gradings(session, "one", 5, 30.0, lane=lane)
        assert [one.run_id for one in leased] == ([] if run is None else [run.id])
