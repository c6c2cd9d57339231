"""Files that agents leave: stored once with the outcome, whoever dies, and read by graders, the API and the CLI."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select, update
from typer.testing import CliRunner

from leyden.libs.cli.__main__ import app
from leyden.libs.faults import FaultInjector
from leyden.libs.store import tables
from leyden.libs.store.runs.retention import prune_run
from tests.contract.grader.test_code_worker import of_code
from tests.contract.grader.test_worker import grading, rewards, settled
from tests.contract.runner.test_attempts import Bench, stopped
from tests.support.builders import end_run

HOW_TO = Path(__file__).parents[3] / "docs" / "how-to" / "rewards.md"
WRITES = """
import os
os.makedirs("notes/day one")
open("solution.py", "w").write("def add(a, b): return a + b")
open("notes/day one/é.txt", "wb").write(b"\\x00\\xff")
os.symlink("/etc/passwd", "notes/passwd")
open("scratch", "w").write("not named")
print('{"reward": 1}')
"""
LISTED = """
import json, os
def listed(task, rollout):
    found = [rollout["artifacts"], os.listdir(os.environ["LEYDEN_ARTIFACTS"])]
    return {"reward": 0, "explanation": json.dumps(found)}
"""
AGENT = {"artifacts": ["solution.py", "notes/**"]}
LEFT = [("notes/day one/é.txt", 2, b"\x00\xff"), ("solution.py", 27, b"def add(a, b): return a + b")]


@pytest.fixture
async def bench(database: Any, redis_url: str, tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(database, redis_url, tmp_path)
    yield made
    await made.close()


async def stored(bench: Bench) -> Sequence[tables.Artifact]:
    async with bench.database.read() as session:
        return (await session.scalars(select(tables.Artifact).order_by(tables.Artifact.path))).all()


async def test_the_named_files_are_stored_with_the_outcome(bench: Bench) -> None:
    async with stopped(await bench.start()):
        [rollout] = await bench.enqueue(WRITES, agent=AGENT)
        outcome = await bench.outcome(rollout)
        [failing] = await bench.enqueue(WRITES + "\nraise SystemExit(3)", agent=AGENT)
        assert (await bench.outcome(failing)).kind == "agent_error"
        [other] = await bench.enqueue(WRITES)
        assert (await bench.outcome(other)).artifacts_left_out == 0
    assert (outcome.kind, outcome.artifacts_left_out) == ("succeeded", 1)
    found = await stored(bench)
    for one in (rollout, failing):
        own = [(row.path, row.size_bytes, row.content) for row in found if row.rollout_id == one.id]
        assert own == LEFT
    assert len(found) == 4


async def test_a_path_longer_than_an_index_holds_does_not_cost_the_outcome(bench: Bench) -> None:
    """An agent could otherwise throw away an attempt that went badly."""
    long = """
import os, random
random.seed(1)
for _ in range(12):
    os.mkdir(name := "".join(chr(0x4E00 + random.randrange(20000)) for _ in range(80)))
    os.chdir(name)
open("a", "w").write("x")
"""
    async with stopped(await bench.start()):
        [rollout] = await bench.enqueue(WRITES + long, agent={"artifacts": ["**"]})
        outcome = await bench.outcome(rollout)
    assert (outcome.kind, outcome.artifacts_left_out) == ("succeeded", 2)
    assert [row.path for row in await stored(bench)] == ["notes/day one/é.txt", "scratch", "solution.py"]


@pytest.mark.parametrize("point", ["runner.ended", "runner.attempt_ended", "runner.settled"])
async def test_a_killed_runner_stores_files_once_and_with_an_outcome(bench: Bench, point: str) -> None:
    injector = FaultInjector(bench.folder / "faults")
    injector.arm(point)
    killed = await bench.start(**injector.environment)
    [rollout] = await bench.enqueue(WRITES, agent=AGENT)
    assert await killed.wait() == -signal.SIGKILL
    attempt = 1 if point == "runner.settled" else 2
    assert [one.attempt for one in await stored(bench)] == ([1, 1] if attempt == 1 else [])
    if attempt == 2:
        async with stopped(await bench.start()):
            assert (await bench.second_outcome(rollout)).kind == "succeeded"
    found = [(one.attempt, one.path, one.size_bytes, one.content) for one in await stored(bench)]
    assert found == [(attempt, *one) for one in LEFT]


async def test_the_how_tos_grader_runs_the_function_that_an_agent_left(
    bench: Bench, api_http: httpx.AsyncClient
) -> None:
    """Four siblings: a right one, one that is right once, one that forges the verdict and dies last, and none."""
    cases_py = re.findall(r"```python\n(.*?)```", HOW_TO.read_text(), re.DOTALL)[3]
    folder = bench.folder / "graders" / "functions"
    folder.mkdir(parents=True)
    (folder / "cases.py").write_text(cases_py)
    (folder / "listed.py").write_text(LISTED)
    listed = {"type": "python", "function": "listed.py:listed", "directory": str(folder)}
    command = {"type": "command", "command": ["{python}", "cases.py"], "directory": str(folder)}
    forged = """
