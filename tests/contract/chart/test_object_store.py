"""Versions in an object store: who has its address and its credentials, and who reaches it."""

from __future__ import annotations

from tests.contract.chart.chart import FULLNAME, containers, env_of, objects, of_kind, pods, template

CASE = "object-store"
USERS = {f"{FULLNAME}-api", f"{FULLNAME}-controller", "trainer"}
FETCHING = {f"{FULLNAME}-engine", f"{FULLNAME}-engine-small"}


def test_api_controller_trainer_and_the_sidecars_of_engines_use_the_store_and_no_other_pod() -> None:
    users = {
        (name, one["name"]): one
        for name, pod in pods(CASE)
        for one in containers(pod)
        if "LEYDEN_WEIGHT_STORE" in env_of(one)
    }
    assert set(users) == {(name, name.removeprefix(f"{FULLNAME}-")) for name in USERS} | {
        (name, "fetcher") for name in FETCHING
    }
    for one in users.values():
        assert env_of(one)["LEYDEN_WEIGHT_STORE"]["value"] == "s3://weights/team"
        assert env_of(one)["AWS_ENDPOINT_URL"]["value"] == "http://minio.storage:9000"
        assert one["envFrom"] == [{"secretRef": {"name": "mine"}}]
    assert not [
        one for _, pod in pods(CASE) for one in containers(pod) if "envFrom" in one and one not in users.values()
    ]


def test_a_sidecar_writes_where_its_engine_reads_and_the_controller_knows_its_port() -> None:
    for name, pod in pods(CASE):
        if name in FETCHING:
            [fetcher] = [one for one in pod["spec"]["initContainers"] if one["name"] == "fetcher"]
            [engine] = pod["spec"]["containers"]
            assert (fetcher["restartPolicy"], pod["spec"]["initContainers"][0]) == ("Always", fetcher)
            assert fetcher["image"].startswith("docker.io/leyden/controller:")
            assert env_of(fetcher)["FETCHER_FOLDER"]["value"] == "/var/cache/leyden"
            assert env_of(fetcher)["FETCHER_FOLDER_BYTES"]["value"] == str(100 * 2**30)
            assert env_of(fetcher)["FETCHER_KEY"]["valueFrom"] == env_of(engine)["ENGINE_ADMIN_API_KEY"]["valueFrom"]
            mounts = [next(m for m in one["volumeMounts"] if m["name"] == "versions") for one in (fetcher, engine)]
            assert mounts == [
                {"name": "versions", "mountPath": "/var/cache/leyden"},
                {"name": "versions", "mountPath": "/var/cache/leyden", "readOnly": True},
            ]
    [controller] = [one for name, pod in pods(CASE) if name == f"{FULLNAME}-controller" for one in containers(pod)][-1:]
    assert env_of(controller)["CONTROLLER_FETCHER_PORT"]["value"] == "30001"


def test_policies_open_the_store_to_its_users_and_the_sidecars_to_the_controller() -> None:
    policies = {
        one["metadata"]["name"].removeprefix(f"{FULLNAME}-"): one["spec"] for one in of_kind(CASE, "NetworkPolicy")
    }
    store = {"ports": [{"port": 9000, "protocol": "TCP"}]}
    open_to = {name for name, spec in policies.items() if store in spec["egress"]}
    assert open_to == {"api", "controller", "trainer", "engine", "engine-small", "engine-wide"}
    assert [one["port"] for one in policies["engine-small"]["ingress"][0]["ports"]] == [30000, 30001]


def test_without_a_store_nothing_of_it_is_rendered() -> None:
    text = str(objects("minimal"))
    assert not [word for word in ("fetcher", "LEYDEN_WEIGHT_STORE", "30001", "/var/cache/leyden") if word in text]


def test_an_address_with_a_credential_is_refused() -> None:
    done = template("--set", "objectStore.url=s3://key:hidden@bucket/prefix")
    assert done.returncode != 0
    assert "objectStore" in done.stderr
