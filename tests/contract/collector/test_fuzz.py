"""The collector's public and internal endpoints answer any request as documented, and never with a 500."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import schemathesis
from google.rpc.status_pb2 import Status
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from schemathesis import GenerationMode

from leyden.libs.capability import KeyRing, sign, write_keys
from leyden.libs.contracts.capability import Capability, Scope
from leyden.libs.service import Checks, create_internal_app
from leyden.libs.store.database import Database
from leyden.services.collector.app import create_collector
from leyden.services.collector.routes import INVALID_ARGUMENT, PROTOBUF
from leyden.services.collector.settings import Settings
from tests.fakes.collector_document import openapi_document
from tests.fakes.fuzzing import bounded, check, operations, schema_of
from tests.fakes.served import served
from tests.support.builders import add_attempt, add_group, add_run
from tests.unit.collector.test_parsers import REQUESTS, protobuf

SCHEMA = schema_of(openapi_document())


def _logs(name: str) -> bytes:
    request = ExportLogsServiceRequest()
    request.resource_logs.add().scope_logs.add().log_records.add().event_name = name
    return request.SerializeToString()


NAMES = st.sampled_from(["gen_ai.evaluation.result", "other"])
schemathesis.openapi.media_type(PROTOBUF, REQUESTS.map(protobuf) | NAMES.map(_logs) | st.binary(max_size=200))


async def _rollout(dsn: str) -> tuple[str, str]:
    database = Database(dsn)
    run = await add_run(database)
    _, [rollout, *_] = await add_group(database, run)
    await add_attempt(database, rollout)
    await database.close()
    return run.id, rollout.id


@pytest.fixture(scope="module")
def door(postgres_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, str]]:
    """Address, rollout and key of a collector."""
    dsn, keys = postgres_server.create(), tmp_path_factory.mktemp("collector") / "keys.json"
    write_keys(keys)
    run, rollout = asyncio.run(_rollout(dsn))
    capability = Capability(
        run_id=run, rollout_id=rollout, attempt=1, scopes=frozenset(Scope), expires_at=int(time.time()) + 86_400
    )
    with served(create_collector(Settings(database_url=dsn, capability_keys_file=keys))) as url:
        yield url, rollout, sign(KeyRing(keys), capability)
    postgres_server.drop(dsn)


@pytest.mark.parametrize("operation", operations(SCHEMA), ids=lambda found: found.label)
def test_every_endpoint_conforms_to_its_openapi_document(operation: Any, door: tuple[str, str, str]) -> None:
    url, rollout, key = door
    # OTLP has unknown fields passed over, for exporters are newer than collectors, and its own types are protobuf's.
    but = () if operation.path.endswith("/reward") else ("negative_data_rejection",)

    @bounded(30)
    @given(st.data())
    def send(data: st.DataObject) -> None:
        case = data.draw(operation.as_strategy(generation_mode=data.draw(st.sampled_from(list(GenerationMode)))))
        if data.draw(st.integers(0, 4)):
            case.path_parameters.update(rollout_id=rollout, attempt="1")
        answer = check(case, url, {"authorization": f"Bearer {key}"}, but=but)
        if answer.headers["content-type"][0] == PROTOBUF:
            assert (ExportTraceServiceResponse if answer.status_code == 200 else Status).FromString(answer.content)

    send()


@pytest.mark.parametrize("attempt", ["01", "+1", "%201", "1_0", "%D9%A1", "1.0", "-1", "9" * 10, "9" * 5000, "one"])
def test_an_attempt_has_one_spelling(door: tuple[str, str, str], attempt: str) -> None:
    url, rollout, key = door
    with httpx.Client(base_url=f"{url}/r/{rollout}", headers={"authorization": f"Bearer {key}"}) as http:
        bodies: dict[str, dict[str, Any]] = {"reward": {"value": 1}, "v1/traces": {}, "v1/logs": {}}
        answers = {path: http.post(f"/{attempt}/{path}", json=body) for path, body in bodies.items()}
    assert {path: answer.status_code for path, answer in answers.items()} == dict.fromkeys(bodies, 422)
    assert answers["v1/traces"].json()["code"] == answers["v1/logs"].json()["code"] == INVALID_ARGUMENT


async def _fails() -> None:
    raise RuntimeError("a dependency is away\nand says so in two lines")


@pytest.mark.parametrize("ready", [True, False])
def test_the_internal_port_answers_its_three_questions_and_refuses_the_rest(ready: bool) -> None:
    checks = Checks()
    if not ready:
        checks.add("dependency", _fails)
    known = {"/healthz": 200, "/readyz": 200 if ready else 503, "/metrics": 200}
    with served(create_internal_app(checks)) as url, httpx.Client(base_url=url) as http:

        @bounded(30)
        @given(
            st.sampled_from(["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]),
            st.sampled_from([*known, "/", "/healthz/", "/docs", "/openapi.json"]) | st.text(max_size=20).map(_path),
            st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
            st.binary(max_size=50),
        )
        def ask(method: str, path: str, query: dict[str, str], body: bytes) -> None:
            answer = http.request(method, path, params=query, content=body)
            wanted = 404 if path not in known else known[path] if method == "GET" else 405
            assert answer.status_code == wanted, (method, path)
            if wanted in (404, 405):
                assert answer.headers["content-type"] == "application/problem+json"
                assert answer.json()["status"] == wanted

        ask()


def _path(text: str) -> str:
    return "/" + quote(text.encode("utf-8", "replace"), safe="")
