"""Pods reach Postgres and Redis with any password, which stands in a Secret alone."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import redis
import yaml

from leyden.libs.embedded import servers
from leyden.libs.service import ServiceSettings
from tests.contract.chart.chart import FULLNAME, ROOT, Object, containers, env_of, pods, template

PASSWORD = "p@ss/w:rd%2#x"


def rendered(tmp_path: Path, values: dict[str, Any]) -> list[Object]:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    done = template("--values", str(file))
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def environment(objects: list[Object], deployment: str) -> dict[str, str]:
    """The variables of a container with the texts of the chart's Secret."""
    secret = next(one["data"] for one in objects if one["kind"] == "Secret")
    pod = next(one for one in objects if one["kind"] == "Deployment" and one["metadata"]["name"] == deployment)
    found = {}
    for one in containers(pod["spec"]["template"])[-1]["env"]:
        reference = one.get("valueFrom", {}).get("secretKeyRef")
        if reference and reference["name"] == f"{FULLNAME}-secrets":
            found[one["name"]] = base64.b64decode(secret[reference["key"]]).decode()
        elif "value" in one:
            found[one["name"]] = str(one["value"])
    return found


@pytest.mark.parametrize("store", ["postgres", "redis"])
def test_policies_open_the_port_of_an_address_in_a_secret(tmp_path: Path, store: str) -> None:
    """The chart cannot read the Secret, so the value's comment asks for the port."""
    objects = rendered(tmp_path, {store: {"mode": "external", "external": {"urlSecret": {"name": "s"}, "port": 6432}}})
    policy = next(one for one in objects if one["kind"] == "NetworkPolicy" and one["metadata"]["name"].endswith("-api"))
    assert {"ports": [{"port": 6432, "protocol": "TCP"}]} in policy["spec"]["egress"]
    page = (ROOT / "docs" / "reference" / "values.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith(f"| `{store}.external.urlSecret` |"))
    assert "`port`" in row


def test_every_pod_that_connects_to_postgres_has_its_certificate_authority() -> None:
    places = {}
    for name, pod in pods("external-stores"):
        for container in containers(pod):
            env = env_of(container)
            if any(one.startswith("LEYDEN_DATABASE_") for one in env):
                mounts = {one["name"]: one["mountPath"] for one in container.get("volumeMounts", ())}
                volumes = {one["name"]: one.get("secret") for one in pod["spec"]["volumes"]}
                assert volumes["postgres-ca"]["secretName"] == "database-ca"
                path = f"{mounts['postgres-ca']}/{volumes['postgres-ca']['items'][0]['path']}"
                places[name, container["name"]] = path == env["PGSSLROOTCERT"]["value"]
    assert all(places.values())
    assert {name for _, name in places} >= {"api", "wait-for-schema", "migrate", "wait-for-server", "trainer"}


def test_the_pods_of_external_stores_read_the_address_of_the_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    password = {"value": PASSWORD}
    postgres = {
        "host": "db.example",
        "port": 6432,
        "user": "app@team",
        "database": "a/b",
        "parameters": "sslmode=require",
    }
    objects = rendered(
        tmp_path,
        {
            "postgres": {"mode": "external", "external": postgres, "password": password},
            "redis": {"mode": "external", "external": {"host": "cache", "number": 3}, "password": password},
        },
    )
    for name, value in environment(objects, f"{FULLNAME}-api").items():
        monkeypatch.setenv(name, value)
    settings = ServiceSettings()
    found = urlsplit(settings.database_url)
    assert (found.hostname, found.port, found.query) == ("db.example", 6432, "sslmode=require")
    assert [unquote(part or "") for part in (found.username, found.password, found.path)] == [
        "app@team",
        PASSWORD,
        "/a/b",
    ]
    connection = redis.Redis.from_url(settings.redis_url).connection_pool.connection_kwargs
    assert connection["password"] == PASSWORD
    assert (connection["host"], connection["port"], connection["db"]) == ("cache", 6379, 3)
    assert PASSWORD not in json.dumps(objects)


@pytest.fixture
def programs(tmp_path: Path) -> str:
    """A PATH on which valkey-server is the embedded one."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "valkey-server").symlink_to(servers._redis_binary())
    return os.pathsep.join([str(folder), os.environ["PATH"]])


@pytest.mark.parametrize("password", [PASSWORD, 'with "quotes" and \\ and spaces', "$(id) 'x' #"])
def test_redis_inside_starts_with_any_password(password: str, tmp_path: Path, programs: str) -> None:
    objects = rendered(tmp_path, {"redis": {"password": {"value": password}}})
    pod = next(one for one in objects if one["kind"] == "StatefulSet" and one["metadata"]["name"].endswith("-redis"))
    port = servers._free_port()
    [shell, option, script] = containers(pod["spec"]["template"])[0]["command"]
    script = script.replace("/tmp", str(tmp_path)).replace("bind * -::*", f"bind 127.0.0.1\\nport {port}")
    server = subprocess.Popen([shell, option, script], env={"PATH": programs, "REDIS_PASSWORD": password})
    try:
        client = redis.Redis(port=port, password=password)
        assert answers(client)
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=port).ping()
    finally:
        server.terminate()
        server.wait()


def answers(client: redis.Redis) -> bool:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            time.sleep(0.05)
    return False
