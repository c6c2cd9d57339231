"""The TypeScript of the how-to for external agents, run by Node."""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from leyden import Client
from leyden.libs.store.database import Database
from tests.contract.api.test_attempts import external_document
from tests.contract.client.test_attempts import COMPLETE, ends, leyden
from tests.fakes.served import served
from tests.support import builders
from tests.support.shared import ROOT

__all__ = ["leyden"]

NODE = shutil.which("node", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
PAGE = ROOT / "docs" / "how-to" / "external-agents.md"
ANSWER = """
async function answer(model: OpenAI, task: { question: string }) {
  const messages = [{ role: "user", content: task.question }];
  const said = await model.chat.completions.create({ model: "any", messages });
  return said.choices[0].message.content;
}
"""
"""The function that the page leaves to its reader."""
PACKAGE = ROOT / ".cache" / "console" / "node_modules" / "openai"
"""OpenAI's own, among the console's packages."""


@pytest.fixture
def keys() -> list[str]:
    """The keys with which the model was asked."""
    return []


@pytest.fixture
def endpoints(postgres_dsn: str, keys: list[str]) -> Iterator[str]:
    """A model that answers the first attempt, and fails the second one, as whose run ends."""

    def complete(request: Request) -> Response:
        keys.append(request.headers["authorization"])
        if len(keys) == 1:
            return JSONResponse({"choices": [{"message": {"role": "assistant", "content": "4"}}]})
        with psycopg.connect(postgres_dsn, autocommit=True) as connection:
            connection.execute(COMPLETE, [connection.execute("SELECT id FROM runs").fetchone()[0]])  # type: ignore[index]
        return Response(status_code=400)

    with served(Starlette(routes=[Route("/v1/chat/completions", complete, methods=["POST"])])) as url:
        yield url


def run_with_two_tasks(dsn: str) -> str:
    async def add() -> str:
        database = Database(dsn)
        try:
            dataset = await builders.add_dataset(database, [{"question": "2+2", "answer": "4"}], name="sums")
            run = await builders.add_run(database, config=external_document(), dataset_id=dataset.id)
            await builders.add_group(database, run, size=2)
            return run.id
        finally:
            await database.close()

    return asyncio.run(add())


def run_program(folder: Path, variables: dict[str, str]) -> None:
    """Runs the page's program, which ends without a word."""
    assert NODE is not None
    [program] = re.findall(r"^```typescript\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (folder / "agent.mts").write_text(program + ANSWER)
    assert PACKAGE.exists(), f"{PACKAGE} is missing: run `make setup`"
    (folder / "node_modules").mkdir()
    (folder / "node_modules" / "openai").symlink_to(PACKAGE)
    command = [NODE, "--experimental-strip-types", "--disable-warning=ExperimentalWarning", "agent.mts"]
    environment = {"PATH": os.environ["PATH"], **variables}
    ended = subprocess.run(
        command, cwd=folder, env=environment, check=False, capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.skipif(NODE is None, reason="there is no Node.js")
def test_the_how_tos_program_plays_attempts_until_the_run_has_ended(
    leyden: Client, postgres_dsn: str, keys: list[str], tmp_path: Path
) -> None:
    connection = leyden._http._client
    variables = {
        "LEYDEN_URL": f"{connection.base_url}".rstrip("/"),
        "LEYDEN_TOKEN": connection.headers["authorization"].removeprefix("Bearer "),
        "RUN": run_with_two_tasks(postgres_dsn),
    }
    run_program(tmp_path, variables)
    assert ends(postgres_dsn) == [
        ("succeeded", 1.0, "4", None),
        ("agent_error", None, "", "Error: 400 status code (no body)"),
    ]
    assert len(set(keys)) == 2


class Restarting(http.server.ThreadingHTTPServer):
    """An API that is away for the first request of each kind, and a model that answers after a heartbeat was lost."""

    daemon_threads = True

    def __init__(self) -> None:
        self.paths, self.ends, self.lost = list[str](), list[object](), threading.Event()
        super().__init__(("127.0.0.1", 0), RestartingAnswers)


class RestartingAnswers(http.server.BaseHTTPRequestHandler):
    server: Restarting

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        kind = self.path.rpartition("/")[2]
        self.server.paths.append(kind)
        is_first = self.server.paths.count(kind) == 1
        if kind == "completions":
            assert self.server.lost.wait(60)
            self.answer(200, {"choices": [{"message": {"role": "assistant", "content": "4"}}]})
        elif is_first and kind == "attempts":
            self.answer(503, {"detail": "the database is away"})
        elif is_first:
            # The connection breaks without an answer.
            self.close_connection = True
            self.server.lost.set()
        elif kind == "attempts" and self.server.ends:
            self.answer(409, {"cause": "run_ended"})
        elif kind == "attempts":
            model = f"http://127.0.0.1:{self.server.server_port}/v1"
            task = {"question": "2+2", "answer": "4"}
            self.answer(200, {"id": "a", "lease_seconds": 1, "task": task, "base_url": model, "api_key": "k"})
        else:
            self.server.ends += [body] if kind == "end" else []
            self.answer(200, {})

    def answer(self, status: int, document: object) -> None:
        content = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None: ...


@pytest.mark.skipif(NODE is None, reason="there is no Node.js")
def test_the_how_tos_program_goes_on_while_the_api_restarts(tmp_path: Path) -> None:
    with Restarting() as api:
        thread = threading.Thread(target=api.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{api.server_port}"
            run_program(tmp_path, {"LEYDEN_URL": url, "LEYDEN_TOKEN": "t", "RUN": "r"})
        finally:
            api.shutdown()
            thread.join()
    assert api.ends == [{"outcome": "succeeded", "output": "4", "reward": 1}]
    assert {kind for kind in api.paths if api.paths.count(kind) > 1} >= {"attempts", "end"}
