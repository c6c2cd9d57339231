"""Each framework's agent answers two questions through the gateway, on an engine that samples by a script.

`make test-agents` runs this file, which pytest does not find by itself: the agents' environments take gigabytes and
minutes. A framework alone: `make test-agents AGENTS=langgraph`. The results of all are `docs/frameworks.md`.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from sqlalchemy import select

from leyden.libs.contracts.conversation import parse_turn
from leyden.libs.contracts.untrainable import NOT_DELIVERED
from leyden.libs.service import serving
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.services.collector.app import create_collector
from leyden.services.collector.settings import Settings
from leyden.services.credit.air import tool_uses
from leyden.services.credit.forest import call_forest
from leyden.services.credit.records import AskedTool, Call, ToolSpan
from tests.fakes.chat_model import CHATML_WITH_TOOLS
from tests.fakes.gateway import Scene, attempt_environment, scene
from tests.frameworks import environments, results, script
from tests.frameworks.catalog import ALL_FAULTS, FRAMEWORKS, Framework
from tests.frameworks.proxy import COLLECTOR, Fault, Proxy
from tests.frameworks.training import Trained, trained
from tests.support import browser
from tests.support.shared import ROOT

AGENTS = ROOT / "tests" / "agents" / "frameworks"
SLOW_SECONDS = 3.0
"""Longer than the careless agents wait for an answer."""
GRAMMARS = {"json_schema", "structural_tag", "ebnf", "regex"}
SECONDS = 240.0
CONTEXT_LENGTH = 500_000
"""In bytes: the tokenizer has hardly more, and Claude's own prompt is long."""

pytestmark = pytest.mark.timeout(900)
WITH_REPORT = [framework for framework in FRAMEWORKS if (AGENTS / "structured" / framework.agent).exists()]
TRACED = [framework for framework in FRAMEWORKS if (AGENTS / "traced" / framework.agent).exists()]
POSTING = [framework for framework in FRAMEWORKS if framework.agent in {"langgraph_agent.py", "langchain_js.mjs"}]
"""Those with a client of LangSmith's, which posts what it traces."""
CARELESS = [framework for framework in FRAMEWORKS if (AGENTS / "careless" / framework.agent).exists()]
NEEDING = [framework for framework in FRAMEWORKS if framework.needs is not None]
each_framework = pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.name)


@pytest.fixture(scope="module", autouse=True)
def page():
    yield
    results.write_page()


@dataclass(frozen=True)
class Played:
    """What one run of an agent left: its exit status and output, the engine's answers, the recorded calls, the engine's
    parameter with the grammar of each answer, the stored spans of tools, and the tokens that credit lets train.
    """

    status: int
    output: str
    engine: Sequence[tuple[list[int], list[int]]]
    calls: Sequence[tables.ModelCall]
    grammars: Sequence[set[str]]
    spans: Sequence[tables.Span]
    trained: Trained

    def tree(self) -> list[str]:
        """The calls in order: `fresh`, or how each call continues the nearest earlier one."""
        return [self._relation(number) for number in range(len(self.engine))]

    def _relation(self, number: int) -> str:
        prompt = self.engine[number][0]
        earlier = [before + sampled for before, sampled in self.engine[:number]]
        if any(prompt[: len(tokens)] == tokens for tokens in earlier):
            return "extends"
        return "forks" if self.calls[number].parent_call_id is not None else "fresh"


@each_framework
async def test_a_task_with_parallel_tools_and_a_failing_one(tmp_path: Path, database: Database, framework: Framework):
    results.forget(framework, "task", "tokens")
    played = await play(framework, tmp_path, database)
    sampled = sorted(token for _, answer in played.engine for token in answer)
    results.add(
        framework,
        "tokens",
        {
            "version": environments.version(framework.environment, framework.package),
            "calls": len(played.calls),
            "sampled": len(sampled),
            "trained": len(played.trained.token_ids),
        },
    )
    assert played.status == 0, played.output
    assert played.trained.token_ids == sampled != []
    assert played.trained.untrainable == {}
    assert [text for text in framework.answers if text not in played.output] == []
    assert " ".join(played.tree()) == " ".join(framework.tree)
    assert recorded(played.calls) == list(played.engine)
    assert {call.status for call in played.calls} == {"completed"}
    assert {call.dialect for call in played.calls} == {framework.dialect}
    assert any(call.request.get("stream") for call in played.calls) == framework.streams
    results.add(framework, "task", True)


@pytest.mark.parametrize("framework", NEEDING, ids=lambda framework: framework.name)
async def test_without_its_setting_no_token_trains(tmp_path: Path, database: Database, framework: Framework):
    assert framework.needs is not None
    played = await play(replace(framework, needs=None), tmp_path, database)
    assert played.status == 0, played.output
    assert played.trained == Trained([], {framework.needs.reason: len(played.calls)})


