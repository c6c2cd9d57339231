"""The Kubernetes backend, against an API server in memory whose cluster is the test."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from leyden.libs.contracts.agent_rules import AgentRules
from leyden.libs.contracts.config import KubernetesRunner
from leyden.libs.contracts.config.runners import SecretKey
from leyden.libs.contracts.states import OutcomeKind
from leyden.libs.kubernetes import cluster as cluster_module
from leyden.libs.kubernetes.cluster import Cluster
from leyden.libs.kubernetes.pods import NODE_LOST
from leyden.libs.service.errors import Misconfigured
from leyden.services.runner.backends.base import AttemptSpec, BackendError
from leyden.services.runner.backends.kubernetes import backend as backend_module
from leyden.services.runner.backends.kubernetes.backend import KubernetesBackend
from leyden.services.runner.backends.kubernetes.job import agent_job
from leyden.services.runner.outcome import outcome_of
from leyden.services.runner.settings import Settings
from tests.fakes.kubernetes_api import FakeKubernetes, Object
from tests.support.waiting import eventually

JOB, POD = "agent-run-abc-12-3-1", "agent-run-abc-12-3-1-x7k2p"
ATTEMPT = ("run-abc.12.3", 1)
TEMPLATE = """
metadata: {labels: {app.kubernetes.io/name: leyden}}
spec:
  nodeSelector: {pool: agents}
  containers:
  - name: agent
    image: placeholder:1
    args: [dropped]
    env: [{name: HOME, value: /tmp}, {name: OWN, value: template}]
    resources: {requests: {cpu: 100m, memory: 64Mi}}
    volumeMounts: [{name: tmp, mountPath: /tmp}]
  volumes: [{name: tmp, emptyDir: {}}]
