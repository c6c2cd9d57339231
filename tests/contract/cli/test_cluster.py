"""Commands against a platform on a cluster: the real kubectl, an API server of the test, and the real REST API."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from typer.testing import CliRunner, Result

from leyden.libs.cli.__main__ import app
from leyden.libs.cli.errors import Exit
from leyden.libs.cli.view.output import console
from leyden.libs.store.database import Database
from tests.fakes.kubernetes_cluster import FakeCluster, pod, release, write_kubectl
from tests.fakes.served_api import TOKEN
from tests.support import builders

Leyden = Any
SECRET = "/api/v1/namespaces/platform/secrets/leyden-secrets"
PODS = "/api/v1/namespaces/platform/pods"
NODE = {
    "metadata": {"name": "node-1"},
    "status": {"conditions": [{"type": "Ready", "status": "True"}], "allocatable": {"cpu": "8"}},
}


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster().serving() as serving:
        yield serving


@pytest.fixture
def leyden(cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Leyden:
    """Runs a command with the cluster's kubeconfig."""
    # The console reads COLUMNS when it is made, once for all tests of a process.
    monkeypatch.setattr(console, "width", 500)
    write_kubectl(tmp_path, {})

    def run(*words: str, **variables: str) -> Result:
        config = cluster.write_kubeconfig(tmp_path / "kubeconfig", "platform")
        path = f"{tmp_path}:{os.environ['PATH']}"
        environment = {"KUBECONFIG": str(config), "PATH": path, **variables}
        return CliRunner().invoke(app, ["--home", str(tmp_path / "home"), *words], env=environment)

    return run


@pytest.fixture
def with_api(cluster: FakeCluster, api_url: str, tmp_path: Path, leyden: Leyden) -> FakeCluster:
    """A release whose API is the real one, behind a forwarded port."""
    release(cluster)
    write_kubectl(tmp_path, {"service/leyden-api": urlsplit(api_url).port or 0})
    cluster.objects[SECRET] = {"data": {"admin-token": base64.b64encode(TOKEN.encode()).decode()}}
    return cluster


def test_a_context_is_all_that_a_command_needs(with_api: FakeCluster, leyden: Leyden, tmp_path: Path) -> None:
    rows = tmp_path / "questions.jsonl"
    rows.write_text('{"question": 1}\n')
    uploaded = leyden("--context", "trial", "dataset", "upload", str(rows))
    assert uploaded.exit_code == 0, uploaded.output
    listed = leyden("dataset", "list", "--json", LEYDEN_KUBE_CONTEXT="trial")
    assert [one["name"] for one in json.loads(listed.stdout)] == ["questions"]
    status = leyden("--context", "trial", "status", "--json")
    assert (status.exit_code, json.loads(status.stdout)["release"]) == (0, "leyden")
    assert "leyden-gateway-0" in leyden("--context", "trial", "status").stdout


def test_status_and_doctor_say_why_an_engine_does_not_serve(
    with_api: FakeCluster, leyden: Leyden, postgres_dsn: str
) -> None:
    def doctor() -> tuple[str, str]:
        found = json.loads(leyden("--context", "trial", "doctor", "--json").stdout)
        [engine] = [one for one in found if "engine" in one["name"]]
        return engine["status"], engine["detail"]

    assert doctor() == ("warning", "none has been seen")
    with psycopg.connect(postgres_dsn) as connection:
        connection.execute(
            "INSERT INTO engines (url, pool, state, detail) VALUES ('http://e', 'default', 'unreachable', 'refused')"
        )
    assert doctor() == ("problem", "refused")
    shown = leyden("--context", "trial", "status").stdout
    assert re.search("http://e +default +unreachable .* refused", shown)
    assert "rollouts: 0 queued, 0 at work, 0 wait for grades, 0 for people" in shown
    assert json.loads(leyden("--context", "trial", "status", "--json").stdout)["queued_rollouts"] == 0
    with psycopg.connect(postgres_dsn) as connection:
        connection.execute("UPDATE engines SET state = 'serving', detail = NULL")
    assert doctor() == ("ok", "1 of 1 answer")