@pytest.mark.parametrize("fault", sorted(ALL_FAULTS))
@each_framework
async def test_a_lost_answer_is_not_sampled_again(
    tmp_path: Path, database: Database, framework: Framework, fault: Fault
):
    results.forget(framework, fault)
    played = await play(framework, tmp_path, database, fault=fault)
    assert recorded(played.calls) == list(played.engine)
    has_repeated = fault in framework.retries
    if fault in framework.renews:
        assert played.status == 0, played.output
        assert played.tree() == ["fresh", "forks", *framework.tree[1:]]
        received = sorted(token for _, answer in played.engine[1:] for token in answer)
        assert played.trained == Trained(received, {NOT_DELIVERED: 1})
    elif has_repeated:
        assert played.status == 0, played.output
        # The row after a replayed call may name no parent (DSPy); the log of the engine shows which prompts extend.
        assert [step == "extends" for step in played.tree()] == [step == "extends" for step in framework.tree]
    else:
        assert (played.status, len(played.engine)) == (framework.status_after_fault, 1), played.output
    results.add(framework, fault, has_repeated)


@pytest.mark.parametrize("framework", WITH_REPORT, ids=lambda framework: framework.name)
async def test_an_object_of_a_schema(tmp_path: Path, database: Database, framework: Framework):
    results.forget(framework, "report")
    played = await play(framework, tmp_path, database, folder="structured")
    assert played.status == 0, played.output
    assert [json.loads(line) for line in played.output.splitlines() if line.startswith("{")] == [script.REPORT]
    assert recorded(played.calls) == list(played.engine)
    assert [len(grammar) for grammar in played.grammars] == [1]
    results.add(framework, "report", True)


@pytest.mark.parametrize("framework", TRACED, ids=lambda framework: framework.name)
async def test_each_tool_span_joins_the_call_that_asked_for_it(
    tmp_path: Path, database: Database, framework: Framework
):
    results.forget(framework, "spans")
    played = await play(framework, tmp_path, database, folder="traced", collects=True)
    results.add(framework, "spans", joins(played))


@pytest.mark.parametrize("framework", POSTING, ids=lambda framework: framework.name)
async def test_each_tool_run_that_langsmiths_client_posts_joins_the_call_that_asked_for_it(
    tmp_path: Path, database: Database, framework: Framework
):
    results.forget(framework, "posts")
    played = await play(framework, tmp_path, database, collects=True)
    results.add(framework, "posts", joins(played))


def joins(played: Played) -> list[str]:
    """The ways in which the spans of tools joined the calls that asked for them, all of which they must."""
    assert played.status == 0, played.output
    found = tool_uses([asking(call) for call in played.calls], [tool_span(span) for span in played.spans])
    uses = [(number, use) for number, call in enumerate(played.calls) for use in found.get(call.id, [])]
    # Parallel tools begin in any order.
    assert sorted((number, use.tool, f"{use.status}") for number, use in uses) == [
        (0, "get_time", "ok"),
        (0, "get_weather", "ok"),
        (2, "get_weather", "error"),
    ]
    sources = {use.source for _, use in uses}
    assert sources <= {"tool_call_id", "response_id", "time"}
    return sorted(sources)


@pytest.mark.parametrize("framework", CARELESS, ids=lambda framework: framework.name)
async def test_of_repeats_after_a_slow_answer_and_a_cut_stream_one_answer_trains(
    tmp_path: Path, database: Database, framework: Framework
):
    """The first answer comes after the client's time-out; the second is a stream that the agent cuts off and asks for
    again. Credit uses one call of each question."""
    environments.build(framework.environment)
    words = ("careless", script.QUESTION, script.FOLLOW_UP)

    async def pace(tokens: int) -> None:
        await asyncio.sleep(SLOW_SECONDS if tokens == 0 and len(stage.engine.requests) == 1 else 0.05)

    async with scene(tmp_path, database, says="It rains, lightly.", engine={"pace": pace}) as stage:
        home = tmp_path / "home"
        home.mkdir()
        variables = environment(stage, stage.gateway.url, stage.gateway.url + COLLECTOR, home)
        status, output = await run(framework, words, variables, home)
        assert status == 0, output
        calls = await stage.calls()
        async with database.read() as session:
            rows = (await session.scalars(select(tables.Delivery))).all()
    received = {row.request_id: row.delivered for row in rows}
    known = [replace(asking(call), **_record(call), delivered=received.get(call.request_id)) for call in calls]
    used = [node.call for node in call_forest(known).nodes]
    assert [len(_ids(call.prompt)) for call in used] == sorted({len(_ids(call.prompt)) for call in known})
    assert len(used) == 3


