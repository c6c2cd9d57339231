"""Container graders, against an API server in memory whose cluster is the test: verdicts, Jobs, and each bad end."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from leyden.libs.contracts.config import Component, Reward
from leyden.libs.contracts.config.graders import Container
from leyden.libs.contracts.states import ComponentState
from leyden.libs.grading.facts import AttemptFacts
from leyden.libs.grading.pool import Pool
from leyden.libs.kubernetes import cluster as cluster_module
from leyden.libs.store.attempts import AttemptKey
from leyden.libs.store.database import Database
from leyden.services.grader.code import Code
from leyden.services.grader.containers import jobs as jobs_module
from leyden.services.grader.containers import pod as inside
from leyden.services.grader.containers.job import WRAPPED
from leyden.services.grader.containers.jobs import Containers
from leyden.services.grader.containers.verdict import NoVerdict, grade_of_words
from leyden.services.grader.containers.verification import MAX_PACKED, Verification, packed
from leyden.services.grader.judge import Judge
from leyden.services.grader.settings import Settings
from leyden.services.grader.sources import Sources
from tests.fakes.kubernetes_api import FakeKubernetes, Object
from tests.support.waiting import eventually

JOB, POD = "grade-run-abc-12-3-1-0", "grade-run-abc-12-3-1-0-x7k2p"
ATTEMPT = AttemptKey("run-abc.12.3", 1)
FILES = {"trajectory.json": '{"schema_version": "ATIF-v1.7"}', "task.json": '{"q": "Café?"}'}
TEMPLATE = """
metadata: {labels: {app.kubernetes.io/name: leyden}}
spec:
  initContainers:
  - {name: unpack, image: "leyden/grader:1"}
  - name: verifier
    image: placeholder:1
    resources: {requests: {cpu: 100m}, limits: {memory: 2Gi}}
    volumeMounts: [{name: tmp, mountPath: /tmp}]
  containers:
  - {name: collect, image: "leyden/grader:1"}
  volumes: [{name: tmp, emptyDir: {}}]
