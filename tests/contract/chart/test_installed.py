"""`helm test`: the command of the chart's test pod fails for each workload of the chart that has no ready pod."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import certifi
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from leyden.libs.kubernetes import installed
from tests.contract.chart.chart import NAMESPACE, Object, of_kind

WORKLOADS = {"Deployment": "deployments", "StatefulSet": "statefulsets"}
CASE = "pools"


class StandIn:
    """An API server that has the chart's workloads with their pods ready, but for those of one that is down; and an
    engine, at the name of each engine's Service."""

    def __init__(self) -> None:
        self.down = ""

    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/apis/apps/v1/namespaces/{namespace}/{kind}", self._list)
        app.router.add_post("/generate", self._generate)
        return app

    async def _list(self, request: web.Request) -> web.Response:
        name, _, value = request.query["labelSelector"].partition("=")
        assert (request.match_info["namespace"], request.headers["authorization"]) == (NAMESPACE, "Bearer token")
        found = [one for one in of_kind(CASE, *WORKLOADS) if WORKLOADS[one["kind"]] == request.match_info["kind"]]
        labelled = [one for one in found if one["metadata"]["labels"].get(name) == value]
        return web.json_response({"items": [self._with_status(one) for one in labelled]})

    def _with_status(self, one: Object) -> Object:
        wanted = one["spec"].get("replicas", 1)
        status = {} if one["metadata"]["name"] == self.down else {"readyReplicas": wanted}
        return one | {"spec": one["spec"] | {"replicas": wanted}, "status": status}

    async def _generate(self, request: web.Request) -> web.Response:
        return web.json_response({})


async def test_helm_test_fails_for_each_workload_without_a_ready_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [pod] = [one for one in of_kind(CASE, "Pod") if one["metadata"]["annotations"].get("helm.sh/hook") == "test"]
    [container] = pod["spec"]["containers"]
    assert container["command"] == ["python", "-m", installed.__name__]
    variables = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    for name, text in (("namespace", NAMESPACE), ("token", "token"), ("ca.crt", Path(certifi.where()).read_text())):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(installed, "ACCOUNT", tmp_path)
    monkeypatch.setattr(installed, "WAIT_SECONDS", 0.0)
    monkeypatch.setenv("RELEASE", variables["RELEASE"])
    cluster = StandIn()
    async with TestServer(cluster.application(), host="127.0.0.1") as server:
        monkeypatch.setattr(installed, "API_SERVER", f"http://127.0.0.1:{server.port}")
        monkeypatch.setattr(installed, "ENGINE_PORT", server.port)
        # The names of Services are those of the cluster's DNS.
        monkeypatch.setenv("ENGINES", " ".join("127.0.0.1" for _ in variables["ENGINES"].split()))

        async def helm_test() -> tuple[int, Any]:
            return await asyncio.to_thread(installed.main), capsys.readouterr()

        status, output = await helm_test()
        assert (status, output.out) == (0, "every pod is ready, and every engine samples\n")
        names = [one["metadata"]["name"] for one in of_kind(CASE, *WORKLOADS)]
        assert len(names) >= 10
        for cluster.down in names:
            status, output = await helm_test()
            assert (status, output.err.splitlines()[0].partition(" of ")[0]) == (1, f"{cluster.down}: 0")
