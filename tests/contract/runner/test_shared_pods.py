"""The agents that break out, break things or steal, in a pod that attempts share: the backend, and the real server."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from leyden.libs.contracts.agent_rules import AgentRules
from leyden.libs.contracts.config import KubernetesRunner
from leyden.libs.sandbox import pod_server
from leyden.services.runner.backends.base import AttemptSpec, BackendError
from leyden.services.runner.backends.kubernetes import shared_pods
from leyden.services.runner.backends.kubernetes.backend import KubernetesBackend
from leyden.services.runner.outcome import outcome_of
from leyden.services.runner.settings import Settings
from tests.contract.runner.test_sandbox import BOUND, LIMITS, MISDEEDS
from tests.fakes.kubernetes_api import FakeKubernetes, Object
from tests.fakes.shared_pod import listens, serving
from tests.support.shared import free_port
from tests.support.waiting import eventually

AGENTS = Path(__file__).parents[2] / "agents"
TEMPLATE = """
spec:
  containers:
  - {name: agent, image: "placeholder:1", resources: {limits: {memory: 64Gi}}}
"""


class Pods:
    """A cluster that starts a server for each Job as soon as its Secret is there."""

    def __init__(self, api: FakeKubernetes, folder: Path, stack: ExitStack, port: int) -> None:
        self.api, self.folder, self.stack, self.port = api, folder, stack, port
        self.processes = dict[str, Any]()
        api.on_job = lambda job: self._tasks.add(asyncio.get_running_loop().create_task(self._start(job)))
        self._tasks = set[asyncio.Task[None]]()

    async def _start(self, job: Object) -> None:
        name = job["metadata"]["name"]
        secret = await eventually(lambda: self.api.objects["secrets"].get(name))
        container = job["spec"]["template"]["spec"]["containers"][0]
        variables = {one["name"]: one["value"] for one in container["env"] if "value" in one}
        variables[pod_server.TOKEN] = secret["stringData"]["token"]
        (self.folder / name).mkdir()
        self.processes[name] = self.stack.enter_context(serving(self.folder / name, self.port, variables))
        await eventually(lambda: listens(self.port))
        self.api.running(name)
        self.api.pod(name, podIP="127.0.0.1")

    def cannot_start(self, job: Object) -> None:
        name = job["metadata"]["name"]
        waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
        self.api.pod(name, phase="Pending", containerStatuses=[{"name": "agent", "state": waiting}])


@pytest.fixture
async def pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pods]:
    port = free_port()
    monkeypatch.setattr(shared_pods, "PORT", port)
    monkeypatch.setattr(shared_pods, "POLL_SECONDS", 0.05)
    with ExitStack() as stack:
        async with FakeKubernetes().serving() as api:
            yield Pods(api, tmp_path, stack, port)


@pytest.fixture
async def backend(pods: Pods, tmp_path: Path) -> AsyncIterator[KubernetesBackend]:
    (tmp_path / "shared.yaml").write_text(TEMPLATE)
    settings = Settings(
        backend="kubernetes",
        namespace="rollouts",
        pod_template_file=tmp_path / "shared.yaml",
        shared_pod_template_file=tmp_path / "shared.yaml",
        agent_rules=AgentRules(attempts_per_pod=50),
        max_processes=BOUND,
        max_file_bytes=2**23,
        start_seconds=20,
        grace_seconds=0.5,
    )
    made = KubernetesBackend(settings, pods.api.cluster())
    yield made
    await made.close()


def spec(name: str, command: list[str], environment: dict[str, str] | None = None, **limits: Any) -> AttemptSpec:
    runner = KubernetesRunner(image="agents/any:1", **{"attempts_per_pod": 50, "timeout_seconds": 60, **limits})
    labels = {"run": "run-abc", "rollout": name, "attempt": "1"}
    return AttemptSpec(name, command, environment or {}, {"KEY": f"key of {name}"}, {"n": 1}, None, runner, labels)


def script(name: str, *words: str) -> list[str]:
    """An agent of tests/agents in its own folder; an image's working folder is no agent's."""
    code = (AGENTS / name).read_text()
    return ["/bin/sh", "-c", 'cd "$HOME" && exec python3 -S -E -c "$0" "$@"', code, *words]


@pytest.mark.parametrize("hurried", [False, True])
async def test_misbehaving_agents_get_their_outcome_and_harm_no_other_attempt(
    pods: Pods, backend: KubernetesBackend, tmp_path: Path, hurried: bool
) -> None:
    canary = tmp_path / "canary"
    canary.mkdir()
    (canary / "file").write_text("a secret word")
    environment = {"CANARY": str(canary), "BOUND": str(BOUND)}
    # A run on Kubernetes has no limit of CPU time.
    names = sorted(name for name in MISDEEDS if name != "ignore_the_cpu_limit" and (name in LIMITS) == hurried)
    limits = {"timeout_seconds": 3.0 if hurried else 120.0}
    sent = [spec(name, script("misbehaving.py", name), environment, **limits) for name in names]
    quiet = spec("neighbour", ["/bin/sh", "-c", "sleep 2; echo '{\"reward\": 0.5}'"], **limits)
    neighbour, *ended = [outcome_of(one) for one in await asyncio.gather(*map(backend.run, [quiet, *sent]))]
    found = {name: (one.kind, one.reward) for name, one in zip(names, ended, strict=True)}
    assert found == {name: MISDEEDS[name] for name in names}, ended
    assert neighbour.reward == 0.5
    assert (canary / "file").read_text() == "a secret word"
    [process] = pods.processes.values()
    await eventually(lambda: psutil.Process(process.pid).children(recursive=True) == [])


async def test_a_thief_gets_nothing(pods: Pods, backend: KubernetesBackend) -> None:
    hide = 'echo a secret word >"$HOME/secret"; while [ ! -e "$HOME/go" ]; do sleep 0.1; done; echo \'{"reward": 1}\''
    victim = asyncio.create_task(backend.run(spec("victim", ["/bin/sh", "-c", hide], {"WORD": "a secret word"})))
    attempts = Path(f"/var/tmp/leyden-pod-{os.getpid()}-{pods.port}")
    [secret] = await eventually(lambda: list(attempts.glob("*/work/secret")))
    [(name, process)] = pods.processes.items()
    prey = {
        "folders": [str(attempts), str(secret.parent), str(secret.parents[1])],
        "pids": [process.pid, *(one.pid for one in psutil.Process(process.pid).children(recursive=True))],
        "word": "a secret word",
        "postgres": free_port(),
        "redis": free_port(),
        "abstract": "no such socket",
        "signals": True,
        "own": True,
        "code": str(pods.folder / name / "sandbox" / "sandbox.py"),
    }
    thief = await backend.run(spec("thief", script("thief.py"), {"PREY": json.dumps(prey)}))
    assert outcome_of(thief).facts == {"reward": 0.0, "got": []}, thief
    (secret.parent / "go").touch()
    assert outcome_of(await victim).reward == 1.0


async def test_attempts_of_a_run_share_a_pod_one_after_another_and_another_run_has_its_own(
    pods: Pods, backend: KubernetesBackend
) -> None:
    say = ["/bin/sh", "-c", 'echo "$KEY"; cat "$LEYDEN_TASK_FILE"; id -u >&2; pwd']
    first = await backend.run(spec("a", say))
    second = await backend.run(spec("b", say))
    assert (first.stdout, second.stdout) == (b'key of a\n{"n": 1}/\n', b'key of b\n{"n": 1}/\n')
    assert first.stderr != second.stderr
    [job] = pods.api.objects["jobs"].values()
    [secret] = pods.api.objects["secrets"].values()
    assert secret["metadata"]["ownerReferences"][0]["name"] == job["metadata"]["name"]
    assert "a" not in job["metadata"]["labels"].values()
    assert await backend.survivors() == []
    await backend.close()
    assert pods.api.objects["jobs"] == {}


EVICTED = {
    "phase": "Failed",
    "reason": "Evicted",
    "message": 'Usage of EmptyDir volume "attempts" exceeds the limit "1Gi".',
}


@pytest.mark.parametrize(("end", "words"), [(EVICTED, "exceeds the limit"), ({}, r"is lost: \S")])
async def test_a_lost_pod_fails_its_attempts_and_the_next_one_gets_another(
    pods: Pods, backend: KubernetesBackend, monkeypatch: pytest.MonkeyPatch, end: dict[str, str], words: str
) -> None:
    monkeypatch.setattr(shared_pods, "END_SECONDS", 1.0)
    running = asyncio.create_task(backend.run(spec("a", ["/bin/sleep", "300"])))
    [process] = await eventually(lambda: list(pods.processes.values()))
    await eventually(lambda: len(psutil.Process(process.pid).children(recursive=True)) == 2)
    below = psutil.Process(process.pid).children(recursive=True)
    # As the end of the container ends all that is in it.
    process.kill()
    for one in below:
        one.kill()
    [job] = pods.api.objects["jobs"]
    pods.api.pod(job, **end)
    with pytest.raises(BackendError, match=words):
        await running
    await eventually(lambda: pods.api.objects["jobs"] == {})


async def test_a_shared_pod_ends_after_its_last_attempt_also_without_its_runner(
    pods: Pods, backend: KubernetesBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_pods, "OPEN_SECONDS", 0.0)
    await backend.run(spec("a", ["true"], timeout_seconds=600))
    [job] = pods.api.objects["jobs"].values()
    # 20 s to start, an hour of new attempts, 600 s of the last one, two minutes to end it, two grace periods.
    assert job["spec"]["activeDeadlineSeconds"] == 20 + 3600 + 600 + 120 + 1
    pods.api.on_job = pods.cannot_start
    with pytest.raises(BackendError, match="ImagePullBackOff"):
        await backend.run(spec("b", ["true"], timeout_seconds=600))


async def test_a_pod_that_cannot_start_says_why(pods: Pods, backend: KubernetesBackend) -> None:
    pods.api.on_job = pods.cannot_start
    with pytest.raises(BackendError, match="ImagePullBackOff: no such image"):
        await backend.run(spec("a", ["true"]))


async def test_a_run_beyond_the_rules_starts_nothing(pods: Pods, backend: KubernetesBackend) -> None:
    with pytest.raises(BackendError, match="attempts_per_pod 51 is above 50"):
        await backend.run(spec("a", ["true"], attempts_per_pod=51))
    assert pods.api.objects["jobs"] == {}
