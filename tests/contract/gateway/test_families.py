"""Conversations with tools continue their sampled tokens in each model family, as docs/model-families.md says."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from leyden.libs.contracts.conversation import Dialect, Tool, ToolCall, Turn
from leyden.libs.contracts.ids import new_call_id
from leyden.libs.store.attempts import AttemptKey
from leyden.services.gateway.calls.context import ModelRequest, SampledTokens, Sampling
from leyden.services.gateway.prompt.answer import finish_answer
from leyden.services.gateway.prompt.prefix import PrefixCache, PrefixIndex, StoredCall
from leyden.services.gateway.prompt.template import ChatModel
from tests.contract.gateway.test_turns import TOOLS
from tests.fakes.model_families import FAMILIES

PAGE = Path(__file__).parents[3] / "docs/model-families.md"
KEY = AttemptKey("run-a.0.0", 1)
QUESTION, LATER = Turn("user", "weather?"), Turn("user", "and now?")
CALL = ToolCall("call00001", "weather", '{"city": "Paris"}')


JSON_CALL = '{"name": "weather", "arguments": {"city": "Paris"}}'
SAMPLED_CALLS = {
    "hermes": f"<tool_call>\n{JSON_CALL}\n</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
    "llama3": JSON_CALL.replace("arguments", "parameters"),
    "mistral": f"[TOOL_CALLS][{JSON_CALL}]",
    "glm": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
    '```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "gpt_oss": "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + CALL.arguments,
    "gemma4": '<|tool_call>call:weather{city:<|"|>Paris<|"|>}<tool_call|>',
    "phi4": f"<|tool_call|>[{JSON_CALL}]<|/tool_call|>",
}

CALL_ENDS = {"gpt_oss": "<|call|>", "gemma4": "<|tool_response>"}
"""The mark that a family samples after a call, where another one ends its answers."""


async def no_calls(_known: Collection[str]) -> Sequence[StoredCall]:
    return []


def sampled_text(model: ChatModel, prompt: str, answer: Turn) -> str:
    """Reasoning, text and call in the family's form, without the mark that ends the answer."""
    marks = model.reasoning_parser
    content = SAMPLED_CALLS[model.tool_parser.name] if answer.tool_calls else answer.content
    if marks.name == "none":
        return content
    if marks.name == "gpt_oss":
        final = "" if answer.tool_calls else "<|channel|>final<|message|>"
        return f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{final}{content}"
    opening = "" if prompt.rstrip().endswith(marks.opening) else f"{marks.opening}\n"
    between = "" if marks.name == "gemma4" else "\n\n"
    return f"{opening}Hm.\n{marks.closing}{between}{content}"


async def continuations(model: ChatModel, *, echoes_reasoning: bool) -> list[str]:
    """How the prompts with a tool's result and with a later question continue."""
    index = PrefixIndex(model, PrefixCache(10**8))
    turns: list[Turn] = [QUESTION]
    found: list[str] = []
    answers = (Turn("assistant", "", tool_calls=(CALL,)), Turn("assistant", "Rain."), Turn("assistant", "Bye."))
    follow = (Turn("tool", "rain", tool_call_id=CALL.id), LATER, LATER)
    for says, following in zip(answers, follow, strict=True):
        call_id = new_call_id()
        request = ModelRequest(
            Dialect.CHAT_COMPLETIONS, "m", tuple(turns), tuple(map(Tool, TOOLS)), True, True, False, False, 1, False, 0,
            Sampling(), {}, {}, b"",
        )  # fmt: skip
        indexed = await index.prompt(KEY, request, no_calls)
        found.append(indexed.continuation)
        mark = CALL_ENDS.get(model.tool_parser.name) if says.tool_calls else None
        ends = [t for t in model.tokenizer.eos_ids if mark in (None, model.tokenizer.decode([t]))]
        ids = [*model.tokenizer.encode(sampled_text(model, indexed.text, says)).tolist(), ends[0]]
        answer = finish_answer(model, request, indexed.prompt, SampledTokens(call_id, 0, 0, ids=ids)).turn
        assert [call.name for call in answer.tool_calls] == [call.name for call in says.tool_calls]
        assert answer.content == says.content
        assert answer.reasoning == (None if model.reasoning_parser.name == "none" else "Hm.")
        index.remember(KEY, call_id, indexed, answer, ids)
        if answer.tool_calls:
            following = replace(following, tool_call_id=answer.tool_calls[0].id)
        turns += [answer if echoes_reasoning else replace(answer, reasoning=None), following]
    return found[1:]


@pytest.mark.parametrize("echoes_reasoning", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
async def test_a_conversation_continues_as_the_page_says(tmp_path, family, echoes_reasoning):
    model = ChatModel(FAMILIES[family].write(tmp_path / "m"))
    found = await continuations(model, echoes_reasoning=echoes_reasoning)
    [row] = re.findall(rf"^\| `{family}` \| (\w+) \| (\w+) \|$", PAGE.read_text(), re.MULTILINE)
    assert found == list(row)