"""


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "FIRST_PAUSE_SECONDS", 0.01)
    for name in ("POD_POLL_SECONDS", "JOB_POLL_SECONDS"):
        monkeypatch.setattr(backend_module, name, 0.01)


@pytest.fixture
async def server() -> AsyncIterator[FakeKubernetes]:
    async with FakeKubernetes().serving() as serving:
        yield serving


@asynccontextmanager
async def opened(server: FakeKubernetes, folder: Path, **changes: Any) -> AsyncIterator[KubernetesBackend]:
    (folder / "agent.yaml").write_text(TEMPLATE)
    values = {"backend": "kubernetes", "namespace": "rollouts", "release": "leyden", "start_seconds": 20, **changes}
    settings = Settings(pod_template_file=folder / "agent.yaml", **values)
    made = KubernetesBackend(settings, server.cluster())
    yield made
    await made.close()


@pytest.fixture
async def backend(server: FakeKubernetes, tmp_path: Path) -> AsyncIterator[KubernetesBackend]:
    async with opened(server, tmp_path) as made:
        yield made


def spec(*command: str, name: str = "run-abc.12.3.1", **changes: Any) -> AttemptSpec:
    values: dict[str, Any] = {
        "name": name,
        "command": list(command or ["{python}", "agent.py"]),
        "environment": {"OWN": "costs $(HOME) and $5"},
        "secrets": {"ATTEMPT_NAME": "signed"},
        "task": {"question": "Café?"},
        "directory": None,
        "limits": KubernetesRunner(image="agents/flight:3"),
        "labels": {"run": "run-abc", "rollout": "run-abc.12.3", "attempt": "1"},
    }
    return AttemptSpec(**{**values, **changes})


def at_start(server: FakeKubernetes, act: Callable[[str], object]) -> None:
    server.on_job = lambda job: act(job["metadata"]["name"])


async def test_a_reward_counts_however_much_the_agent_prints_after_it(
    server: FakeKubernetes, backend: KubernetesBackend
) -> None:
    server.logs[POD] = b'{"reward": 0.5}\n' + b"and on it goes\n" * 300_000
    at_start(server, lambda _: asyncio.get_running_loop().call_later(0.05, server.ended, JOB, 0))
    ended = await backend.run(spec("{python}", "-c", "print('x')"))
    assert (outcome_of(ended).reward, len(ended.stdout)) == (0.5, KubernetesRunner(image="i/i:1").output_bytes)


async def test_an_attempt_is_one_job_with_its_command_its_variables_and_its_secret(
    server: FakeKubernetes, backend: KubernetesBackend
) -> None:
    made: list[Object] = []
    secrets: list[Object] = []

    def create(name: str) -> None:
        made.append(server.objects["jobs"][name])
        server.logs[POD] = b"thinking\n" + json.dumps({"reward": 0.5}).encode() + b"\n"
        asyncio.get_running_loop().call_later(0.05, end)

    def end() -> None:
        # The Secret comes after the Job that owns it.
        if not server.objects["secrets"]:
            asyncio.get_running_loop().call_later(0.05, end)
            return
        secrets.extend(server.objects["secrets"].values())
        server.ended(JOB, 0)

    at_start(server, create)
    limits = KubernetesRunner(
        image="agents/flight:3",
        resources={"requests": {"memory": "128Mi"}, "limits": {"memory": "1Gi"}},
        node_selector={"zone": "a"},
        tolerations=[{"key": "spot", "operator": "Exists"}],
        timeout_seconds=60,
    )
    ended = await backend.run(spec("{python}", "-c", "print('$(HOME)')", limits=limits))
    outcome = outcome_of(ended)
    assert (outcome.kind, outcome.reward, ended.seconds) == (OutcomeKind.SUCCEEDED, 0.5, 7.0)
    [job], [secret] = made, secrets
    body, pod = job["spec"], job["spec"]["template"]
    [agent] = pod["spec"]["containers"]
    assert (body["backoffLimit"], body["podFailurePolicy"]["rules"][0]["action"]) == (0, "FailJob")
    assert body["activeDeadlineSeconds"] >= 60 + 20
    labels = {
        "app.kubernetes.io/instance": "leyden",
        "app.kubernetes.io/component": "agent",
        "leyden.dev/run": "run-abc",
        "leyden.dev/rollout": "run-abc.12.3",
        "leyden.dev/attempt": "1",
    }
    assert job["metadata"]["labels"] == labels
    assert pod["metadata"]["labels"] == {"app.kubernetes.io/name": "leyden", **labels}
    assert (agent["image"], agent["command"]) == ("agents/flight:3", ["python", "-c", "print('$$(HOME)')"])
    assert "args" not in agent
    variables = {one["name"]: one.get("value", one.get("valueFrom")) for one in agent["env"]}
    assert len(variables) == len(agent["env"])
    assert variables == {
        "HOME": "/tmp",
        "OWN": "costs $$(HOME) and $$5",
        "LEYDEN_TASK_FILE": "/var/run/leyden/task.json",
        "ATTEMPT_NAME": {"secretKeyRef": {"name": JOB, "key": "ATTEMPT_NAME"}},
    }
    assert agent["resources"] == {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}}
    assert pod["spec"]["nodeSelector"] == {"pool": "agents", "zone": "a"}
    assert pod["spec"]["tolerations"] == [{"key": "spot", "operator": "Exists"}]
    assert (pod["spec"]["restartPolicy"], pod["spec"]["automountServiceAccountToken"]) == ("Never", False)
    assert pod["spec"]["enableServiceLinks"] is False
    assert secret["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]
    assert json.loads(secret["stringData"].pop("task.json")) == {"question": "Café?"}
    assert secret["stringData"] == {"ATTEMPT_NAME": "signed"}
    assert "signed" not in json.dumps(job)
    assert server.deleted == []
    await backend.remove(*ATTEMPT, limits)
    assert (server.objects["jobs"], server.deleted) == ({}, [JOB])


async def test_a_pod_gets_its_task_on_stdin_and_as_a_file_of_the_agents_name(
    server: FakeKubernetes, tmp_path: Path
) -> None:
    (tmp_path / "agent.yaml").write_text(TEMPLATE)
    cluster = server.cluster()
    template = cluster.template(tmp_path / "agent.yaml", "agent")
    await cluster.close()
    own = spec("solve", "$(HOME) '$1' ; ls", task_on_stdin=True, task_file="/app/input.json")
    assert isinstance(own.limits, KubernetesRunner)
    [agent] = agent_job(own, own.limits, template, Settings(release="leyden")).spec.template.spec.containers
    assert agent.command == [
        *("/bin/sh", "-c", 'exec "$$0" "$$@" <"$$LEYDEN_TASK_FILE"', "solve", "$$(HOME) '$$1' ; ls")
    ]
    mounts = [(one.mount_path, one.sub_path) for one in agent.volume_mounts if one.name == "leyden-task"]
    assert mounts == [("/var/run/leyden", None), ("/app/input.json", "task.json")]
    # As the shell of the pod does it, after Kubernetes has replaced each `$$`.
    (tmp_path / "task.json").write_text("the task")
    show = ["/bin/sh", "-c", 'cat; echo "|$1"', "show", "$(HOME) '$1' ; ls"]
    ran = subprocess.run(
        [*(word.replace("$$", "$") for word in agent.command[:3]), *show],
        env={"LEYDEN_TASK_FILE": str(tmp_path / "task.json"), "PATH": os.defpath},
        capture_output=True,
        check=True,
    )
    assert ran.stdout.decode() == "the task|$(HOME) '$1' ; ls\n"


@pytest.mark.parametrize(
    ("end", "kind", "detail"),
    [
        ({"code": 0}, OutcomeKind.SUCCEEDED, None),
        ({"code": 3}, OutcomeKind.AGENT_ERROR, "the agent exited with code 3"),
        ({"code": 137, "reason": "OOMKilled"}, OutcomeKind.INFRA_ERROR, "for want of memory: its own limit"),
        ({"code": 0, "reason": "OOMKilled"}, OutcomeKind.SUCCEEDED, None),
        ({"code": 137, "reason": "ContainerStatusUnknown"}, OutcomeKind.INFRA_ERROR, "ContainerStatusUnknown"),
    ],
)
async def test_an_end_is_blamed_on_the_agent_or_on_the_cluster(
    server: FakeKubernetes, backend: KubernetesBackend, end: dict[str, Any], kind: OutcomeKind, detail: str | None
) -> None:
    server.logs[POD] = b""
    at_start(server, lambda name: server.ended(name, **end))
    outcome = outcome_of(await backend.run(spec()))
    assert outcome.kind is kind
    assert (outcome.detail is None) if detail is None else (detail in (outcome.detail or ""))


async def test_an_evicted_agent_is_tried_again(server: FakeKubernetes, backend: KubernetesBackend) -> None:
    def evict(name: str) -> None:
        server.ended(name, 143)
        condition = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "EvictionByEvictionAPI",
            "message": "drain",
        }
        server.pod(name, conditions=[condition])

    at_start(server, evict)
    assert outcome_of(await backend.run(spec())).detail == "EvictionByEvictionAPI: drain"


async def test_a_success_whose_log_is_gone_is_no_success(server: FakeKubernetes, backend: KubernetesBackend) -> None:
    at_start(server, lambda name: server.ended(name, 0))
    with pytest.raises(BackendError, match="log of the agent is lost"):
        await backend.run(spec())


async def test_an_agent_is_stopped_after_its_time(server: FakeKubernetes, backend: KubernetesBackend) -> None:
    server.logs[POD] = b"so far"
    at_start(server, lambda name: server.running(name))
    ended = await backend.run(spec(limits=KubernetesRunner(image="a:1", timeout_seconds=0.5)))
    assert (ended.timed_out, ended.stdout) == (True, b"so far")


@pytest.mark.parametrize("ahead", [-3600, 3600])
async def test_the_clock_of_a_node_neither_stops_an_agent_early_nor_late(
    server: FakeKubernetes, backend: KubernetesBackend, ahead: int
) -> None:
    server.logs[POD] = b""
    at_start(server, lambda name: server.running(name, ahead=ahead))
    async with asyncio.timeout(20):
        ended = await backend.run(spec(limits=KubernetesRunner(image="a:1", timeout_seconds=0.5)))
    assert ended.timed_out
    assert 0.5 <= ended.seconds < 30


@pytest.mark.parametrize("ahead", [-3600, 0, 3600])
async def test_an_adopted_agents_time_counts_from_its_start_whatever_its_nodes_clock_says(
    server: FakeKubernetes, tmp_path: Path, ahead: int
) -> None:
    server.logs[POD] = b""
    limits = KubernetesRunner(image="a:1", timeout_seconds=600)
    at_start(server, lambda name: server.running(name, ago=601, ahead=ahead))
    await leave_behind(server, tmp_path, limits)
    async with opened(server, tmp_path) as heir:
        async with asyncio.timeout(20):
            ended = await heir.run(spec(limits=limits, adopted=True))
    assert ended.timed_out
    assert 601 <= ended.seconds < 660


async def test_an_adopted_agent_does_not_pay_twice_for_a_slow_answer_of_the_api_server(
    server: FakeKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.logs[POD], passed = b"", 0.0
    limits = KubernetesRunner(image="a:1", timeout_seconds=600)
    at_start(server, lambda name: server.running(name, ago=100))
    await leave_behind(server, tmp_path, limits)

    async def answer_late(_: Cluster, job: str) -> datetime:
        nonlocal passed
        passed = 400.0
        server.ended(job, 0)
        return datetime.now(UTC) + timedelta(seconds=passed)

    monkeypatch.setattr(Cluster, "time", answer_late)
    monkeypatch.setattr(backend_module, "time", SimpleNamespace(monotonic=lambda: passed))
    async with opened(server, tmp_path) as heir:
        ended = await heir.run(spec(limits=limits, adopted=True))
    assert (ended.timed_out, ended.exit_code) == (False, 0)


async def leave_behind(
    server: FakeKubernetes, folder: Path, limits: KubernetesRunner, *, watched: bool = False
) -> None:
    """Starts an agent whose runner goes without it, after it saw the agent run if `watched`."""
    async with opened(server, folder) as former:
        work = asyncio.create_task(former.run(spec(limits=limits)))
        await eventually(lambda: POD in server.objects["pods"])
        if watched:
            await eventually(lambda: "annotations" in server.objects["jobs"][JOB]["metadata"])
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def test_an_adopted_agent_in_another_pod_is_no_one_attempt(server: FakeKubernetes, tmp_path: Path) -> None:
    limits = KubernetesRunner(image="a:1", timeout_seconds=600)
    at_start(server, server.running)
    await leave_behind(server, tmp_path, limits, watched=True)
    server.objects["pods"].clear()
    server.running(JOB)["metadata"]["name"] = f"{POD}-again"
    async with opened(server, tmp_path) as heir:
        with pytest.raises(BackendError, match=f"started the agent again, in pod {POD}-again after {POD}"):
            await heir.run(spec(limits=limits, adopted=True))


async def test_an_adopted_agent_whose_pod_is_gone_for_good_is_lost(server: FakeKubernetes, tmp_path: Path) -> None:
    limits = KubernetesRunner(image="a:1", timeout_seconds=600)
    at_start(server, server.running)
    await leave_behind(server, tmp_path, limits, watched=True)
    server.objects["pods"].clear()
    async with opened(server, tmp_path) as heir:
        with pytest.raises(BackendError, match=f"pod {POD} is gone"):
            await heir.run(spec(limits=limits, adopted=True))


async def test_an_agent_works_on_where_its_job_may_not_be_patched(
    server: FakeKubernetes, backend: KubernetesBackend
) -> None:
    server.refuse = lambda kind, body: None if "spec" in body or kind != "jobs" else (403, "jobs is forbidden")
    server.logs[POD] = b'{"reward": 1}'
    at_start(server, server.running)
    attempt = asyncio.create_task(backend.run(spec()))
    await eventually(lambda: server.requests["PATCH jobs"] == 1)
    server.ended(JOB, 0)
    assert outcome_of(await attempt).reward == 1.0
    assert server.requests["PATCH jobs"] == 1


async def test_a_time_out_on_a_node_that_is_gone_is_the_clusters(
    server: FakeKubernetes, backend: KubernetesBackend
) -> None:
    def lose(name: str) -> None:
        server.running(name)
        server.pod(name, conditions=[{"type": "Ready", "status": "False"}])

    at_start(server, lose)
    outcome = outcome_of(await backend.run(spec(limits=KubernetesRunner(image="a:1", timeout_seconds=0.5))))
    assert (outcome.kind, outcome.detail) == (OutcomeKind.INFRA_ERROR, "the agent's node does not report")


async def test_an_agent_on_a_lost_node_does_not_hold_its_rollout_until_its_time_is_over(
    server: FakeKubernetes, backend: KubernetesBackend
) -> None:
    def lose(name: str) -> None:
        server.running(name)
        pod = server.pod(name, conditions=[{"type": "Ready", "status": "False"}])
        # By the cluster, after some minutes: nobody confirms it.
        pod["metadata"]["deletionTimestamp"] = "2026-11-22T12:10:00Z"

    at_start(server, lose)
    async with asyncio.timeout(20):
        outcome = outcome_of(await backend.run(spec(limits=KubernetesRunner(image="a:1", timeout_seconds=86_400))))
    assert (outcome.kind, outcome.detail) == (OutcomeKind.INFRA_ERROR, NODE_LOST)


def waits(reason: str, message: str) -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    return {"phase": "Pending", "containerStatuses": [{"name": "agent", "state": state}]}


@pytest.mark.parametrize(
    ("status", "start_seconds", "message"),
    [
        (waits("ImagePullBackOff", "no such image"), 20, "cannot start: ImagePullBackOff: no such image"),
        (
            waits("CreateContainerConfigError", "runs as root"),
            3,
            r"within 3 s: CreateContainerConfigError: runs as",
        ),
        (
            {
                "phase": "Pending",
                "conditions": [
                    {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
                ],
            },
            3,
            "within 3 s: Unschedulable: 0/3 nodes",
        ),
    ],
)
async def test_a_pod_that_does_not_start_fails_the_attempt_with_the_reason(
    server: FakeKubernetes, tmp_path: Path, status: dict[str, Any], start_seconds: int, message: str
) -> None:
    at_start(server, lambda name: server.pod(name, **status))
    async with opened(server, tmp_path, start_seconds=start_seconds) as backend:
        with pytest.raises(BackendError, match=message):
            await backend.run(spec())


async def test_a_command_that_the_image_lacks_is_a_failed_start(
    server: FakeKubernetes, backend: KubernetesBackend
) -> None:
    at_start(server, lambda name: server.ended(name, 128, reason="StartError", message="pythn: not found"))
    with pytest.raises(BackendError, match="could not be started: StartError: pythn: not found"):
        await backend.run(spec())


def refuse_pod(server: FakeKubernetes, message: str) -> None:
    def note(name: str) -> None:
        event = {"metadata": {"labels": {}}, "involvedObject": {"kind": "Job", "name": name}, "message": message}
        server.objects["events"][name] = event

    at_start(server, note)


@pytest.mark.parametrize(
    "words", ['violates PodSecurity "restricted:latest"', "failed quota: agents: must specify limits.cpu for: agent"]
)
async def test_a_pod_that_admission_refuses_fails_the_attempt_at_once(
    server: FakeKubernetes, backend: KubernetesBackend, words: str
) -> None:
    refuse_pod(server, f'pods "x" is forbidden: {words}')
    with pytest.raises(BackendError, match=words):
        await backend.run(spec())


async def test_a_pod_without_quota_is_waited_for_and_the_reason_is_reported(
    server: FakeKubernetes, tmp_path: Path
) -> None:
    refuse_pod(server, 'pods "x" is forbidden: exceeded quota: pods=10')
    async with opened(server, tmp_path, start_seconds=1) as backend:
        with pytest.raises(BackendError, match=r"within 1 s: .*exceeded quota: pods=10"):
            await backend.run(spec())


async def test_a_job_without_quota_is_created_when_there_is_room(
    server: FakeKubernetes, backend: KubernetesBackend
) -> None:
    refusals = iter([(403, "jobs is forbidden: exceeded quota: count/jobs=5")] * 3)
    server.refuse = lambda kind, body: next(refusals, None) if kind == "jobs" else None
    server.logs[POD] = b""
    at_start(server, lambda name: server.ended(name, 0))
    assert (await backend.run(spec())).exit_code == 0


async def test_a_pod_that_vanishes_is_the_clusters_failure(server: FakeKubernetes, backend: KubernetesBackend) -> None:
    def vanish(name: str) -> None:
        server.running(name)
        asyncio.get_running_loop().call_later(0.05, server.objects["pods"].clear)
        reason = {"reason": "BackoffLimitExceeded", "message": "Job has reached the limit"}
        asyncio.get_running_loop().call_later(0.1, lambda: server.finish_job(name, "Failed", **reason))

    at_start(server, vanish)
    with pytest.raises(BackendError, match=r"pod is gone .*BackoffLimitExceeded"):
        await backend.run(spec(limits=KubernetesRunner(image="a:1", timeout_seconds=86400)))


async def suspended(server: FakeKubernetes, backend: KubernetesBackend) -> asyncio.Task[Any]:
    """An attempt whose Job is suspended after the backend has seen its agent run, as Kueue preempts one."""
    at_start(server, server.running)
    attempt = asyncio.create_task(backend.run(spec(limits=KubernetesRunner(image="a:1", timeout_seconds=86400))))
    await eventually(lambda: server.requests["GET pods"] > 2 and JOB in server.objects["jobs"])
    server.objects["pods"].clear()
    server.objects["jobs"][JOB]["spec"]["suspend"] = True
    return attempt


async def test_an_agent_that_the_cluster_starts_again_is_no_one_attempt(
    server: FakeKubernetes, backend: KubernetesBackend
) -> None:
    attempt = await suspended(server, backend)
    server.objects["jobs"][JOB]["spec"]["suspend"] = False
    server.ended(JOB, 0)["metadata"]["name"] = f"{POD}-again"
    server.logs[f"{POD}-again"] = b'{"reward": 1.0}\n'
    with pytest.raises(BackendError, match=f"started the agent again, in pod {POD}-again after {POD}"):
        await attempt


async def test_the_pod_of_a_suspended_job_is_gone(server: FakeKubernetes, backend: KubernetesBackend) -> None:
    with pytest.raises(BackendError, match=f"pod {POD} is gone: queued: the Job is suspended"):
        await (await suspended(server, backend))


async def test_a_job_that_somebody_deletes_is_the_clusters_failure(
    server: FakeKubernetes, backend: KubernetesBackend
) -> None:
    at_start(server, lambda name: asyncio.get_running_loop().call_later(0.05, server.objects["jobs"].clear))
    with pytest.raises(BackendError, match="Job was deleted"):
        await backend.run(spec())


async def test_a_job_outlives_its_runner_and_another_adopts_it(
    server: FakeKubernetes, backend: KubernetesBackend, tmp_path: Path
) -> None:
    running = asyncio.Event()
    at_start(server, lambda name: (server.running(name), running.set()))
    attempt = asyncio.create_task(backend.run(spec()))
    await running.wait()
    assert await backend.survivors() == []
    attempt.cancel()
    await asyncio.gather(attempt, return_exceptions=True)
    async with opened(server, tmp_path) as other:
        assert await other.survivors() == [ATTEMPT]
        server.logs[POD] = b'{"reward": 1}'
        asyncio.get_running_loop().call_later(0.05, server.ended, JOB, 0)
        assert outcome_of(await other.run(spec(adopted=True))).reward == 1.0
        await other.remove(*ATTEMPT, spec().limits)
        assert (server.requests["POST jobs"], server.objects["jobs"], await other.survivors()) == (1, {}, [])
        with pytest.raises(BackendError, match="deleted while its runner was gone"):
            await other.run(spec(adopted=True))


@pytest.mark.parametrize("is_over", [False, True])
async def test_an_attempt_of_two_runners_ends_for_both(
    server: FakeKubernetes, backend: KubernetesBackend, tmp_path: Path, is_over: bool
) -> None:
    """Whether the former runner sees the agent's end, or learns before that it lost the attempt."""
    at_start(server, server.running)
    server.logs[POD] = b'{"reward": 1}'
    former = asyncio.create_task(backend.run(spec()))
    await eventually(lambda: server.requests["PATCH jobs"] == 1)
    if is_over:
        server.ended(JOB, 0)
        assert outcome_of(await former).reward == 1.0
    former.cancel()
    await asyncio.gather(former, return_exceptions=True)
    assert await backend.survivors() == [ATTEMPT]
    async with opened(server, tmp_path) as other:
        server.ended(JOB, 0)
        assert outcome_of(await other.run(spec(adopted=True))).reward == 1.0
    assert server.deleted == []


