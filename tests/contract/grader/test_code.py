"""Graders of the operator's own code as real processes: each bad one fails with an explanation, and leaves nothing."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from leyden.libs.contracts.config import Component
from leyden.libs.contracts.config.graders import Command, PythonFunction
from leyden.libs.contracts.states import ComponentState
from leyden.libs.grading.pool import Graded
from leyden.services.grader.code import Code
from leyden.services.grader.settings import Settings

HOW_TO = Path(__file__).parents[3] / "docs" / "how-to" / "rewards.md"
DOCUMENT = {
    "task": {"answer": "Eiffel Tower"},
    "rollout": {"output": "x", "answer": {"answer": "Tower"}, "conversations": [{"turns": [{"content": "Café"}]}]},
}
FUNCTIONS = """
import os, sys, subprocess, time
import beside

def right(task, rollout):
    print("0.25")
    return rollout["answer"]["answer"] in task["answer"]

def explained(task, rollout):
    return {"reward": 0.5, "explanation": rollout["conversations"][0]["turns"][0]["content"], "extracted": beside.WORD}

def none(task, rollout):
    return None

def nan(task, rollout):
    return float("nan")

def text(task, rollout):
    return "good"

def raises(task, rollout):
    raise KeyError("colour")

def leaves(task, rollout):
    sys.exit(0)

def parent(task, rollout):
    os.kill(os.getppid(), 9)
    return 1.0
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "graders" / "mine"
    made.mkdir(parents=True)
    (made / "grade.py").write_text(FUNCTIONS)
    (made / "beside.py").write_text("WORD = 'Tower'")
    # Left there by a trial of the author's.
    (made / "reward.json").write_text("1.0")
    return made


@pytest.fixture
async def code(tmp_path: Path, folder: Path) -> AsyncIterator[Code]:
    # Children of the tests' own process are spared.
    opened = Code(settings(tmp_path), lambda: [one.pid for one in psutil.Process().children()])
    yield opened
    await opened.close()
    assert list((tmp_path / "work").glob("grader-*")) == []
    assert not [one for one in psutil.process_iter(["environ"]) if str(tmp_path) in str(one.info["environ"])]


def settings(tmp_path: Path, **changes: Any) -> Settings:
    return Settings(code_roots=(tmp_path / "graders",), work_folder=tmp_path / "work", code_user="same", **changes)


def grader(**fields: Any) -> PythonFunction | Command:
    found = Component.model_validate({"name": "mine", "grader": fields}).grader
    assert isinstance(found, PythonFunction | Command)
    return found


async def graded(code: Code, **fields: Any) -> Graded:
    async with asyncio.timeout(60):
        return await code.grade(grader(**fields), "run-1.0.0.1", DOCUMENT)


async def of_function(code: Code, folder: Path, name: str, **fields: Any) -> Graded:
    return await graded(code, type="python", function=f"grade.py:{name}", directory=str(folder), **fields)


async def of_script(code: Code, script: str, **fields: Any) -> Graded:
    return await graded(code, type="command", command=["{python}", "-I", "-S", "-c", script], **fields)


async def test_a_function_gets_task_and_rollout_and_its_prints_count_for_nothing(code: Code, folder: Path) -> None:
    found = await of_function(code, folder, "right")
    assert (found.grade.state, found.grade.value, found.crashed) == (ComponentState.SCORED, 1.0, False)
    found = await of_function(code, folder, "explained")
    assert (found.grade.value, found.grade.extracted, found.grade.explanation) == (0.5, "Tower", "Café")
    found = await of_function(code, folder, "none")
    assert (found.grade.state, found.grade.value) == (ComponentState.NOT_APPLICABLE, None)
    found = await graded(code, type="python", function="grade:right", directory=str(folder))
    assert found.grade.value == 1.0