def test_status_shows_a_run_at_work_behind_many_newer_ones_that_ended(
    with_api: FakeCluster, leyden: Leyden, postgres_dsn: str
) -> None:
    async def fill() -> str:
        database = Database(postgres_dsn)
        try:
            running = await builders.add_run(database)
            for _ in range(51):
                ended = await builders.add_run(database, dataset_id=running.dataset_id)
                await builders.end_run(database, ended)
            return running.id
        finally:
            await database.close()

    run_id = asyncio.run(fill())
    shown = json.loads(leyden("--context", "trial", "status", "--json").stdout)
    assert [run["id"] for run in shown["runs"]] == [run_id]


def test_a_token_of_ones_own_needs_no_right_to_read_secrets(with_api: FakeCluster, leyden: Leyden) -> None:
    with_api.forbidden.add(SECRET)
    refused = leyden("--context", "trial", "run", "list")
    assert refused.exit_code == Exit.NOT_ALLOWED
    assert "leyden-secrets is not readable" in refused.stderr
    assert "pass --token or LEYDEN_TOKEN" in refused.stderr
    assert leyden("--context", "trial", "--token", TOKEN, "run", "list").exit_code == 0
    del with_api.objects[SECRET]
    with_api.forbidden.clear()
    assert leyden("--context", "trial", "run", "list").exit_code == Exit.NOT_FOUND


def test_a_wrong_context_names_those_that_exist(leyden: Leyden) -> None:
    result = leyden("--context", "mistyped", "run", "list")
    assert result.exit_code == Exit.NOT_FOUND
    assert "no kubectl context 'mistyped'; there are: trial" in result.stderr


def test_a_missing_kubectl_names_where_to_get_it(leyden: Leyden, tmp_path: Path) -> None:
    result = leyden("--context", "trial", "run", "list", PATH=str(tmp_path / "nothing"))
    assert result.exit_code == Exit.ERROR
    assert "kubectl is not in PATH: install it (https://kubernetes.io/docs/tasks/tools/)" in result.stderr


def test_a_missing_release_names_those_that_exist(cluster: FakeCluster, leyden: Leyden) -> None:
    nowhere = leyden("--context", "trial", "run", "list")
    assert nowhere.exit_code == Exit.NOT_FOUND
    assert "no release of Leyden in the namespace platform; there are: none (helm install" in nowhere.stderr
    for name, namespace in (("blue", "one"), ("green", "two")):
        release(cluster, namespace, name)
    result = leyden("--context", "trial", "--release", "red", "run", "list")
    assert result.exit_code == Exit.NOT_FOUND
    assert "no release 'red' in the namespace platform; there are: blue in one, green in two" in result.stderr
    several = leyden("--context", "trial", "run", "list")
    assert "choose one with --release and --namespace: blue in one, green in two" in several.stderr


def test_an_unreachable_cluster_ends_with_its_cause(cluster: FakeCluster, leyden: Leyden) -> None:
    cluster.url = "http://127.0.0.1:1"
    result = leyden("--context", "trial", "run", "list")
    assert result.exit_code == Exit.UNREACHABLE
    assert "127.0.0.1:1" in result.stderr


@pytest.mark.parametrize(
    ("words", "variables", "cause"),
    [
        (["--context", "trial", "--url", "http://x", "run", "list"], {}, "choose --url"),
        (["run", "list"], {"LEYDEN_URL": "http://x", "LEYDEN_KUBE_CONTEXT": "trial"}, "choose --url"),
        (["--context", "trial", "up"], {}, "`leyden up` is for this machine"),
    ],
)
def test_a_command_is_for_one_platform(leyden: Leyden, words: list[str], variables: dict[str, str], cause: str) -> None:
    result = leyden(*words, **variables)
    assert result.exit_code == Exit.USAGE
    assert cause in result.stderr


