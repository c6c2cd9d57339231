"""The typed client against the real API on a real port."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from leyden.libs.client import Client, Conflict, Forbidden, NotFound, Refused, Unauthorised, Unreachable
from leyden.libs.client.errors import error_of
from leyden.libs.contracts.api.runs import EvaluationRequest
from leyden.libs.contracts.api.tokens import ApiScope
from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.recipes import RECIPES
from tests.fakes.served_api import TOKEN
from tests.support.builders import run_document
from tests.support.shared import refusing_port


@pytest.fixture
def leyden(api_url: str) -> Iterator[Client]:
    with Client(api_url, TOKEN, patience_seconds=0.0) as client:
        yield client


def test_the_client_creates_pauses_and_cancels_a_run(leyden: Client, tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text('{"question": 1}\n{"question": 2}\n')
    dataset = leyden.upload_dataset("questions", file)
    assert leyden.upload_dataset("questions", [{"question": 1}, {"question": 2}]) == dataset
    assert [task.payload["question"] for task in leyden.tasks("questions")] == [1, 2]
    made = leyden.create_run(RunConfig.model_validate(run_document(name="first")), key="k")
    assert leyden.create_run(run_document(name="first"), key="k") == made
    assert leyden.find_run("first") == made
    found = leyden.find_run(made.id)
    next_step = found.progress.next_step
    assert next_step is not None and (next_step.number, next_step.ended) == (1, 0)
    assert found == made.model_copy(update={"progress": made.progress.model_copy(update={"next_step": next_step})})
    assert leyden.pause_run(made.id).intent == "paused"
    assert leyden.resume_run(made.id).intent == "running"
    evaluation = leyden.evaluate_run(made.id, EvaluationRequest(policy_version=0, dataset="questions"))
    assert list(leyden.evaluations(made.id)) == [leyden.evaluation(made.id, 1)] == [evaluation]
    assert leyden.cancel_run(made.id).allowed_actions == []
    assert [list(leyden.steps(made.id)), list(leyden.policies(made.id)), list(leyden.rollouts(run=made.id))] == [[]] * 3
    assert leyden.metrics(made.id).names == []
    assert leyden.health().schema_revision


def test_lists_iterate_over_all_pages(leyden: Client) -> None:
    leyden.upload_dataset("many", ({"number": number} for number in range(450)))
    assert [task.number for task in leyden.tasks("many")] == list(range(450))


def test_every_list_of_the_client_exists_in_the_api(leyden: Client) -> None:
    leyden.upload_dataset("questions", b'{"a": 1}')
    run = leyden.create_run(run_document())
    issued = leyden.create_token("ci", [ApiScope.READ])
    assert [token.id for token in leyden.tokens()] == [issued.id]
    assert [(pool.name, pool.engines) for pool in leyden.pools()] == [("default", [])]
    assert {recipe.name: recipe.document for recipe in leyden.recipes()} == {
        name: recipe.document for name, recipe in RECIPES.items()
    }
    empty = [leyden.engines(), leyden.rollouts(run=run.id), leyden.samples(run.id), leyden.steps(run.id)]
    empty += [leyden.policies(run.id), leyden.evaluations(run.id)]
    assert [list(found) for found in empty] == [[]] * len(empty)
    assert [[found.name for found in found] for found in (leyden.datasets(), leyden.runs())] == [
        ["questions"],
        [run.name],
    ]


def test_each_refusal_is_an_exception_of_its_own_with_the_problem(leyden: Client, api_url: str) -> None:
    leyden.upload_dataset("questions", b'{"a": 1}')
    run = leyden.create_run(run_document())
    leyden.cancel_run(run.id)
    with pytest.raises(NotFound, match="list runs"):
        leyden.find_run("nobody")
    with pytest.raises(Conflict) as conflict:
        leyden.pause_run(run.id)
    with pytest.raises(Refused) as refused:
        leyden.create_run({**run_document(), "algoritm": {}})
    assert conflict.value.problem is not None
    assert conflict.value.problem.allowed_actions == []
    assert refused.value.problem is not None
    assert [error.path for error in refused.value.problem.errors] == ["algoritm"]
    reader = leyden.create_token("reader", [ApiScope.READ])
    with Client(api_url, reader.token, patience_seconds=0.0) as limited, pytest.raises(Forbidden):
        limited.create_run(run_document())
    leyden.revoke_token(reader.id)
    with Client(api_url, reader.token, patience_seconds=0.0) as revoked, pytest.raises(Unauthorised):
        next(revoked.runs())


def test_an_unreachable_api_is_reported_with_the_start_command() -> None:
    with (
        refusing_port() as port,
        Client(f"http://127.0.0.1:{port}", patience_seconds=0.0) as client,
        pytest.raises(Unreachable, match="leyden up"),
    ):
        client.health()


@pytest.mark.parametrize("address", ["localhost:8000", "127.0.0.1:8000", "http://localhost:port", "http://", ""])
def test_an_address_that_is_none_is_refused_with_one_that_is(address: str) -> None:
    with pytest.raises(Refused, match=r"write http://HOST:PORT"):
        Client(address)


def test_an_answer_of_another_server_names_the_address() -> None:
    request = httpx.Request("GET", "http://gateway:8001/v1/runs")
    answers = [httpx.Response(404, text='{"error": {}}', request=request), httpx.Response(502, request=request)]
    for answer in answers:
        said = str(error_of(answer))
        assert "http://gateway:8001/v1/runs" in said and "--url" in said and str(answer.status_code) in said


@pytest.mark.parametrize("status", [502, 503, 504])
def test_an_api_behind_a_proxy_is_away_where_the_proxy_says_so(status: int) -> None:
    answer = httpx.Response(status, text="<html>", request=httpx.Request("GET", "http://proxy/v1/runs"))
    assert isinstance(error_of(answer), Unreachable)


def test_a_create_is_retried_with_its_key_while_the_platform_is_down() -> None:
    keys: list[str | None] = []

    class Flaky(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            keys.append(self.headers.get("idempotency-key"))
            self.rfile.read(int(self.headers["content-length"]))
            status = 503 if len(keys) < 3 else 404
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Flaky) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            address = f"http://127.0.0.1:{server.server_port}"
            with Client(address, patience_seconds=20.0) as client, pytest.raises(NotFound):
                client.create_run(run_document())
        finally:
            server.shutdown()
            thread.join()
    assert len(keys) == 3
    assert keys[0]
    assert set(keys) == {keys[0]}