async def test_the_job_of_an_attempt_that_nobody_wants_is_deleted(
    server: FakeKubernetes, backend: KubernetesBackend, tmp_path: Path
) -> None:
    attempt = asyncio.create_task(backend.run(spec()))
    while not server.objects["secrets"]:
        await asyncio.sleep(0.01)
    async with opened(server, tmp_path) as other:
        [found] = await other.survivors()
        await other.discard(*found)
    assert server.deleted == [JOB]
    with pytest.raises(BackendError, match="Job was deleted"):
        await attempt


async def test_no_attempt_is_lost_while_the_api_server_restarts(
    server: FakeKubernetes, backend: KubernetesBackend
) -> None:
    def create(name: str) -> None:
        server.running(name)
        server.logs[POD] = b'{"reward": 1}'
        server.down = 4
        asyncio.get_running_loop().call_later(0.2, server.ended, name, 0)

    at_start(server, create)
    server.down = 2
    assert outcome_of(await backend.run(spec())).reward == 1.0


async def test_500_attempts_cost_one_list_a_poll(
    server: FakeKubernetes, backend: KubernetesBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_start(server, lambda name: server.running(name))
    attempts = [asyncio.create_task(backend.run(spec(name=f"run-abc.1.{number}.1"))) for number in range(500)]
    # The runner writes each Job's pod on it once, when the agent runs.
    while server.requests["PATCH jobs"] < 500:
        await asyncio.sleep(0.05)
    before = server.requests.copy()
    while not (lists := server.requests["GET pods"] - before["GET pods"]):
        await asyncio.sleep(0.5)
    assert lists <= 50
    assert sum((server.requests - before).values()) == lists
    for name in server.objects["jobs"]:
        server.logs[server.ended(name, 0)["metadata"]["name"]] = b""
    assert {one.exit_code for one in await asyncio.gather(*attempts)} == {0}


async def test_agents_work_on_while_a_server_that_restarts_knows_no_rights(
    server: FakeKubernetes, backend: KubernetesBackend
) -> None:
    server.outage = 403, 'pods is forbidden: User "runner" cannot list resource "pods"'
    server.down = 2
    at_start(server, server.running)
    attempts = [asyncio.create_task(backend.run(spec(name=f"run-abc.12.3.{number}"))) for number in (1, 2)]
    await eventually(lambda: server.requests["PATCH jobs"] == 2)
    server.down = 3
    await eventually(lambda: server.down == 0)
    for code, name in enumerate(list(server.objects["jobs"])):
        server.logs[server.ended(name, code)["metadata"]["name"]] = b""
    assert {one.exit_code for one in await asyncio.gather(*attempts)} == {0, 1}


async def test_the_check_creates_nothing_and_names_the_missing_right(
    server: FakeKubernetes, backend: KubernetesBackend
) -> None:
    await backend.check()
    assert server.objects["jobs"] == {}
    server.refuse = lambda kind, body: (403, 'User "runner" cannot create resource "jobs"')
    with pytest.raises(Misconfigured, match='RUNNER_NAMESPACE rollouts: User "runner" cannot create'):
        await backend.check()
    # A full namespace is no misconfiguration: attempts of an earlier runner may fill it.
    server.refuse = lambda kind, body: (403, 'jobs.batch "x" is forbidden: exceeded quota: agents')
    await backend.check()


def test_the_settings_of_a_cluster_belong_together() -> None:
    with pytest.raises(ValueError, match="RUNNER_BACKEND=kubernetes needs RUNNER_NAMESPACE, RUNNER_POD_TEMPLATE_FILE"):
        Settings(backend="kubernetes", release="leyden")


async def test_the_agents_container_reads_the_secrets_that_the_operator_allows(
    server: FakeKubernetes, tmp_path: Path
) -> None:
    secrets = {"TOOL_KEY": SecretKey(name="tools", key="api-key")}
    limits = KubernetesRunner(image="agents/flight:3", secrets=secrets)
    made: list[Object] = []

    def create(name: str) -> None:
        made.append(server.objects["jobs"][name])
        server.logs[POD] = b"{}\n"
        asyncio.get_running_loop().call_later(0.05, server.ended, JOB, 0)

    at_start(server, create)
    async with opened(server, tmp_path, agent_rules=AgentRules(secrets=("tools",))) as backend:
        await backend.run(spec(limits=limits))
    [agent] = made[0]["spec"]["template"]["spec"]["containers"]
    [found] = [one for one in agent["env"] if one["name"] == "TOOL_KEY"]
    assert found["valueFrom"] == {"secretKeyRef": {"name": "tools", "key": "api-key"}}


async def test_an_attempt_that_the_operator_does_not_allow_makes_no_job(
    server: FakeKubernetes, backend: KubernetesBackend
) -> None:
    limits = KubernetesRunner(image="agents/flight:3", secrets={"TOOL_KEY": SecretKey(name="tools", key="api-key")})
    with pytest.raises(BackendError, match="tools is not among the secrets that runs may name"):
        await backend.run(spec(limits=limits))
    assert server.objects["jobs"] == {}
