"""The TypeScript of the how-to for external agents, run by Node."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
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


@pytest.mark.skipif(NODE is None, reason="there is no Node.js")
def test_the_how_tos_program_plays_attempts_until_the_run_has_ended(
    leyden: Client, postgres_dsn: str, keys: list[str], tmp_path: Path
) -> None:
    assert NODE is not None
    [program] = re.findall(r"^```typescript\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "agent.mts").write_text(program + ANSWER)
    assert PACKAGE.exists(), f"{PACKAGE} is missing: run `make setup`"
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules" / "openai").symlink_to(PACKAGE)
    http = leyden._http._client
    variables = {
        "PATH": os.environ["PATH"],
        "LEYDEN_URL": f"{http.base_url}".rstrip("/"),
        "LEYDEN_TOKEN": http.headers["authorization"].removeprefix("Bearer "),
        "RUN": run_with_two_tasks(postgres_dsn),
    }
    command = [NODE, "--experimental-strip-types", "--disable-warning=ExperimentalWarning", "agent.mts"]
    ended = subprocess.run(
        command, cwd=tmp_path, env=variables, check=False, capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert ends(postgres_dsn) == [
        ("succeeded", 1.0, "4", None),
        ("agent_error", None, "", "Error: 400 status code (no body)"),
    ]
    assert len(set(keys)) == 2