def test_an_option_replaces_the_environments_platform(with_api: FakeCluster, leyden: Leyden) -> None:
    another = {"LEYDEN_URL": "http://127.0.0.1:1", "LEYDEN_TOKEN": "of-another-platform"}
    assert leyden("--context", "trial", "run", "list", **another).exit_code == 0


def test_logs_are_those_of_the_pods(cluster: FakeCluster, leyden: Leyden) -> None:
    pods = release(cluster)
    pods.append(pod("platform", "leyden", "gateway", "leyden-gateway-1"))
    cluster.logs = {"leyden-gateway-0": "one\ntwo\n", "leyden-gateway-1": "three\n", "leyden-api-0": "no\n"}
    assert leyden("--context", "trial", "logs").stdout.split() == ["api", "gateway", "postgres", "runner"]
    result = leyden("--context", "trial", "logs", "gateway")
    assert result.exit_code == 0
    printed = result.stdout
    assert "[pod/leyden-gateway-0/gateway] two" in printed
    assert "[pod/leyden-gateway-1/gateway] three" in printed
    assert "no" not in printed
    # An agent's bytes neither act on the terminal nor look like the line of another pod.
    cluster.logs = {"leyden-gateway-0": "\x1b[2J\x07bell\r[pod/leyden-api-0/api] all is well\n"}
    printed = leyden("--context", "trial", "logs", "gateway").stdout
    assert printed == ("[pod/leyden-gateway-0/gateway] \\x1b[2J\\x07bell\\r[pod/leyden-api-0/api] all is well\n")
    missing = leyden("--context", "trial", "logs", "trainer")
    assert missing.exit_code == Exit.NOT_FOUND
    assert "no log of 'trainer'; there are: api, gateway" in missing.stderr


def findings(leyden: Leyden, *words: str) -> dict[str, dict[str, str]]:
    result = leyden(*words, "doctor", "--cluster", "--json")
    assert result.exit_code in (Exit.DONE, Exit.ERROR), result.stderr
    return {one["name"]: one for one in json.loads(result.stdout)}


def add_cluster(cluster: FakeCluster, provisioner: str = "rancher.io/local-path", nodes: int = 1) -> None:
    """Nodes, a storage class, DNS and a network plugin."""
    annotations = {"storageclass.kubernetes.io/is-default-class": "true"}
    dns = {"k8s-app": "kube-dns"}
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    cluster.objects |= {
        "/api/v1/nodes": [NODE] * nodes,
        "/apis/storage.k8s.io/v1/storageclasses": [
            {"metadata": {"name": "standard", "annotations": annotations}, "provisioner": provisioner}
        ],
        "/api/v1/namespaces/kube-system/pods": [{"metadata": {"name": "coredns", "labels": dns}, "status": ready}],
        "/apis/apps/v1/daemonsets": [{"metadata": {"name": "calico-node"}}],
        "/apis/metrics.k8s.io/v1beta1": {},
    }


def test_a_good_cluster_has_no_problem(cluster: FakeCluster, leyden: Leyden) -> None:
    add_cluster(cluster)
    release(cluster)
    found = findings(leyden)
    assert {name for name, one in found.items() if one["status"] == "problem"} == set()
    assert found["release"]["detail"] == "leyden in platform: 4 of 4 pods ready"
    assert "4 of 4 pods ready" in leyden("doctor", "--cluster").stdout
    assert found["network policies"]["detail"].startswith("calico-node enforces them, perhaps after a pod has started")
    assert (found["gpus"]["status"], found["KEDA"]["status"]) == ("warning", "skipped")


@pytest.mark.parametrize(
    ("daemon_set", "detail"),
    [
        ({"metadata": {"name": "cilium"}}, "cilium enforces them, before a pod starts"),
        ({"metadata": {"name": "aws-node"}}, "mode standard: perhaps after a pod has started"),
        (
            {
                "metadata": {"name": "aws-node"},
                "spec": {
                    "template": {
                        "spec": {
                            "containers": [{"env": [{"name": "NETWORK_POLICY_ENFORCING_MODE", "value": "strict"}]}]
                        }
                    }
                },
            },
            "mode strict: before a pod starts",
        ),
    ],
)
def test_the_doctor_names_the_moment_from_which_policies_hold(
    cluster: FakeCluster, leyden: Leyden, daemon_set: dict[str, Any], detail: str
) -> None:
    add_cluster(cluster)
    cluster.objects["/apis/apps/v1/daemonsets"] = [daemon_set]
    assert detail in findings(leyden)["network policies"]["detail"]