"""


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "FIRST_PAUSE_SECONDS", 0.01)
    for name in ("POD_POLL_SECONDS", "JOB_POLL_SECONDS"):
        monkeypatch.setattr(jobs_module, name, 0.01)


@pytest.fixture
async def server() -> AsyncIterator[FakeKubernetes]:
    async with FakeKubernetes().serving() as serving:
        yield serving


@asynccontextmanager
async def opened(server: FakeKubernetes, folder: Path, **changes: Any) -> AsyncIterator[Containers]:
    (folder / "verifier.yaml").write_text(TEMPLATE)
    values = {"container_jobs": 2, "namespace": "rollouts", "start_seconds": 20, **changes}
    made = Containers(Settings(pod_template_file=folder / "verifier.yaml", **values), server.cluster())
    yield made
    await made.close()


@pytest.fixture
async def containers(server: FakeKubernetes, tmp_path: Path) -> AsyncIterator[Containers]:
    async with opened(server, tmp_path) as made:
        yield made


def grader(**fields: Any) -> Container:
    document = {"type": "container", "image": "tests/sort:1", **fields}
    found = Component.model_validate({"name": "tests", "grader": document}).grader
    assert isinstance(found, Container)
    return found


def one(files: dict[str, str] | None = None) -> Verification:
    return Verification(JOB, "run-abc", ATTEMPT, FILES if files is None else files)


def words(text: str | None, file: str = "reward.json", status: str | None = "0\n") -> str:
    return json.dumps({"exit": status, **({} if text is None else {"file": file, "text": text})})


def ends(server: FakeKubernetes, message: str = words('{"reward": 0.5}')) -> Callable[[Object], None]:
    """Ends the pod of each new Job with these last words."""

    def end(job: Object) -> None:
        name = job["metadata"]["name"]
        asyncio.get_running_loop().call_later(0.05, lambda: server.ended(name, 0, container="collect", message=message))

    return end


def verifier_state(server: FakeKubernetes, phase: str = "Pending", **state: Any) -> None:
    server.pod(JOB, phase=phase, initContainerStatuses=[{"name": "verifier", "state": state}])


@pytest.mark.parametrize(
    ("said", "key", "value", "explained"),
    [
        (words('{"reward": 1}'), None, 1.0, "reward 1 in reward.json; it exited with 0"),
        (words('{"tests": 0.5}'), None, 0.5, "tests 0.5"),
        (words('{"reward": 1.0, "style": 0.25}'), None, 1.0, "reward 1 in reward.json, style 0.25"),
        (words('{"reward": 1.0, "style": 0.25}'), "style", 0.25, "style 0.25 in reward.json, reward 1"),
        (words("0.75\n", "reward.txt"), None, 0.75, "in reward.txt"),
        # Harbor's scripts end with the status of their tests.
        (words('{"reward": 0}', status="1\n"), None, 0.0, "it exited with 1"),
        # No signal has the number 65 or 127.
        (words('{"reward": 0}', status="193\n"), None, 0.0, "it exited with 193"),
        (words('{"reward": 0}', status="255\n"), None, 0.0, "it exited with 255"),
    ],
)
def test_a_verdict_is_named_numbers_or_one_number(said: str, key: str | None, value: float, explained: str) -> None:
    found = grade_of_words(said, key)
    assert (found.state, found.value) == (ComponentState.SCORED, value)
    assert explained in found.explanation


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("", "its verdict is lost"),
        (words(None, status="1\n"), "wrote neither reward.json nor reward.txt in /logs/verifier, and it exited with 1"),
        (words('{"reward": 1}', status="137\n"), "ended by signal 9"),
        (words('{"reward": 1}', status="192\n"), "ended by signal 64"),
        (words('{"reward": NaN}'), "reward nan, which is not within"),
        (words('{"reward": 1e400}'), "reward inf, which is not within"),
        (words('{"reward": 1' + "0" * 400 + "}"), "a number that is too large"),
        (words('{"reward": true}'), "write numbers by name"),
        (words('{"reward": "1"}'), "write numbers by name"),
        (words("[1]"), "write numbers by name"),
        (words("{}"), "has no number 'reward', but none"),
        (words('{"a": 1, "b": 2}'), "has no number 'reward', but a, b: name one as key"),
        (words("reward: 1"), "reward.json is no JSON"),
        (words("nan", "reward.txt"), "reward nan, which is not within"),
        (words("good", "reward.txt"), "reward.txt is no number: 'good'"),
        (words("1" * 2_501), "more than 2500 bytes"),
    ],
)
def test_anything_else_is_no_verdict(said: str, cause: str) -> None:
    with pytest.raises(NoVerdict, match=r".") as raised:
        grade_of_words(said, None)
    assert cause in str(raised.value)


def test_the_pod_unpacks_files_and_begins_without_a_verdict(tmp_path: Path) -> None:
    agent, verifier, attempt = tmp_path / "agent", tmp_path / "verifier", tmp_path / "attempt.json.gz"
    agent.mkdir()
    (verifier / "more").mkdir(parents=True)
    (verifier / "reward.json").write_text('{"reward": 1}')
    (verifier / "link").symlink_to(agent)
    packed = {**FILES, "artifacts/src/a.py": "é"}
    attempt.write_bytes(gzip.compress(json.dumps(packed).encode()))
    inside.unpack(attempt, agent, verifier)
    found = {str(path.relative_to(agent)): path.read_text() for path in agent.rglob("*") if path.is_file()}
    assert found == packed
    assert list(verifier.iterdir()) == []


def collected(verifier: Path) -> dict[str, Any]:
    last_words = verifier.parent / "last-words"
    inside.collect(verifier, last_words)
    assert last_words.stat().st_size <= 4096
    found: dict[str, Any] = json.loads(last_words.read_text())
    return found


def test_the_pod_reports_the_first_regular_file(tmp_path: Path) -> None:
    verifier = tmp_path / "verifier"
    verifier.mkdir()
    assert collected(verifier) == {"exit": None}
    (tmp_path / "secret").write_text("1.0")
    (verifier / "reward.json").symlink_to(tmp_path / "secret")
    os.mkfifo(verifier / "reward.txt")
    assert collected(verifier) == {"exit": None}
    for path in verifier.iterdir():
        path.unlink()
    (verifier / "reward.txt").write_text("x" * 10**6)
    assert grader_refuses(collected(verifier)) == "reward.txt has more than 2500 bytes"
    (verifier / "reward.json").write_text('{"reward": 1}')
    command = ["/bin/sh", "-c", WRAPPED.replace("/logs/verifier", str(verifier)), "sh", "-c", "exit $0", "3"]
    subprocess.run(command, check=True)
    assert collected(verifier) == {"exit": "3\n", "file": "reward.json", "text": '{"reward": 1}'}


def grader_refuses(found: dict[str, Any]) -> str:
    with pytest.raises(NoVerdict) as raised:
        grade_of_words(json.dumps(found), None)
    return str(raised.value)


async def test_a_grading_is_one_job_with_the_attempts_files(server: FakeKubernetes, containers: Containers) -> None:
    server.on_job = ends(server)
    resources = {"requests": {"memory": "128Mi"}, "limits": {"memory": "1Gi"}}
    asked = grader(command=["bash", "/tests/test.sh", "$(HOME)"], timeout_seconds=100, resources=resources)
    found = await containers.grade(asked, one())
    assert (found.grade.value, found.crashed) == (0.5, False)
    job, [secret] = server.objects["jobs"][JOB], server.objects["secrets"].values()
    body, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (body["backoffLimit"], body["activeDeadlineSeconds"]) == (0, 20 + 100 + 120 + 60)
    assert job["metadata"]["labels"] == {
        "app.kubernetes.io/instance": "leyden",
        "app.kubernetes.io/component": "verifier",
        "leyden.dev/run": "run-abc",
        "leyden.dev/rollout": "run-abc.12.3",
        "leyden.dev/attempt": "1",
    }
    unpack, verifier = pod["initContainers"]
    assert (unpack["command"][-1], pod["containers"][0]["command"][-1]) == ("unpack", "collect")
    assert (verifier["image"], verifier["command"][3:]) == ("tests/sort:1", ["bash", "/tests/test.sh", "$$(HOME)"])
    assert verifier["resources"] == {
        "requests": {"cpu": "100m", "memory": "128Mi"},
        "limits": {"memory": "1Gi"},
    }
    mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in verifier["volumeMounts"]}
    assert mounts == {"/tmp": False, "/logs/agent": True, "/logs/verifier": False}
    assert pod["automountServiceAccountToken"] is False
    stored = {one["secret"]["secretName"] for one in pod["volumes"] if "secret" in one}
    assert stored == {secret["metadata"]["name"]}
    assert json.loads(gzip.decompress(base64.b64decode(secret["data"]["attempt.json.gz"]))) == FILES
    assert secret["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]
    await containers.forget(JOB)
    assert server.objects["jobs"] == {}


async def test_a_network_is_a_label(server: FakeKubernetes, containers: Containers) -> None:
    server.on_job = ends(server)
    await containers.grade(grader(network=True), one())
    labels = server.objects["jobs"][JOB]["spec"]["template"]["metadata"]["labels"]
    assert labels["leyden.dev/network"] == "true"


async def test_another_grader_finds_the_job_and_its_verdict(server: FakeKubernetes, tmp_path: Path) -> None:
    made: list[str] = []
    server.on_job = lambda job: made.append(job["metadata"]["name"])
    async with opened(server, tmp_path) as first:
        grading = asyncio.create_task(first.grade(grader(), one()))
        async with asyncio.timeout(60):
            while not server.objects["secrets"]:
                await asyncio.sleep(0.01)
        # It loses its lease: the Job is another grader's.
        grading.cancel()
        await asyncio.gather(grading, return_exceptions=True)
    server.ended(JOB, 0, container="collect", message=words('{"reward": 1}'))
    async with opened(server, tmp_path) as second:
        assert (await second.grade(grader(), one())).grade.value == 1.0
        # Until it is settled, a third one reads the same.
        assert (await second.grade(grader(), one())).grade.value == 1.0
    assert made == [JOB]


async def test_a_job_on_its_way_out_is_not_taken(server: FakeKubernetes, containers: Containers) -> None:
    server.objects["jobs"][JOB] = {
        "metadata": {"name": JOB, "uid": "old", "labels": {}, "deletionTimestamp": "2026-11-27T00:00:00Z"},
        "spec": {},
    }
    server.on_job = ends(server)
    asyncio.get_running_loop().call_later(0.1, lambda: server.objects["jobs"].pop(JOB))
    assert (await containers.grade(grader(), one())).grade.value == 0.5


def at_start(server: FakeKubernetes, act: Callable[[], object]) -> None:
    server.on_job = lambda _: asyncio.get_running_loop().call_later(0.05, act)


async def failed(server: FakeKubernetes, containers: Containers, **fields: Any) -> str:
    """The explanation of a grading that fails, may be tried again, and leaves nothing."""
    found = await containers.grade(grader(**fields), one())
    assert (found.grade.state, found.grade.value, found.crashed) == (ComponentState.FAILED, None, True)
    assert server.objects["jobs"] == {}
    return found.grade.explanation


async def test_a_verifier_without_a_verdict_shows_the_end_of_its_log(
    server: FakeKubernetes, containers: Containers
) -> None:
    server.logs[POD] = b"x" * 10_000 + b"\nbash: /tests/test.sh: No such file or directory\n"
    server.on_job = ends(server, words(None, status="127\n"))
    said = await failed(server, containers)
    assert "it exited with 127" in said and said.endswith("/tests/test.sh: No such file or directory")


def verifying(server: FakeKubernetes, *, ago: float = 0.0, ahead: float = 0.0) -> None:
    """The verifier runs since so many seconds, on a node whose clock is so many seconds ahead."""
    found = server.running(JOB, container="collect", ago=ago, ahead=ahead)["status"]
    state = found.pop("containerStatuses")[0]["state"]
    verifier_state(server, **state)


@pytest.mark.parametrize("ahead", [-3600, 3600])
async def test_a_verifier_that_hangs_ends_with_its_time_whatever_its_nodes_clock_says(
    server: FakeKubernetes, containers: Containers, ahead: int
) -> None:
    at_start(server, lambda: verifying(server, ahead=ahead))
    began = time.monotonic()
    async with asyncio.timeout(20):
        said = await failed(server, containers, timeout_seconds=0.5)
    assert said == "it took longer than 0.5 s (timeout_seconds)" and time.monotonic() - began >= 0.5


@pytest.mark.parametrize("ahead", [-3600, 3600])
async def test_an_adopted_verifiers_time_counts_from_its_start(
    server: FakeKubernetes, tmp_path: Path, ahead: int
) -> None:
    at_start(server, lambda: verifying(server, ago=601, ahead=ahead))
    async with opened(server, tmp_path) as first:
        grading = asyncio.create_task(first.grade(grader(), one()))
        await eventually(lambda: POD in server.objects["pods"])
        grading.cancel()
        await asyncio.gather(grading, return_exceptions=True)
    async with opened(server, tmp_path) as second, asyncio.timeout(20):
        assert await failed(server, second) == "it took longer than 600 s (timeout_seconds)"


async def test_a_verifier_may_work_longer_than_a_start_may_take(server: FakeKubernetes, tmp_path: Path) -> None:
    def work() -> None:
        verifying(server)
        later = asyncio.get_running_loop().call_later
        later(2.2, lambda: verifier_state(server, terminated={"exitCode": 0}))
        later(2.7, lambda: server.ended(JOB, 0, container="collect", message=words('{"reward": 0.5}')))

    at_start(server, work)
    async with opened(server, tmp_path, start_seconds=2.0) as made:
        found = await made.grade(grader(), one())
    assert (found.grade.value, found.grade.explanation[:10]) == (0.5, "reward 0.5")


async def test_a_verdict_that_is_not_collected_fails(
    server: FakeKubernetes, containers: Containers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_module, "COLLECT_SECONDS", 0.3)
    at_start(server, lambda: verifier_state(server, terminated={"exitCode": 0}))
    said = await failed(server, containers)
    assert said.startswith("its verifier ended, but collect did not within 0.3 s")


async def test_a_job_that_the_cluster_ended_in_time_says_so(server: FakeKubernetes, containers: Containers) -> None:
    at_start(server, lambda: server.finish_job(JOB, "Failed", reason="DeadlineExceeded", message="too long"))
    assert await failed(server, containers, timeout_seconds=20) == "it took longer than 20 s (timeout_seconds)"


async def test_a_verifier_out_of_memory_says_which_limit(server: FakeKubernetes, containers: Containers) -> None:
    ended = {"exitCode": 137, "reason": "OOMKilled"}
    at_start(server, lambda: verifier_state(server, "Failed", terminated=ended))
    assert await failed(server, containers) == "it used more memory than allowed (resources.limits.memory)"


async def test_an_image_that_cannot_be_pulled_fails_at_once(server: FakeKubernetes, containers: Containers) -> None:
    waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
    at_start(server, lambda: verifier_state(server, waiting=waiting))
    assert await failed(server, containers) == "it cannot start: ImagePullBackOff: no such image"


async def test_a_job_that_somebody_deletes_fails(server: FakeKubernetes, containers: Containers) -> None:
    at_start(server, lambda: server.objects["jobs"].pop(JOB))
    assert await failed(server, containers) == "its Job was deleted"


async def test_an_evicted_pod_fails(server: FakeKubernetes, containers: Containers) -> None:
    def evict() -> None:
        condition = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
        server.pod(JOB, phase="Failed", conditions=[condition])

    at_start(server, evict)
    assert await failed(server, containers) == "EvictionByEvictionAPI"


async def test_a_full_namespace_is_waited_for_until_the_start_is_late(
    server: FakeKubernetes, containers: Containers, tmp_path: Path
) -> None:
    refusals = iter([(403, 'exceeded quota: "pods"')] * 3)
    server.refuse = lambda kind, _: next(refusals, None) if kind == "jobs" else None
    server.on_job = ends(server)
    assert (await containers.grade(grader(), one())).grade.value == 0.5
    server.refuse = lambda kind, _: (403, 'exceeded quota: "pods"') if kind == "jobs" else None
    await containers.forget(JOB)
    async with opened(server, tmp_path, start_seconds=2.0) as late:
        assert await failed(server, late) == 'its Job was not created within 2 s: exceeded quota: "pods"'


async def test_files_that_no_secret_holds_are_refused(server: FakeKubernetes, containers: Containers) -> None:
    huge = {"output.txt": base64.b64encode(os.urandom(MAX_PACKED + 1000)).decode()}
    found = await containers.grade(grader(), one(huge))
    assert found.crashed and "packed bytes, and a grader's Secret holds 700000" in found.grade.explanation
    assert server.requests["POST jobs"] == 0


async def test_files_are_packed_beside_the_event_loop(
    server: FakeKubernetes, containers: Containers, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def noted(files: Mapping[str, str]) -> bytes:
        threads.append(threading.current_thread())
        return packed(files)

    monkeypatch.setattr(jobs_module, "packed", noted)
    server.on_job = ends(server)
    # Half of a surrogate pair has no UTF-8.
    assert (await containers.grade(grader(), one({"output.txt": "\ud800"}))).grade.value == 0.5
    assert threads and threading.main_thread() not in threads


async def test_without_jobs_a_component_fails_and_is_not_tried_again() -> None:
    component = {"name": "tests", "grader": {"type": "container", "image": "tests/sort:1"}}
    reward = Reward.model_validate({"components": [component]})
    pool = Pool(1, 1.0)
    sources = Sources(cast(Database, None), pool, cast(Judge, None), cast(Code, None), None)
    [[found]] = await sources.grade(reward, [(ATTEMPT, cast(AttemptFacts, None))])
    await sources.forget(reward, [ATTEMPT])
    await pool.close()
    assert (found.grade.state, found.crashed) == (ComponentState.FAILED, False)
    assert "GRADER_CONTAINER_JOBS is 0" in found.grade.explanation


def test_a_grader_without_containers_imports_no_client_of_kubernetes() -> None:
    code = "import sys, leyden.services.grader.worker; print('kubernetes_asyncio' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"


@pytest.mark.parametrize("image", ["tests/sort", "tests/sort:latest", "registry:5000/sort"])
def test_an_image_is_pinned(image: str) -> None:
    with pytest.raises(ValueError, match="may change during a run"):
        grader(image=image)
