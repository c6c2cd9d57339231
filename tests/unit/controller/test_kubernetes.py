"""Trainers as Indexed Jobs and engines from EndpointSlices, against an API server in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from leyden.libs.contracts.config import RunConfig
from leyden.libs.embedded.memory_kills import LAST_LINE
from leyden.libs.kubernetes import cluster as cluster_module
from leyden.libs.kubernetes.pods import NODE_LOST
from leyden.services.controller.engines.kubernetes import KubernetesEngines, engine_urls
from leyden.services.controller.settings import Settings
from leyden.services.controller.trainers import kubernetes as kubernetes_trainers
from leyden.services.controller.trainers import supervisor as trainers
from leyden.services.controller.trainers.backend import BackendAway, TrainerAttempt, TrainerRefused, TrainerState
from leyden.services.controller.trainers.job import COUNTED
from leyden.services.controller.trainers.kubernetes import PEER_LOST, RANK_LOST, KubernetesTrainers
from leyden.services.controller.trainers.models import TrainerModels, models_of
from leyden.services.controller.trainers.supervisor import TrainerSupervisor
from tests.fakes.kubernetes_api import FakeKubernetes
from tests.fakes.trainer_journal import RememberedEnds
from tests.support.builders import run_document
from tests.support.waiting import eventually

FIRST = TrainerAttempt("run-abc", 1)
MODELS = TrainerModels()
TEMPLATE = """
metadata: {labels: {kueue.x-k8s.io/queue-name: gpus}}
spec:
  terminationGracePeriodSeconds: 300
  containers:
  - name: trainer
    image: trainer:1
    env: [{name: TRAINER_FOLDER, value: /weights}]
