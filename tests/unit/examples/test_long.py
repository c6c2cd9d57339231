"""The long agent: its arms, and its documents by each way of credit."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

import pytest

from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.judgements import judge
from tests.campaigns.experiments.choices import Choices
from tests.campaigns.experiments.long import AGENT, CREDITS, Long

ASKED: list[list[dict[str, str]]] = []


class Model(BaseHTTPRequestHandler):
    """Says an a, then a b, and so on."""

    def do_POST(self) -> None:
        messages = json.loads(self.rfile.read(int(self.headers["content-length"])))["messages"]
        ASKED.append(messages)
        message = {"role": "assistant", "content": chr(ord("a") + len(messages) // 2)}
        body = json.dumps({"choices": [{"index": 0, "message": message}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Be silent."""


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Model) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def test_the_first_of_twenty_replies_decides_and_each_prompt_extends_the_last(url: str) -> None:
    ASKED.clear()
    variables = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "any", "LEYDEN_TASK": '{"question": "7: which arm?"}'}
    command = [sys.executable, str(AGENT / "agent.py")]
    run = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == {"arm": str(ord("a") % 4)}
    assert [len(messages) for messages in ASKED] == list(range(1, 40, 2))
    assert all(later[: len(earlier)] == earlier for earlier, later in pairwise(ASKED))


@pytest.mark.parametrize("credit", list(CREDITS))
def test_documents_of_each_way_of_credit_are_valid(credit: str) -> None:
    document: dict[str, Any] = Long().document(3, Choices(steps=2, credit=credit))
    run = RunConfig.model_validate(document)
    assert judge(run) == []
    assert (run.credit.baseline.type == "value") == (credit == "value")
    assert (run.training.steps, run.sampling.seed, run.evaluation and run.evaluation.max_tasks) == (2, 3, 40)