@pytest.mark.parametrize(
    ("args", "status", "detail"),
    [
        ([], "ok", "aws-node enforces them where they are switched on, in mode standard"),
        (["--enable-network-policy=true"], "ok", "aws-node enforces them, in mode standard"),
        (
            ["--enable-network-policy=false"],
            "warning",
            "aws-node enforces none, as --enable-network-policy=false tells",
        ),
    ],
)
def test_the_doctor_says_whether_awss_plugin_enforces_policies(
    cluster: FakeCluster, leyden: Leyden, args: list[str], status: str, detail: str
) -> None:
    add_cluster(cluster)
    containers = [{"name": "aws-node"}, {"name": "aws-eks-nodeagent", "args": args}]
    aws = {"metadata": {"name": "aws-node"}, "spec": {"template": {"spec": {"containers": containers}}}}
    cluster.objects["/apis/apps/v1/daemonsets"] = [aws]
    found = findings(leyden)["network policies"]
    assert (found["status"], found["detail"][: len(detail)]) == (status, detail)


def test_each_lack_of_a_cluster_has_a_remedy(cluster: FakeCluster, leyden: Leyden) -> None:
    add_cluster(cluster, "ebs.csi.aws.com", nodes=3)
    cluster.objects["/version"] = {"gitVersion": "v1.29.8-eks"}
    cluster.objects["/apis/apps/v1/daemonsets"] = [{"metadata": {"name": "kube-flannel-ds"}}]
    cluster.objects["/api/v1/namespaces/kube-system/pods"] = []
    cluster.denied = {"networkpolicies", "namespaces"}
    cluster.forbidden.add("/apis/metrics.k8s.io/v1beta1")
    found = findings(leyden)
    assert "needs 1.30" in found["api server"]["remedy"]
    assert found["rights"]["detail"] == "you may not create networkpolicies, namespaces"
    assert "ClusterRole `admin`" in found["rights"]["remedy"]
    assert "storage.existingClaim" in found["shared storage"]["remedy"]
    assert found["network policies"]["status"] == found["dns"]["status"] == "warning"
    assert "flannel does not enforce them: every attempt fails while it waits" in found["network policies"]["detail"]
    assert found["metrics"]["status"] == "skipped"
    assert {one["status"] for one in found.values() if one["name"] in {"api server", "rights", "shared storage"}} == {
        "problem"
    }
    cluster.denied, cluster.incomplete = {"namespaces"}, True
    cluster.objects["/apis/storage.k8s.io/v1/storageclasses"] = []
    found = findings(leyden)
    assert "rollouts.createNamespace=false" in found["rights"]["remedy"]
    assert found["storage classes"]["status"] == "problem"


def test_gpus_and_shared_classes_are_found(cluster: FakeCluster, leyden: Leyden) -> None:
    add_cluster(cluster, "efs.csi.aws.com")
    status = {**NODE["status"], "allocatable": {"nvidia.com/gpu": "8"}}  # type: ignore[dict-item]
    cluster.objects["/api/v1/nodes"] = [NODE, NODE | {"status": status}, NODE | {"status": status}]
    cluster.objects["/apis"]["groups"] = [{"name": "kueue.x-k8s.io"}]
    found = findings(leyden)
    assert found["gpus"]["detail"] == "16 nvidia.com/gpu on 2 nodes"
    assert found["shared storage"]["detail"] == "ReadWriteMany by standard"
    assert found["Kueue"]["status"] == "ok"