import json, os, sys
for path in ("reward.json", "../reward.json"):
    try: open(path, "w").write("1")
    except OSError: pass
print(1)
def add(a, b): return "9"
"""
    solutions = ["def add(a, b): return a + b", "def add(a, b): return 3", forged, None]
    code = f"""
import os
solution = {solutions!r}[int(os.environ["LEYDEN_ROLLOUT_ID"].rpartition(".")[2])]
if solution is not None:
    open("solution.py", "w").write(solution)
print("done")
"""
    cases = [{"arguments": [1, 2], "result": 3}, {"arguments": [2, 2], "result": 4}]
    async with stopped(await bench.start()):
        rollouts = await bench.enqueue(
            code,
            size=4,
            agent={"artifacts": ["solution.py"]},
            task={"text": "Write add.", "function": "add", "cases": cases},
            reward={
                "missing": "zero",
                "components": [
                    {"name": "tests", "grader": command},
                    {"name": "listed", "weight": 0.0, "grader": listed},
                ],
            },
        )
        outcomes = [await bench.outcome(one) for one in rollouts]
    assert [(one.kind, one.detail) for one in outcomes] == [("succeeded", None)] * 4
    async with bench.database.session() as session:
        await session.execute(update(tables.Rollout).values(grading_attempt=1))
        run = await session.get_one(tables.Run, rollouts[0].run_id)
    async with grading(bench.database, bench.redis_url, **of_code(bench.folder)):
        found = await settled(bench.database, run, 4)
    assert [one.total for one in found] == [1.0, 0.5, 0.0, 0.0]
    explained = [one.explanation for one in await rewards(bench.database, run)]
    assert explained[::2] == ["2 of 2 cases", "1 of 2 cases", "0 of 2 cases", "0 of 2 cases"]
    assert json.loads(explained[1]) == [[{"path": "solution.py", "size_bytes": 27, "cut": False}], ["solution.py"]]
    assert json.loads(explained[7]) == [[], []]
    detail = (await api_http.get(f"/v1/rollouts/{rollouts[0].id}")).json()
    assert detail["attempts"][0]["outcome"]["artifacts"] == [
        {"path": "solution.py", "size_bytes": 27, "stored_bytes": 27}
    ]


async def test_people_see_and_download_the_files(bench: Bench, api_http: httpx.AsyncClient, api_url: str) -> None:
    async with stopped(await bench.start()):
        [rollout] = await bench.enqueue(WRITES, agent=AGENT)
        await bench.outcome(rollout)
    path = f"/v1/rollouts/{rollout.id}/artifacts"
    answer = await api_http.get(f"{path}/notes/day one/é.txt")
    assert (answer.status_code, answer.content) == (200, b"\x00\xff")
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["content-disposition"] == "attachment"
    assert answer.headers["x-content-type-options"] == "nosniff"
    for wrong in ("scratch", "notes/passwd", "../solution.py", "solution.py?attempt=2"):
        assert (await api_http.get(f"{path}/{wrong}")).status_code == 404, wrong

    words = ["--home", str(bench.folder), "--url", api_url, "--token", "secret-of-tests", "rollout"]

    def said(*more: str) -> str:
        result = CliRunner().invoke(app, [*words, *more], env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        return result.output

    shown = said("show", rollout.id, "--attempt", "1")
    assert re.search(r"file solution\.py +27 bytes", shown) and "1 more are not kept" in shown
    listed = json.loads(said("files", rollout.id, "--to", str(bench.folder / "left"), "--json"))
    assert [one["path"] for one in listed] == [path for path, _, _ in LEFT]
    assert [(bench.folder / "left" / path).read_bytes() for path, _, _ in LEFT] == [content for *_, content in LEFT]
    assert CliRunner().invoke(app, [*words, "files", rollout.id, "--to", str(bench.folder / "left")]).exit_code == 2


async def test_pruning_a_run_removes_its_files(bench: Bench) -> None:
    async with stopped(await bench.start()):
        [rollout] = await bench.enqueue(WRITES, agent=AGENT)
        await bench.outcome(rollout)
    async with bench.database.session() as session:
        await session.execute(
            update(tables.Rollout).values(state="finished", attempt=1, reason="succeeded", finished_at=func.now())
        )
        run = await session.get_one(tables.Run, rollout.run_id)
    await end_run(bench.database, run)
    await prune_run(bench.database, rollout.run_id)
    assert await stored(bench) == []