"""
EVICTED = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": "drained"}


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(kubernetes_trainers, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(trainers, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(trainers, "POLL_SECONDS", 0.01)


@pytest.fixture
async def server() -> AsyncIterator[FakeKubernetes]:
    async with FakeKubernetes().serving() as serving:
        yield serving


def settings(folder: Path, **changes: Any) -> Settings:
    (folder / "trainer.yaml").write_text(TEMPLATE)
    values = {"trainer_backend": "kubernetes", "namespace": "rollouts", "trainer_service": "leyden-trainers", **changes}
    return Settings(trainer_pod_template_file=folder / "trainer.yaml", **values)


@pytest.fixture
async def make(server: FakeKubernetes, tmp_path: Path) -> AsyncIterator[Callable[..., KubernetesTrainers]]:
    cluster = server.cluster()
    made: list[KubernetesTrainers] = []

    def build(**changes: Any) -> KubernetesTrainers:
        made.append(KubernetesTrainers(settings(tmp_path, **changes), cluster))
        return made[-1]

    yield build
    for one in made:
        await one.close()
    await cluster.close()


Make = Callable[..., KubernetesTrainers]


async def test_a_trainer_is_an_indexed_job_and_the_next_leader_adopts_it(server: FakeKubernetes, make: Make) -> None:
    former, leader = make(), make()
    assert await former.last_attempt("run-abc") == 0
    await former.start(FIRST, MODELS)
    await leader.start(FIRST, MODELS)
    assert (await leader.last_attempt("run-abc"), await leader.last_attempt("run-abd")) == (1, 0)
    assert await leader.live_attempts() == [FIRST]
    [job] = server.objects["jobs"].values()
    assert job["metadata"]["name"] == "trainer-run-abc-1"
    assert job["metadata"]["labels"] == {
        "app.kubernetes.io/instance": "leyden",
        "app.kubernetes.io/component": "trainer",
        "leyden.dev/run": "run-abc",
        "leyden.dev/attempt": "1",
        "kueue.x-k8s.io/queue-name": "gpus",
    }
    body, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (body["completionMode"], body["completions"], body["parallelism"], body["backoffLimit"]) == (
        "Indexed",
        1,
        1,
        0,
    )
    assert body["podFailurePolicy"]["rules"][0]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert (pod["subdomain"], pod["restartPolicy"]) == ("leyden-trainers", "Never")
    [trainer] = pod["containers"]
    assert trainer["command"] == [*COUNTED, "python", "-m", "leyden.services.trainer", "--run-id", "run-abc"]
    assert trainer["env"] == [{"name": "TRAINER_FOLDER", "value": "/weights"}]


async def test_the_pods_of_one_trainer_find_each_other_by_torchruns_variables(
    server: FakeKubernetes, make: Make
) -> None:
    await make(trainer_pods=2).start(FIRST, MODELS)
    body = server.objects["jobs"]["trainer-run-abc-1"]["spec"]
    assert (body["completions"], body["parallelism"]) == (2, 2)
    [trainer] = body["template"]["spec"]["containers"]
    assert trainer["command"][:6] == [*COUNTED, "torchrun", "-m", "leyden.services.trainer"]
    variables = {one["name"]: one.get("value", one.get("valueFrom")) for one in trainer["env"]}
    assert variables["PET_MASTER_ADDR"] == "trainer-run-abc-1-0.leyden-trainers"
    assert (variables["PET_NNODES"], variables["PET_MASTER_PORT"]) == ("2", "29500")
    # Ten seconds less than the grace period of the template.
    assert variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "290"
    assert "job-completion-index" in variables["PET_NODE_RANK"]["fieldRef"]["fieldPath"]


@pytest.mark.parametrize("own", [{}, {"trainer_command": ["python", "-m", "mine"]}])
async def test_several_processes_of_one_pod_start_under_torchrun(
    server: FakeKubernetes, make: Make, monkeypatch: pytest.MonkeyPatch, own: dict[str, Any]
) -> None:
    several = TEMPLATE.replace("env: [", 'env: [{name: PET_NPROC_PER_NODE, value: "8"}, ')
    monkeypatch.setitem(globals(), "TEMPLATE", several)
    await make(**own).start(FIRST, MODELS)
    [trainer] = server.objects["jobs"]["trainer-run-abc-1"]["spec"]["template"]["spec"]["containers"]
    assert trainer["command"][:5] == [*COUNTED, "torchrun", "-m"]
    assert {"PET_NPROC_PER_NODE", "PET_NNODES"} <= {one["name"] for one in trainer["env"]}


async def test_the_states_of_a_trainer_have_their_reasons(server: FakeKubernetes, make: Make) -> None:
    backend, name = make(trainer_pods=2), FIRST.name

    async def state() -> tuple[TrainerState, str]:
        return tuple(await backend.status(FIRST))[:2]  # type: ignore[return-value]

    await backend.start(FIRST, MODELS)
    assert await state() == (TrainerState.WAITING, "its pods are being created")
    server.objects["jobs"][name]["spec"]["suspend"] = True
    assert await state() == (TrainerState.WAITING, "queued: the Job is suspended until its queue has room")
    server.objects["jobs"][name]["spec"]["suspend"] = False
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes: no GPU"}
    server.running(name, 0, "trainer")
    server.pod(name, 1, phase="Pending", conditions=[unscheduled])
    assert await state() == (TrainerState.WAITING, "Unschedulable: 0/1 nodes: no GPU")
    server.running(name, 1, "trainer")
    server.pod(name, 1, conditions=[])
    assert await state() == (TrainerState.RUNNING, f"pods {name}-0-x7k2p, {name}-1-x7k2p")
    server.ended(name, 0, 0, "trainer")
    assert (await state())[0] is TrainerState.RUNNING
    server.finish_job(name, "Complete")
    assert await state() == (TrainerState.DONE, "exit code 0")


async def end(server: FakeKubernetes, make: Make, code: int, **details: Any) -> tuple[TrainerState, str]:
    backend = make()
    await backend.start(FIRST, MODELS)
    conditions = details.pop("conditions", [])
    server.ended(FIRST.name, code, 0, "trainer", **details)
    server.pod(FIRST.name, 0, conditions=conditions)
    status = await backend.status(FIRST)
    return status.state, status.reason


async def test_a_crash_is_blamed_on_the_run_with_its_last_line(server: FakeKubernetes, make: Make) -> None:
    found = await end(server, make, 1, message="Traceback\nValueError: loss is nan\n")
    assert found == (TrainerState.ENDED, "exit code 1: ValueError: loss is nan")


OUT_OF_MEMORY = (
    "out of memory: raise trainer.resources.limits.memory in the chart's values, or lower training.micro_batch_tokens,"
    " write optimizer.moments 8bit, train adapters with training.lora, or unset optimizer.offload: no output"
)
LOST = f"RankLost: rank 0 of 2: {RANK_LOST}, or did not answer"


@pytest.mark.parametrize(
    ("code", "details", "expected"),
    [
        (1, {"message": "ValueError: loss is nan"}, (TrainerState.ENDED, "exit code 1: ValueError: loss is nan")),
        (137, {"reason": "OOMKilled"}, (TrainerState.OUT_OF_MEMORY, OUT_OF_MEMORY)),
        (1, {"message": LOST}, (TrainerState.KILLED, LOST)),
    ],
)
async def test_a_pod_that_lost_another_one_is_not_the_cause(
    server: FakeKubernetes, make: Make, code: int, details: dict[str, Any], expected: tuple[TrainerState, str]
) -> None:
    backend = make(trainer_pods=2)
    await backend.start(FIRST, MODELS)
    server.ended(FIRST.name, 1, 0, "trainer", message=LOST)
    server.running(FIRST.name, 1, "trainer")
    assert (await backend.status(FIRST)).state is TrainerState.RUNNING
    server.ended(FIRST.name, code, 1, "trainer", **details)
    assert tuple(await backend.status(FIRST))[:2] == expected


async def test_a_pod_whose_collective_lost_another_one_is_not_the_cause(server: FakeKubernetes, make: Make) -> None:
    backend = make(trainer_pods=2)
    await backend.start(FIRST, MODELS)
    server.ended(FIRST.name, 1, 0, "trainer", message=f"RuntimeError: Connection closed by peer. This is {PEER_LOST}.")
    server.ended(FIRST.name, 1, 1, "trainer", message="HostOutOfMemory: lower training.micro_batch_tokens")
    reason = "exit code 1: HostOutOfMemory: lower training.micro_batch_tokens"
    assert tuple(await backend.status(FIRST))[:2] == (TrainerState.OUT_OF_MEMORY, reason)


@pytest.mark.parametrize(
    ("code", "details", "reason"),
    [
        (1, {"conditions": [EVICTED]}, "EvictionByEvictionAPI: drained"),
        (137, {}, f"killed by signal 9, probably {OUT_OF_MEMORY}"),
        (143, {"message": "stopping"}, "killed by signal 15: stopping"),
    ],
)
async def test_a_disruption_or_a_signal_is_not(
    server: FakeKubernetes, make: Make, code: int, details: dict[str, Any], reason: str
) -> None:
    assert await end(server, make, code, **details) == (TrainerState.KILLED, reason)


BY_TORCHRUN = "Root Cause\n  exitcode : -9\n  traceback : Signal 9 (SIGKILL) received by PID {}\n=====\n"


@pytest.mark.parametrize(("code", "line"), [(1, BY_TORCHRUN), (137, "at work\n")])
async def test_a_sigkill_without_a_kill_for_memory_is_not_blamed_on_memory(
    server: FakeKubernetes, make: Make, code: int, line: str
) -> None:
    state, reason = await end(server, make, code, message=line + LAST_LINE.format(0))
    assert state is TrainerState.KILLED
    assert reason in {
        "exit code 1: traceback : Signal 9 (SIGKILL) received by PID {}",
        "killed by signal 9: at work",
    }


async def test_a_trainer_out_of_memory_fails_its_run_the_second_time(
    server: FakeKubernetes, make: Make, tmp_path: Path
) -> None:
    """The kernel killed one process of the pod, whose container went on to its end."""
    words = f"{BY_TORCHRUN}{LAST_LINE.format(1)}\n"
    journal = RememberedEnds()
    supervisor = TrainerSupervisor(settings(tmp_path), make(), journal)
    supervisor.reconcile({"run-abc": 0})
    for number in (1, 2):
        name = f"trainer-run-abc-{number}"
        await eventually(lambda: name in server.objects["jobs"])  # noqa: B023
        server.ended(name, 1, 0, "trainer", message=words.format(40 + number))
        server.finish_job(name, "Failed")
        await eventually(lambda: len(journal.ends) == number)  # noqa: B023
    failed: dict[str, str] = {}
    await eventually(lambda: failed.update(supervisor.pop_failures()) or failed)
    assert failed["run-abc"].startswith(
        "the trainer ended 2 times without a step: exit code 1, out of memory: raise trainer.resources.limits.memory"
    )
    assert [end.state for end in journal.ends] == ["out_of_memory"] * 2
    assert journal.ends[0].output == f"trainer-run-abc-1-0-x7k2p:\n{words.format(41)}"
    await supervisor.close()


async def test_a_trainer_waits_for_its_model(server: FakeKubernetes, make: Make) -> None:
    backend = make()
    await backend.start(FIRST, MODELS)
    server.pod(FIRST.name, 0, phase="Pending", initContainerStatuses=[
        {"name": "wait-for-model", "state": {"running": {"startedAt": "2026-11-24T10:00:00Z"}}}
    ])  # fmt: skip
    assert tuple(await backend.status(FIRST))[:2] == (
        TrainerState.WAITING,
        "its container wait-for-model has not ended",
    )


WAITING_TEMPLATE = (
    TEMPLATE
    + """
  initContainers:
  - name: wait-for-model
    image: trainer:1
    env: [{name: MODEL_PATH, value: /models/base}]
