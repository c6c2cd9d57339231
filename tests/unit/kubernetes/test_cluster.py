"""The client of one namespace, against an API server that is sometimes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kubernetes_asyncio import client

from leyden.libs.kubernetes import cluster as cluster_module
from leyden.libs.kubernetes.cluster import Cluster, Refused
from leyden.libs.kubernetes.shared import SharedPoll
from leyden.libs.service.errors import Misconfigured
from tests.fakes.kubernetes_api import FakeKubernetes


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeKubernetes]:
    monkeypatch.setattr(cluster_module, "FIRST_PAUSE_SECONDS", 0.01)
    async with FakeKubernetes().serving() as serving:
        yield serving


@pytest.fixture
async def cluster(server: FakeKubernetes) -> AsyncIterator[Cluster]:
    made = server.cluster()
    yield made
    await made.close()


def job(name: str = "one", **spec: object) -> client.V1Job:
    container = client.V1Container(name="c", image="a:1")
    pod = client.V1PodTemplateSpec(
        metadata=client.V1ObjectMeta(labels={"a": "b"}),
        spec=client.V1PodSpec(containers=[container], restart_policy="Never"),
    )
    metadata = client.V1ObjectMeta(name=name, labels={"a": "b"})
    return client.V1Job(
        api_version="batch/v1", kind="Job", metadata=metadata, spec=client.V1JobSpec(template=pod, **spec)
    )


async def test_creating_twice_adopts_and_deleting_twice_is_fine(server: FakeKubernetes, cluster: Cluster) -> None:
    first = await cluster.create_job(job())
    assert await cluster.create_job(job()) == first
    assert [one["metadata"]["name"] for one in await cluster.jobs("a=b")] == ["one"]
    assert await cluster.jobs("a=c") == []
    for _ in range(2):
        await cluster.delete_job("one")
    assert (server.deleted, await cluster.job("one")) == (["one"], None)


async def test_a_role_owns_the_jobs(server: FakeKubernetes) -> None:
    cluster = server.cluster(owner_role="leyden-runner")
    with pytest.raises(Refused, match="roles/leyden-runner not found"):
        await cluster.create_job(job())
    for uid in ("first", "replaced"):
        server.objects["roles"]["leyden-runner"] = {"metadata": {"name": "leyden-runner", "uid": uid}}
        await cluster.create_job(job(uid))
        [owner] = server.objects["jobs"][uid]["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["uid"]) == ("Role", "leyden-runner", uid)
        assert owner["apiVersion"] == "rbac.authorization.k8s.io/v1"
    await cluster.close()


async def test_a_dry_run_creates_nothing(server: FakeKubernetes, cluster: Cluster) -> None:
    await cluster.create_job(job(), dry_run=True)
    assert server.objects["jobs"] == {}


async def test_a_request_is_repeated_while_the_server_is_away(server: FakeKubernetes, cluster: Cluster) -> None:
    server.down = 3
    await cluster.create_job(job())
    assert server.requests["POST jobs"] == 4


async def test_a_refusal_is_the_servers_own_sentence(server: FakeKubernetes, cluster: Cluster) -> None:
    server.refuse = lambda kind, body: (403, "exceeded quota: jobs")
    with pytest.raises(Refused, match=r"^exceeded quota: jobs$"):
        await cluster.create_job(job())
    with pytest.raises(Refused, match="not found"):
        await cluster.read_log("none", "agent", lambda: print)


NO_RIGHTS = 'pods is forbidden: User "runner" cannot list resource "pods" in API group "" in the namespace "rollouts"'


@pytest.mark.parametrize("outage", [(401, "Unauthorized"), (403, NO_RIGHTS)])
async def test_a_server_that_knows_no_rights_yet_is_asked_again_for_a_while(
    server: FakeKubernetes, cluster: Cluster, outage: tuple[int, str]
) -> None:
    server.outage, server.down = outage, 3
    assert await cluster.patient(60).pods("a=b") == []
    assert server.requests["GET pods"] == 4
    server.down = 100
    for patience in (0.0, 0.05):
        with pytest.raises(Refused, match=outage[1][:10]):
            await cluster.patient(patience).pods("a=b")
    assert server.down > 50


async def test_patience_waits_for_no_admission(server: FakeKubernetes, cluster: Cluster) -> None:
    server.refuse = lambda kind, body: (403, 'jobs.batch "one" is forbidden: exceeded quota: agents')
    with pytest.raises(Refused, match="exceeded quota"):
        await cluster.patient(60).create_job(job())
    assert server.requests["POST jobs"] == 1


async def test_a_log_comes_in_chunks(server: FakeKubernetes, cluster: Cluster) -> None:
    server.logs["pod"] = b"a" * 300_000 + b"the end"
    found: list[bytes] = []
    await cluster.read_log("pod", "agent", lambda: found.append)
    assert len(found) > 1
    assert b"".join(found) == server.logs["pod"]


async def test_a_log_that_the_node_removed_is_refused(server: FakeKubernetes, cluster: Cluster) -> None:
    server.logs["pod"] = b"unable to retrieve container logs for containerd://0d8a"
    with pytest.raises(Refused, match="unable to retrieve"):
        await cluster.read_log("pod", "agent", lambda: print)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a list", "must be a PodTemplateSpec"),
        ("spec: {containers: [{name: other}]}", "must have a container named 'agent'"),
        (
            "spec: {containers: [{name: agent, imagePullPolice: Never}]}",
            r"no field spec.containers\[0\].imagePullPolice",
        ),
        ("{spec: [", "must be a PodTemplateSpec in YAML"),
    ],
)
def test_a_wrong_template_is_refused_with_the_cause(tmp_path: Path, cluster: Cluster, text: str, message: str) -> None:
    (tmp_path / "agent.yaml").write_text(text)
    with pytest.raises(Misconfigured, match=message):
        cluster.template(tmp_path / "agent.yaml", "agent")


async def test_all_waiters_share_one_request_and_one_who_leaves_disturbs_nobody() -> None:
    requests = 0

    async def fetch() -> int:
        nonlocal requests
        requests += 1
        return requests

    poll = SharedPoll(fetch, 0.01)
    waiters = [asyncio.create_task(poll.next()) for _ in range(100)]
    await asyncio.sleep(0)
    waiters[0].cancel()
    assert set(await asyncio.gather(*waiters[1:])) == {1}
    assert await poll.next() == 2
    await poll.close()
