"""The gateway renders and encodes what transformers does, from the same folder."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from leyden.services.gateway.dialects.chat_completions import ChatCompletions
from leyden.services.gateway.prompt.template import ChatModel
from tests.fakes.chat_model import CHATML, CHATML_FORGETTING, CHATML_WITH_TOOLS, make_chat_model

MANY_FEATURES = (
    "{%- set ns = namespace(first=true) %}{{ eos_token }}"
    "{%- for message in messages %}\n"
    "    {%- if message.role == 'system' %}\n{{ message['content'] | trim }}\n    {%- continue %}\n    {%- endif %}\n"
    "{%- if loop.index0 > 8 %}{% break %}{% endif %}"
    "[{{ message.role | upper }}]{% generation %}{{ message.content }}{% endgeneration %}"
    "{%- if message.tool_calls %}{{ message.tool_calls | tojson(indent=2) }}{% endif %}"
    "{%- endfor %}{{ tools | tojson if tools is not none }}"
    "{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{%- if add_generation_prompt %}[ASSISTANT]{% endif %}"
)
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "f", "description": "é <b>", "parameters": {"type": "object"}}}
]
CONVERSATION: list[Any] = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "héllo <script>"},
    {
        "role": "assistant",
        "content": "ok",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": {"b": [1, null]}}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "done"},
    {"role": "user", "content": "and?"},
]


@pytest.mark.parametrize("generation_prompt", [False, True])
@pytest.mark.parametrize("template", [CHATML, CHATML_WITH_TOOLS, CHATML_FORGETTING, MANY_FEATURES])
def test_text_and_tokens_are_those_of_transformers(tmp_path, template, generation_prompt):
    folder = make_chat_model(tmp_path / "model", template)
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    model = ChatModel(folder)
    # A template without tools gets the generic form here, which transformers does not have.
    plain = not model._has_tools
    messages = [m for m in CONVERSATION if not plain or (m["role"] != "tool" and "tool_calls" not in m)]
    tools = [] if plain else TOOLS
    body = json.dumps({"model": "m", "messages": messages, "tools": tools}).encode()
    asked = ChatCompletions().parse(body, max_choices=1)
    options = {"enable_thinking": False}
    text = model.render(asked.turns, asked.tools, options, add_generation_prompt=generation_prompt)
    expected: Any = reference.apply_chat_template(
        [_with_parsed_arguments(message) for message in messages],
        tools=tools or None,
        tokenize=False,
        add_generation_prompt=generation_prompt,
        **options,
    )
    assert text == expected
    assert model.tokenizer.encode(text).tolist() == reference.encode(text, add_special_tokens=False)


def _with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    call = message["tool_calls"][0]
    function = {"name": "f", "arguments": {"a": {"b": [1, None]}}}
    return {**message, "tool_calls": [{**call, "function": function}]}
