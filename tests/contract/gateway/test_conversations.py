"""A dataset of conversations: the task's own messages are answers, in tokens of the run's model."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from sqlalchemy import update

from leyden.libs.contracts.conversation import conversation_fault
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.services.gateway.calls.context import ModelRequest
from leyden.services.gateway.dialects.chat_completions import parse_document
from tests.fakes.chat_model import CHATML_WITH_TOOLS
from tests.fakes.gateway import scene
from tests.support import builders
from tests.support.shared import ROOT

RUN = builders.run_document(
    roles=[{"name": "writer", "policy": "shown"}],
    policies={"shown": {"provider": "conversation"}},
    training={"steps": 0},
)
CALL = {"id": "call_1", "type": "function", "function": {"name": "search", "arguments": '{"q": 1}'}}
MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is one?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "1 is a number"},
    {"role": "assistant", "content": "A number."},
]
TOOL = {"type": "function", "function": {"name": "search", "parameters": {}}}


def holding(**fields: Any) -> dict[str, Any]:
    """A row with an answer of these fields."""
    return {"messages": [MESSAGES[1], {"role": "assistant", **fields}]}


async def set_task(database: Database, row: dict[str, Any]) -> None:
    async with database.session() as session:
        await session.execute(update(tables.Task).values(payload=row))


@pytest.mark.parametrize("is_trl", [False, True])
async def test_the_agent_replays_a_row_and_the_record_is_the_whole_conversation_of_the_runs_template(
    tmp_path: Path, database: Database, is_trl: bool
) -> None:
    """TRL's rows have the arguments of a tool call as an object, and calls without ids."""
    call = {"type": "function", "function": {"name": "search", "arguments": {"q": 1}}} if is_trl else CALL
    row = {"messages": [*MESSAGES[:2], {**MESSAGES[2], "tool_calls": [call]}, *MESSAGES[3:]], "tools": [TOOL]}
    async with scene(tmp_path, database, run=RUN, template=CHATML_WITH_TOOLS) as stage, stage.client() as client:
        await set_task(database, row)
        (tmp_path / "task.json").write_text(json.dumps(row))
        environment = os.environ | {
            "LEYDEN_TASK_FILE": str(tmp_path / "task.json"),
            "OPENAI_BASE_URL": str(client.base_url).rstrip("/"),
            "OPENAI_API_KEY": client.api_key,
        }
        agent = [sys.executable, str(ROOT / "examples" / "conversations" / "agent.py")]
        ended = await asyncio.to_thread(
            subprocess.run, agent, env=environment, capture_output=True, text=True, check=False
        )
        calls = await stage.calls()
    assert (ended.stdout, ended.stderr) == ('{"reward": 1.0}\n', "")
    assert [call.role for call in calls] == ["writer", "writer"]
    read, wrote = (
        [stage.model.tokenizer.decode(np.frombuffer(getattr(call, name), "<i4").tolist()) for call in calls]
        for name in ("prompt_ids", "written_ids")
    )
    asked: list[ModelRequest] = [
        parse_document({"model": "m", "messages": MESSAGES[:count], "tools": [TOOL]}, b"", max_choices=1)
        for count in (2, 4)
    ]
    assert read == [stage.model.render(one.turns, one.tools, {}) for one in asked]
    assert '"name": "search"' in wrote[0]
    assert wrote[1] == "A number.<|im_end|>"
    # The second prompt begins with the first and its answer: they are one row of the trainer.
    assert read[1].startswith(read[0] + wrote[0])


@pytest.mark.parametrize(
    ("row", "messages", "words"),
    [
        ({"messages": MESSAGES}, MESSAGES[:1], "Message 1 of the task is no assistant's"),
        ({"messages": MESSAGES}, MESSAGES, "Message 5 of the task is no assistant's"),
        ({"messages": MESSAGES}, [{"role": "user", "content": "hi"}], "The task's messages begin otherwise"),
        ({"question": 1}, MESSAGES[:2], "write a list of messages"),
    ],
)
async def test_a_request_that_the_task_does_not_answer_is_refused(
    tmp_path: Path, database: Database, row: dict[str, Any], messages: list[Any], words: str
) -> None:
    async with scene(tmp_path, database, run=RUN) as stage, stage.client() as client:
        await set_task(database, row)
        with pytest.raises(openai.BadRequestError, match=words):
            await client.chat.completions.create(model="m", messages=messages)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({}, "messages: write a list of messages"),
        ({"messages": ["hi"]}, "messages.0: write an object with role"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages.0: write an object with role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0: write content"),
        ({"messages": [{"role": "user", "tool_calls": [CALL]}]}, "messages.0: write content"),
        (holding(content=[{"type": "image_url", "image_url": {"url": "a"}}]), "messages.1.content: write text"),
        (holding(content=7), "messages.1.content: write text"),
        (holding(tool_calls={}, content="a"), "messages.1.tool_calls: write a list"),
        (holding(tool_calls=[{"function": {"arguments": "{}"}}]), "messages.1.tool_calls.0.function: write an object"),
        (holding(tool_calls=[{"function": {"name": "a", "arguments": 7}}]), "0.function.arguments: write JSON as text"),
        (holding(tool_calls=[{**CALL, "id": 7}]), "messages.1.tool_calls.0.id: write text"),
        (holding(content="a", name=7), "messages.1.name: write text"),
        ({"messages": MESSAGES[:2]}, "nothing would train: add the answer"),
        ({"messages": MESSAGES, "tools": {}}, "tools: write a list"),
        ({"messages": MESSAGES, "tools": [{"name": "search"}]}, "tools.0: write an object with type 'function'"),
        ({"messages": MESSAGES, "chat_template_kwargs": 1}, "chat_template_kwargs: write an object"),
    ],
)
def test_a_row_that_is_no_conversation_says_why(row: dict[str, Any], words: str) -> None:
    assert words in str(conversation_fault(row))
    assert conversation_fault({"messages": MESSAGES, "tools": [TOOL]}) is None