def _record(call: tables.ModelCall) -> dict[str, Any]:
    """The tokens, request and end of a call, as credit reads them."""
    return {
        "completed": call.status == "completed",
        "trainable": call.trainable,
        "prompt": call.prompt_ids,
        "sampled": call.sampled_ids,
        "logprobs": call.generator_logprobs,
        "versions": call.policy_versions,
        "request_sha256": call.request_sha256,
        "seconds": call.total_seconds or 0.0,
    }


async def play(
    framework: Framework,
    tmp_path: Path,
    database: Database,
    *,
    folder: Literal["", "structured", "traced"] = "",
    fault: Fault | None = None,
    collects: bool = False,
) -> Played:
    """Runs the agent of a folder to its end on a gateway and an engine of its own.

    Args: collects: a collector stores its telemetry
    """
    reports = folder == "structured"
    environments.build(framework.environment)

    def says(body: dict[str, Any]) -> Sequence[int]:
        text = stage.model.tokenizer.decode(body["input_ids"])
        said = script.report(text) if reports else framework.script(text)
        return script.spelled(said, lambda text: stage.model.tokenizer.encode(text).tolist())

    document = framework.needs.document() if framework.needs else None
    options: dict[str, Any] = {"run": document, "template": CHATML_WITH_TOOLS, "context_length": CONTEXT_LENGTH}
    async with scene(tmp_path, database, says=says, **options) as stage:
        collector = create_collector(Settings(database_url=database.dsn, capability_keys_file=tmp_path / "keys.json"))
        async with Proxy(stage, fault).running() as proxy, serving(collector) as port:
            home = tmp_path / "home"
            home.mkdir()
            questions = (script.REQUEST,) if reports else (script.QUESTION, script.FOLLOW_UP)
            url = f"http://127.0.0.1:{port}" if collects else proxy.url + COLLECTOR
            variables = environment(stage, proxy.url, url, home, browses=framework.environment == "browser")
            status, output = await run(framework, (folder, *questions), variables, home)
        calls, engine = await stage.calls(), stage.engine
        async with database.read() as session:
            spans = (await session.scalars(select(tables.Span).where(tables.Span.kind == "tool"))).all()
        answers = [(body["input_ids"], engine.sampled[body["rid"]]) for body in engine.requests]
        grammars = [GRAMMARS & set(body["sampling_params"]) for body in engine.requests]
        credited = await trained(database, stage.rollout)
    return Played(status, output, answers, calls, grammars, spans, credited)


def asking(call: tables.ModelCall) -> Call:
    """A recorded call as credit reads it, without its tokens."""
    answer = parse_turn(call.answer or {})
    return Call(
        id=call.id,
        request_id=call.request_id,
        choice=0,
        sequence=call.sequence,
        completed=True,
        trainable=True,
        prompt=b"",
        sampled=b"",
        logprobs=b"",
        versions=b"",
        temperature=1.0,
        asked=tuple(AskedTool(one.name, one.id) for one in answer.tool_calls),
        text=answer.content,
    )


def tool_span(span: tables.Span) -> ToolSpan:
    """A stored span of a tool as credit reads it."""
    names = [field.name for field in fields(ToolSpan)]
    return ToolSpan(**{name: getattr(span, name) for name in names})


def environment(stage: Scene, url: str, collector_url: str, home: Path, *, browses: bool = False) -> dict[str, str]:
    """The variables that the runner gives to an agent, with the proxy's address, and those of a browser."""
    own = {"PATH": os.environ["PATH"], "HOME": f"{home}", "TMPDIR": f"{home}"}
    if browses:
        own |= {"BROWSER": f"{browser.PROGRAM}", "LD_LIBRARY_PATH": browser.libraries()}
    return attempt_environment(stage, url, collector_url, {"question": script.QUESTION}) | own


async def run(framework: Framework, words: Sequence[str], variables: dict[str, str], home: Path) -> tuple[int, str]:
    """The exit status and output of the agent in a folder, which gets the questions as arguments."""
    folder, *questions = words
    agent = AGENTS / folder / framework.agent
    command = [*environments.command(framework.environment, agent), *questions]
    process = await asyncio.create_subprocess_exec(
        *command,
        *framework.arguments,
        cwd=home,
        env=variables,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(SECONDS):
            output = await process.stdout.read()
            return await process.wait(), output.decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def recorded(calls: Sequence[tables.ModelCall]) -> list[tuple[list[int], list[int]]]:
    """Prompt and sampled tokens of each call, as stored."""
    return [(_ids(call.prompt_ids), _ids(call.sampled_ids)) for call in calls]


def _ids(data: bytes) -> list[int]:
    ids: list[int] = np.frombuffer(data, "<i4").tolist()
    return ids
