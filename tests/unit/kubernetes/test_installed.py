"""`helm test`: which pods are not ready, and which engines sample no token."""

from __future__ import annotations

import asyncio
from functools import partial

from aiohttp import web
from aiohttp.test_utils import TestServer

from leyden.libs.contracts.conversation import Json
from leyden.libs.kubernetes.installed import silent, unready


def workload(name: str, wanted: int, **status: int) -> Json:
    return {"metadata": {"name": name}, "spec": {"replicas": wanted}, "status": status}


def test_workloads_without_all_their_pods_are_named_with_both_numbers() -> None:
    found = [workload("api", 2, readyReplicas=2), workload("runner", 3, readyReplicas=1), workload("gateway", 2)]
    assert list(unready([*found, workload("credit", 0)])) == [
        "runner: 1 of 3 pods are ready",
        "gateway: 0 of 2 pods are ready",
    ]


async def test_engines_that_sample_no_token_are_named_with_the_cause() -> None:
    statuses = iter((200, 503))

    async def generate(request: web.Request) -> web.Response:
        assert request.headers["authorization"] == "Bearer key"
        return web.json_response({}, status=next(statuses))

    app = web.Application()
    app.router.add_post("/generate", generate)
    async with TestServer(app, host="127.0.0.1") as server:
        assert server.port is not None
        ask = partial(silent, ["127.0.0.1"], server.port, "key")
        good, bad = [await asyncio.to_thread(lambda: list(ask())) for _ in range(2)]
    assert good == []
    [found] = bad
    assert found.startswith("127.0.0.1: the engine at 127.0.0.1 samples no token: HTTPStatusError: ")
    [gone] = silent(["engine.invalid"], 1, None)
    assert gone.startswith("engine.invalid: no engine: ")