"""
)


@pytest.mark.parametrize(
    ("model", "of_pool", "awaited"),
    [
        (None, None, "/models/base"),
        (None, "/models/pool", "/models/pool"),
        ("/models/own", "/models/pool", "/models/own"),
    ],
)
async def test_a_trainer_waits_for_the_models_that_it_reads(
    server: FakeKubernetes,
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    model: str | None,
    of_pool: str | None,
    awaited: str,
) -> None:
    monkeypatch.setitem(globals(), "TEMPLATE", WAITING_TEMPLATE)
    document = {
        "model": model,
        "algorithm": {"type": "ppo_clip", "critic": {"trunk": "own", "model": "/models/critic"}},
        "credit": {"baseline": {"type": "value"}},
    }
    backend, config = make(), RunConfig.model_validate(run_document(**document))
    await backend.start(FIRST, models_of(config, None if of_pool is None else Path(of_pool)))
    pod = server.objects["jobs"][FIRST.name]["spec"]["template"]["spec"]
    assert pod["initContainers"][0]["env"] == [{"name": "MODEL_PATH", "value": f"{awaited}\n/models/critic"}]
    status = {"name": "wait-for-model", "state": {"running": {"startedAt": "2026-11-24T10:00:00Z"}}}
    server.pod(FIRST.name, 0, phase="Pending", initContainerStatuses=[status])["spec"] = pod
    assert tuple(await backend.status(FIRST))[:2] == (
        TrainerState.WAITING,
        f"its container wait-for-model has not ended: there is no model yet in {awaited} or /models/critic",
    )


async def test_a_trainer_whose_pod_or_job_is_gone_was_killed(server: FakeKubernetes, make: Make) -> None:
    backend = make()
    await backend.start(FIRST, MODELS)
    server.finish_job(FIRST.name, "Failed", reason="PodFailurePolicy", message="Pod was evicted")
    assert tuple(await backend.status(FIRST))[:2] == (TrainerState.KILLED, "PodFailurePolicy: Pod was evicted")
    server.objects["jobs"].clear()
    assert tuple(await backend.status(FIRST))[:2] == (TrainerState.KILLED, "the Job trainer-run-abc-1 was deleted")


async def test_a_trainer_without_quota_waits_for_room_and_another_refusal_is_final(
    server: FakeKubernetes, make: Make
) -> None:
    backend = make()
    server.refuse = lambda kind, body: (403, "exceeded quota: count/jobs=0")
    await backend.start(FIRST, MODELS)
    assert tuple(await backend.status(FIRST))[:2] == (TrainerState.WAITING, "exceeded quota: count/jobs=0")
    server.refuse = lambda kind, body: None
    await backend.status(FIRST)
    assert list(server.objects["jobs"]) == [FIRST.name]
    server.refuse = lambda kind, body: (403, "cannot create jobs")
    with pytest.raises(TrainerRefused, match="cannot create jobs"):
        await backend.start(TrainerAttempt("run-abc", 2), MODELS)


async def test_a_trainer_is_created_once_an_api_server_knows_the_rights_of_the_controller(
    server: FakeKubernetes, make: Make, tmp_path: Path
) -> None:
    words = 'jobs.batch is forbidden: User "controller" cannot create resource "jobs"'
    server.refuse = lambda kind, body: (403, words)
    supervisor = TrainerSupervisor(settings(tmp_path), make(), RememberedEnds())
    supervisor.reconcile({"run-abc": 0})
    await eventually(lambda: words in (supervisor.waiting_reason("run-abc") or ""))
    server.refuse = lambda kind, body: None
    await eventually(lambda: FIRST.name in server.objects["jobs"])
    assert supervisor.pop_failures() == {} and server.deleted == []
    await supervisor.close()


async def test_an_evicted_trainer_is_started_again_without_blame(
    server: FakeKubernetes, make: Make, tmp_path: Path
) -> None:
    supervisor = TrainerSupervisor(settings(tmp_path, trainer_restarts=0), make(), RememberedEnds())
    supervisor.reconcile({"run-abc": 0})
    await eventually(lambda: FIRST.name in server.objects["jobs"])
    server.ended(FIRST.name, 1, 0, "trainer")
    server.pod(FIRST.name, 0, conditions=[EVICTED])
    await eventually(lambda: "trainer-run-abc-2" in server.objects["jobs"])
    assert supervisor.pop_failures() == {}
    server.running("trainer-run-abc-2", 0, "trainer")
    supervisor.reconcile({})
    await eventually(lambda: "trainer-run-abc-2" in server.deleted)
    await supervisor.close()


async def test_a_trainer_whose_pods_are_refused_waits_in_one_job(
    server: FakeKubernetes, make: Make, tmp_path: Path
) -> None:
    refusal = 'pods "x" is forbidden: violates PodSecurity "baseline:latest": host namespaces (hostNetwork=true)'

    def refuse(job: dict[str, Any]) -> None:
        event = {"metadata": {"labels": {}}, "involvedObject": {"name": job["metadata"]["name"]}, "message": refusal}
        server.objects["events"][job["metadata"]["name"]] = event

    server.on_job = refuse
    journal = RememberedEnds()
    supervisor = TrainerSupervisor(settings(tmp_path), make(), journal)
    supervisor.reconcile({"run-abc": 0})
    await eventually(lambda: supervisor.waiting_reason("run-abc") == refusal)
    # The operator mends the namespace, and the Job makes its pod.
    server.running(FIRST.name, 0, "trainer")
    await eventually(lambda: supervisor.waiting_reason("run-abc") is None)
    assert (list(server.objects["jobs"]), journal.ends, supervisor.pop_failures()) == ([FIRST.name], [], {})
    await supervisor.close()


async def test_a_trainer_that_its_queue_preempts_waits_for_the_queue(server: FakeKubernetes, make: Make) -> None:
    """Its Job is resumed: a second one would hold GPUs beside it."""
    backend = make()
    await backend.start(FIRST, MODELS)
    server.objects["jobs"][FIRST.name]["spec"]["suspend"] = True
    server.ended(FIRST.name, 1, 0, "trainer")
    server.pod(FIRST.name, 0, conditions=[EVICTED])
    assert (await backend.status(FIRST)).state is TrainerState.WAITING


@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_trainer_whose_node_does_not_report_is_over_once_its_pod_is_deleted(
    server: FakeKubernetes, make: Make, ranks: int
) -> None:
    backend = make(trainer_pods=ranks)
    await backend.start(FIRST, MODELS)
    pod = server.running(FIRST.name, 0, "trainer")
    pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    if ranks == 2:
        server.ended(FIRST.name, 1, 1, "trainer", message=LOST)
    reason = f"the node of its pod {FIRST.name}-0-x7k2p does not report"
    assert tuple(await backend.status(FIRST))[:2] == (TrainerState.WAITING, reason)
    pod["metadata"]["deletionTimestamp"] = "2026-11-22T12:10:00Z"
    assert tuple(await backend.status(FIRST))[:2] == (TrainerState.KILLED, NODE_LOST)


async def test_stopping_waits_for_no_pod_whose_node_does_not_report(server: FakeKubernetes, make: Make) -> None:
    backend = make()
    await backend.start(FIRST, MODELS)
    pod, server.holds = server.running(FIRST.name, 0, "trainer"), True
    stopping = asyncio.create_task(backend.stop(FIRST))
    await asyncio.sleep(0.1)
    assert not stopping.done()
    pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    await stopping


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
async def test_an_adopted_trainer_has_the_pods_with_which_it_was_made(
    server: FakeKubernetes, make: Make, before: int, after: int
) -> None:
    await make(trainer_pods=before).start(FIRST, MODELS)
    for index in range(before):
        server.running(FIRST.name, index, "trainer")
    leader = make(trainer_pods=after)
    assert (await leader.status(FIRST)).state is TrainerState.RUNNING
    server.ended(FIRST.name, 1, 0, "trainer", message=LOST)
    assert (await leader.status(FIRST)).state is (TrainerState.KILLED if before == 1 else TrainerState.RUNNING)


async def test_a_trainer_survives_its_controller(server: FakeKubernetes, make: Make, tmp_path: Path) -> None:
    former = TrainerSupervisor(settings(tmp_path), make(), RememberedEnds())
    former.reconcile({"run-abc": 0})
    await eventually(lambda: FIRST.name in server.objects["jobs"])
    server.running(FIRST.name, 0, "trainer")
    server.down = 3
    await former.close()
    leader = TrainerSupervisor(settings(tmp_path), make(), RememberedEnds())
    leader.reconcile({"run-abc": 0})
    await asyncio.sleep(0.3)
    assert (list(server.objects["jobs"]), server.deleted, leader.pop_failures()) == ([FIRST.name], [], {})
    await leader.close()


FORBIDDEN = 403, "cannot list jobs"


async def test_a_refused_request_is_no_refused_trainer(server: FakeKubernetes, make: Make) -> None:
    backend = make()
    await backend.start(FIRST, MODELS)
    server.outage, server.down = FORBIDDEN, 2
    for ask in (backend.stop, backend.status):
        with pytest.raises(BackendAway, match=r"cannot list jobs: the chart's Role"):
            await ask(FIRST)
    assert (await backend.status(FIRST)).state is TrainerState.WAITING


async def test_a_refused_poll_fails_no_run(server: FakeKubernetes, make: Make, tmp_path: Path) -> None:
    """As that of an API server that restarts, or of a release that is being removed."""
    supervisor, reasons = TrainerSupervisor(settings(tmp_path), make(), RememberedEnds()), set[str | None]()
    supervisor.reconcile({"run-abc": 0})
    await eventually(lambda: FIRST.name in server.objects["jobs"])
    server.running(FIRST.name, 0, "trainer")
    server.outage, server.down = FORBIDDEN, 3
    await eventually(lambda: reasons.add(supervisor.waiting_reason("run-abc")) or not server.down)
    await eventually(lambda: supervisor.waiting_reason("run-abc") is None)
    assert (supervisor.pop_failures(), list(server.objects["jobs"])) == ({}, [FIRST.name])
    assert any("its state is not known: cannot list jobs" in str(one) for one in reasons)
    # It is still followed.
    server.ended(FIRST.name, 1, 0, "trainer")
    await eventually(lambda: "trainer-run-abc-2" in server.objects["jobs"])
    await supervisor.close()


async def test_a_run_whose_adopted_trainer_is_refused_leaves_none_at_work(
    server: FakeKubernetes, make: Make, tmp_path: Path
) -> None:
    leader = TrainerSupervisor(settings(tmp_path), make(), RememberedEnds())
    await make().start(FIRST, MODELS)
    server.running(FIRST.name, 0, "trainer")
    server.refuse = lambda kind, body: (403, "denied the request: no such queue")
    leader.reconcile({"run-abc": 0})
    await eventually(lambda: server.deleted == [FIRST.name])
    assert leader.pop_failures() == {"run-abc": "the trainer could not be started: denied the request: no such queue"}
    await leader.close()


async def test_a_leader_asks_again_after_a_refusal_about_a_trainer_that_finishes(
    server: FakeKubernetes, make: Make, tmp_path: Path
) -> None:
    former, leader = (TrainerSupervisor(settings(tmp_path), make(), RememberedEnds()) for _ in range(2))
    former.reconcile({"run-abc": 1})
    await eventually(lambda: FIRST.name in server.objects["jobs"])
    await former.close()
    server.requests.clear()
    leader.reconcile({}, finishing=["run-abc"])
    await eventually(lambda: server.requests["GET pods"])
    server.outage, server.down = FORBIDDEN, 3
    await eventually(lambda: server.down == 0)
    assert server.deleted == []
    leader.reconcile({})
    await eventually(lambda: server.deleted == [FIRST.name])
    await leader.close()


def endpoint(address: str, **conditions: bool) -> dict[str, Any]:
    return {"addresses": [address], "conditions": conditions}


async def test_engines_are_the_endpoints_of_a_service_and_those_that_end_drain(server: FakeKubernetes) -> None:
    made = {
        "metadata": {"labels": {"kubernetes.io/service-name": "leyden-engine"}},
        "ports": [{"name": "metrics", "port": 9090}, {"name": "http", "port": 30000}],
        "endpoints": [endpoint("10.0.0.1", ready=True), endpoint("10.0.0.2", ready=False)],
    }
    made["endpoints"].append(endpoint("10.0.0.3", ready=False, terminating=True))  # type: ignore[attr-defined]
    server.objects["endpointslices"] = {"a": made, "b": {"metadata": {"labels": {}}, "endpoints": [], "ports": []}}
    cluster = server.cluster()
    found = await KubernetesEngines(cluster, "leyden-engine").find()
    await cluster.close()
    assert found.urls == {"http://10.0.0.1:30000", "http://10.0.0.2:30000"}
    assert found.draining == {"http://10.0.0.3:30000"}


def test_an_address_of_ipv6_has_brackets_and_a_slice_without_ports_has_no_engine() -> None:
    assert engine_urls({"ports": [{"port": 1}], "endpoints": [endpoint("fd00::1")]}) == ["http://[fd00::1]:1"]
    assert engine_urls({"ports": None, "endpoints": None}) == []


def test_the_settings_of_a_cluster_belong_together() -> None:
    with pytest.raises(ValueError, match="TRAINER_BACKEND=kubernetes needs CONTROLLER_NAMESPACE, CONTROLLER_TRAINER_P"):
        Settings(trainer_backend="kubernetes")
    with pytest.raises(ValueError, match="CONTROLLER_ENGINE_SERVICE needs CONTROLLER_NAMESPACE"):
        Settings(engine_service="engines")