async def test_a_command_reads_the_document_and_writes_a_last_line_or_a_file(code: Code) -> None:
    read = (
        "import json, sys, os\nd = json.load(sys.stdin)\nassert d == json.load(open(os.environ['LEYDEN_GRADING_FILE']))"
    )
    read += "\n"
    assert (await of_script(code, read + "print('words'); print(len(d['task']['answer']), end='')")).grade.value == 12
    found = await of_script(code, read + "print(1)\nopen('reward.json', 'w').write('{\"reward\": -0.5}')")
    assert (found.grade.state, found.grade.value) == (ComponentState.SCORED, -0.5)
    assert (await of_script(code, "print('null')")).grade.state is ComponentState.NOT_APPLICABLE


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("nan", "reward.json has the reward nan"),
        ("text", "it exited with 1: "),
        ("raises", "KeyError: 'colour'"),
        ("leaves", "it wrote no reward: there is no reward.json"),
        ("missing", "has no attribute 'missing'"),
    ],
)
async def test_a_bad_function_has_failed_with_the_cause(code: Code, folder: Path, name: str, cause: str) -> None:
    assert_failed(await of_function(code, folder, name), cause)


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        ("", "it wrote no reward: there is no reward.json, and its output is empty"),
        ("print(0.5); raise SystemExit(1)", "it exited with 1"),
        ("import os; os.kill(os.getpid(), 11)", "it was ended by signal 11"),
        ("print('NaN')", "its last line has the reward nan"),
        ("print('Infinity')", "its last line has the reward inf"),
        ("print('1e7')", "which is not within ±1e+06"),
        ("print('good')", "its last line is no JSON: 'good'"),
        ("print('true')", "its last line is 'true': write a number, null"),
        ("print('[1]')", "its last line is '[1]': write a number, null"),
        ("print('\"1\"')", "write a number, null"),
        ("print('{}')", "its last line is '{}': write a number, null"),
        ('print(\'{"reward": 1, "score": 2}\')', "write a number, null"),
        ("print('[' * 50000)", "its last line is no JSON"),
        ("open('reward.json', 'w').write('1' * 100000)", "reward.json has more than 65536 bytes"),
        ("import os; os.symlink('/etc/passwd', 'reward.json')", "reward.json is no regular file"),
        ("import os; os.mkfifo('reward.json')", "reward.json is no regular file"),
        ("import os; os.mkdir('reward.json')", "reward.json is no regular file"),
        ("print(1)\nwhile True: pass", "it took longer than 0.5 s (timeout_seconds)"),
        (
            "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint(1, flush=True)\ntime.sleep(90)",
            "it took longer",
        ),
        (
            "x = bytearray(2**28)\nimport time\ntime.sleep(60)",
            "the grader used more memory than allowed (memory_bytes)",
        ),
        ("import socket; socket.socket()", "PermissionError: [Errno 13]"),
    ],
)
async def test_a_bad_command_has_failed_with_the_cause(code: Code, script: str, cause: str) -> None:
    limits = {"timeout_seconds": 0.5} if "took longer" in cause else {}
    assert_failed(await of_script(code, script, memory_bytes=2**26, **limits), cause)


async def test_a_gigabyte_of_output_is_read_to_its_last_line(code: Code) -> None:
    flood = "import os\nfor _ in range(1024): os.write(1, b'x' * 2**20)\n"
    assert_failed(await of_script(code, flood), "its last line has more than 65536 bytes")
    assert (await of_script(code, flood + "print(); print(0.5)")).grade.value == 0.5


async def test_a_verdict_in_the_copied_folder_counts_for_nothing(code: Code, folder: Path) -> None:
    found = await graded(code, type="command", command=["true"], directory=str(folder))
    assert_failed(found, "it wrote no reward: there is no reward.json")


async def test_processes_that_fork_away_end_with_their_grader(code: Code, tmp_path: Path) -> None:
    script = f"""
import os, time
for _ in range(5):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
print(0.25)
# {tmp_path}
"""
    assert (await of_script(code, script)).grade.value == 0.25
    assert not [one for one in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(one.info["cmdline"])]


async def test_a_grader_that_kills_its_parent_fails_or_changes_nothing(code: Code, folder: Path) -> None:
    found = await of_function(code, folder, "parent")
    # From Linux 6.12 on no signal leaves the sandbox.
    assert "PermissionError" in found.grade.explanation or "ended without a report" in found.grade.explanation
    assert_failed(found, "")
    assert (await of_function(code, folder, "right")).grade.value == 1.0


async def test_the_network_is_open_where_the_document_says_so(code: Code) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}))\nprint(1)"
        assert (await of_script(code, connect, network=True)).grade.value == 1.0
        assert_failed(await of_script(code, connect), "PermissionError")
    # Pairs of sockets reach nobody else, and event loops need one.
    assert (await of_script(code, "import asyncio\nasyncio.run(asyncio.sleep(0))\nprint(1)")).grade.value == 1.0