def test_a_waiting_pod_has_its_reason_and_a_remedy(cluster: FakeCluster, leyden: Leyden) -> None:
    add_cluster(cluster)
    pods = release(cluster)
    unready = {"type": "Ready", "status": "False"}
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
    back_off = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image leyden/credit:9"}}
    ended = {"terminated": {"exitCode": 2, "reason": "Error", "message": "log\nGATEWAY_MODEL_PATH: Field required"}}
    looping = {"name": "gateway", "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": ended}
    pods += [
        pod("platform", "leyden", "engine", phase="Pending", conditions=[unready, unscheduled]),
        pod("platform", "leyden", "credit", phase="Pending", containerStatuses=[{"name": "credit", "state": back_off}]),
        pod("platform", "leyden", "gateway", "crashing", containerStatuses=[looping]),
        pod(
            "platform",
            "leyden",
            "collector",
            phase="Pending",
            initContainerStatuses=[{"name": "wait-for-schema", "state": {"running": {}}}],
            containerStatuses=[{"name": "collector", "state": {"waiting": {"reason": "PodInitializing"}}}],
        ),
    ]
    cluster.logs["leyden-collector-0"] = "waiting: the database is at schema None\n"
    claim = {"metadata": {"name": "leyden-storage", "labels": {"app.kubernetes.io/instance": "leyden"}}}
    cluster.objects["/api/v1/namespaces/platform/persistentvolumeclaims"] = [claim | {"status": {"phase": "Pending"}}]
    now = datetime.now(UTC)
    cluster.objects["/api/v1/namespaces/platform/events"] = [
        {
            "metadata": {},
            "involvedObject": {"kind": "Pod", "name": "leyden-engine-0"},
            "reason": "FailedScheduling",
            "message": message,
            "lastTimestamp": (now - timedelta(minutes=age)).isoformat(),
        }
        for age, message in ((3, "0/1 nodes are available"), (9, "earlier"), (99, "long ago"))
    ]
    found = findings(leyden)
    assert "4 of 8 pods ready" in found["release"]["detail"]
    assert found["leyden-engine-0"]["detail"] == "Unschedulable: 0/1 nodes"
    assert "add a node" in found["leyden-engine-0"]["remedy"]
    assert "global.imagePullSecrets" in found["leyden-credit-0"]["remedy"]
    assert "it ended with exit code 2 (Error): GATEWAY_MODEL_PATH: Field required" in found["crashing"]["detail"]
    assert "waiting: the database is at schema None" in found["leyden-collector-0"]["detail"]
    assert "leyden logs migrate" in found["leyden-collector-0"]["remedy"]
    assert found["claim"]["detail"] == "leyden-storage is pending"
    assert found["event"]["detail"].endswith("pod/leyden-engine-0: FailedScheduling: 0/1 nodes are available")


def test_a_running_pod_that_is_not_ready_answers_why(cluster: FakeCluster, leyden: Leyden, tmp_path: Path) -> None:
    class Unready(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(503)
            self.end_headers()
            checks = {"store": "ok", "schema": "the database is at schema 1"}
            self.wfile.write(json.dumps({"checks": checks}).encode())

        def log_message(self, *_: object) -> None:
            pass

    pods = release(cluster)
    running = [{"name": "gateway", "state": {"running": {}}}]
    pods.append(pod("platform", "leyden", "gateway", "leyden-gateway-1", containerStatuses=running))
    server = HTTPServer(("127.0.0.1", 0), Unready)
    serving = Thread(target=server.serve_forever)
    serving.start()
    write_kubectl(tmp_path, {"pod/leyden-gateway-1": server.server_port})
    found = findings(leyden)
    server.shutdown()
    server.server_close()
    serving.join()
    assert found["leyden-gateway-1: schema"]["detail"] == "the database is at schema 1"
    assert "leyden-gateway-1: store" not in found


def test_a_cluster_that_does_not_answer_is_one_problem(cluster: FakeCluster, leyden: Leyden) -> None:
    cluster.url = "http://127.0.0.1:1"
    result = leyden("--namespace", "platform", "doctor", "--json")
    first = json.loads(result.stdout)[0]
    assert (first["name"], first["status"]) == ("api server", "problem")