async def test_a_grader_has_no_variable_of_the_platform(code: Code, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEYDEN_DATABASE_URL", "secret")
    script = "import os, json\nprint(json.dumps({'reward': 0, 'explanation': ' '.join(sorted(os.environ))}))"
    found = await of_script(code, script)
    assert set(found.grade.explanation.split()) <= {
        *("HOME", "LANG", "LC_CTYPE", "LEYDEN_ARTIFACTS", "LEYDEN_GRADING_FILE", "PATH", "TMPDIR")
    }


async def test_code_lies_below_the_operators_folders(code: Code, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    found = await graded(code, type="command", command=["true"], directory=str(outside))
    assert_failed(
        found, f"directory {outside.resolve()} lies in no folder of GRADER_CODE_ROOTS ({tmp_path / 'graders'})"
    )
    assert "`leyden up --graders DIR`" in found.grade.explanation
    found = await graded(code, type="command", command=["true"], directory=str(tmp_path / "nowhere"))
    assert_failed(found, "cannot be opened (No such file or directory): correct its path")


async def test_a_cancelled_grading_ends_its_program(code: Code, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    script = f"open({str(begun)!r}).read()\nimport time\ntime.sleep(600)"
    running = asyncio.create_task(of_script(code, script))
    writer = await asyncio.to_thread(begun.open, "w")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    writer.close()
    assert running.cancelled()
    assert not [one for one in psutil.process_iter(["cmdline"]) if str(begun) in str(one.info["cmdline"])]


async def test_a_service_without_processes_for_code_says_so_at_once(tmp_path: Path) -> None:
    found = await graded(Code(settings(tmp_path, code_processes=0)), type="command", command=["true"])
    assert (found.grade.state, found.crashed) == (ComponentState.FAILED, False)
    assert found.grade.explanation == "this grader runs no code of your own (GRADER_CODE_PROCESSES is 0)"


async def test_no_more_graders_run_at_once_than_the_setting_says(tmp_path: Path) -> None:
    opened = Code(settings(tmp_path, code_processes=1))
    # In a folder of its own: a sandbox creates nothing beside a hidden one.
    alone = tmp_path / "shared" / "alone"
    alone.parent.mkdir()
    script = f"import os, time\nos.mkdir({str(alone)!r})\ntime.sleep(0.05)\nos.rmdir({str(alone)!r})\nprint(1)"
    found = await asyncio.gather(*(of_script(opened, script) for _ in range(4)))
    assert [one.grade.value for one in found] == [1.0] * 4
    await opened.close()


async def test_the_examples_of_the_how_to_grade(code: Code, folder: Path) -> None:
    of_function, of_command, *_ = re.findall(r"```python\n(.*?)```", HOW_TO.read_text(), re.DOTALL)
    (folder / "grade.py").write_text(of_function)
    (folder / "tests.py").write_text(of_command)
    recipe = {"task": {"ingredients": ["Egg", "salt"]}, "rollout": {"output": "one egg"}}
    uses = grader(type="python", function="grade.py:uses", directory=str(folder))
    found = (await code.grade(uses, "run-1.0.0.1", recipe)).grade
    assert (found.value, found.explanation) == (0.5, "it names Egg")
    assert (await code.grade(uses, "run-1.0.0.1", {**recipe, "task": {}})).grade.state is ComponentState.NOT_APPLICABLE
    tests = grader(type="command", command=["{python}", "tests.py"], directory=str(folder))
    forged = "open('reward.json', 'w').write('9')\nprint(9)\ndef add(a, b): return a + b"
    cases = [{"arguments": [1, 2], "result": 3}, {"arguments": [2, 2], "result": 5}]
    exercise = {"task": {"function": "add", "cases": cases}}
    found = (await code.grade(tests, "run-1.0.0.1", {**exercise, "rollout": {"answer": {"code": forged}}})).grade
    assert (found.value, found.explanation) == (0.5, "failed: [[2, 2]]")
    leaving = (await code.grade(tests, "run-1.0.0.1", {**exercise, "rollout": {"answer": {"code": "exit(0)"}}})).grade
    assert leaving.value == 0.0
    silent = (await code.grade(tests, "run-1.0.0.1", {**exercise, "rollout": {"answer": None}})).grade
    assert (silent.state, silent.value) == (ComponentState.SCORED, 0.0)


def assert_failed(found: Graded, cause: str) -> None:
    assert cause in found.grade.explanation
    assert (found.grade.state, found.grade.value, found.crashed) == (ComponentState.FAILED, None, True)
