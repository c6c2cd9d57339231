"""Templates that can begin at any message, and those that must not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.errors import BadRequest
from services.gateway.render import ChatModel
from services.gateway.request import ToolCall, Turn
from tests.fakes.chat_model import CHATML, CHATML_FORGETTING, CHATML_WITH_TOOLS, make_chat_model

# Each looks at one more thing: the first message, those beside its own, its own number, variables, inner loops.
SMOLLM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}[default]{% endif %}"
    "<{{ message['role'] }}>{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
QWEN = (
    "{%- if tools %}{{ tools | tojson }}{%- else %}{%- if messages[0].role == 'system' %}{{ messages[0].content }}"
    "{%- endif %}{%- endif %}{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}<{{ message.role }}>"
    "{{ message.content }}{%- elif message.role == 'assistant' %}<a>{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}{% if not loop.first %},{% endif %}{{ loop.index0 }}"
    "{{ call.function.name }}"
    "{%- endfor %}{%- elif message.role == 'tool' %}"
    "{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}<results>{%- endif %}{{ message.content }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}</results>{%- endif %}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<a>{%- endif %}"
)
NUMBERED = (
    "{% set mark = '#' if style is undefined else style %}{% set seen = 'none' %}{% for m in messages %}"
    "{% if loop.index is odd %}{% set seen = m.content %}{% endif %}{{ loop.index }}{{ mark }}{{ seen }}"
    "{{ messages[loop.index - 2].role if loop.index0 else '-' }}{{ messages[loop.index].role if not loop.last }}"
    "{{ m.content | upper }}"
    "{% endfor %}{{ messages[-1].role }}{{ messages | length }}"
)
LEAVING = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{% continue %}{% endif %}"
    "{% if loop.index0 > 4 %}{% break %}{% endif %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}!"
)
REFUSING = (
    "{{ tools }}{% for m in messages %}{% if m.role == 'tool' and messages[loop.index0 - 1].role == 'tool' %}"
    "{{ raise_exception('two') }}{% endif %}{{ m.content }}{% endfor %}"
)
BY_MESSAGE = {
    "chatml": CHATML, "tools": CHATML_WITH_TOOLS, "forgetting": CHATML_FORGETTING, "smollm": SMOLLM, "qwen": QWEN,
    "numbered": NUMBERED, "leaving": LEAVING, "refusing": REFUSING,
}  # fmt: skip
TOOLS: Any = ({"type": "function", "function": {"name": "f"}},)

turns = st.lists(
    st.builds(
        Turn,
        role=st.sampled_from(["system", "user", "assistant", "tool", "tool"]),
        content=st.sampled_from(["", "a", "</think>b", "é<|im_end|>", "{{ 1 }}"]),
        tool_calls=st.sampled_from([(), (ToolCall("1", "f", '{"x": 1}'), ToolCall("2", "g", "{}"))]),
    ),
    min_size=1,
    max_size=8,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatModel]:
    folder = tmp_path_factory.mktemp("models")
    return {name: ChatModel(make_chat_model(folder / name, template)) for name, template in BY_MESSAGE.items()}


def whole(model: ChatModel, asked: list[Turn], tools: Any, options: dict[str, Any], *, prompt: bool) -> str | None:
    try:
        return model.render(asked, tools, options, add_generation_prompt=prompt)
    except BadRequest:
        return None


@pytest.mark.parametrize("name", BY_MESSAGE)
@settings(max_examples=150, deadline=None)
@given(turns, st.sampled_from([(), TOOLS]), st.sampled_from([{}, {"style": "~"}]), st.booleans(), st.data())
def test_the_parts_of_a_conversation_are_its_text_and_stay_when_it_goes_on(
    models, name, asked, tools, options, prompt, data
):
    model = models[name]
    messages = model.messages(asked, tools)
    parts = model.render_from(messages, 0, tools, options, add_generation_prompt=prompt)
    text = whole(model, asked, tools, options, prompt=prompt)
    if parts is None:
        return
    assert "".join(parts) == text
    start = data.draw(st.integers(0, len(messages) - 1))
    assert model.render_from(messages, start, tools, options, add_generation_prompt=prompt) == [
        parts[0],
        *parts[start + 1 :],
    ]
    # Whatever comes after the first messages, all of them but the last have the same texts.
    count = data.draw(st.integers(1, len(messages)))
    other = [*messages[:count], *model.messages(data.draw(turns), ())]
    later = model.render_from(other, 0, tools, options, add_generation_prompt=prompt)
    if later is not None:
        assert later[:count] == parts[:count]


@pytest.mark.parametrize("name", ["chatml", "tools", "forgetting", "smollm", "qwen", "numbered"])
def test_common_templates_work_message_by_message(models, name):
    model = models[name]
    asked = [Turn("system", "s"), Turn("user", "a"), Turn("assistant", "b"), Turn("tool", "c"), Turn("user", "d")]
    parts = model.render_from(model.messages(asked, ()), 0, (), {}, add_generation_prompt=True)
    assert parts is not None
    assert "".join(parts) == model.render(asked, (), {}, add_generation_prompt=True)


# Each goes through the messages, and does one thing that may change what it wrote before.
REWRITING = [
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endfor %}",
    "{% set c = messages | length %}{% for m in messages %}{{ c }}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ messages | length }}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ loop.length }}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ loop.revindex }}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ loop['length'] }}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ loop.changed(m.role) }}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ loop.previtem.role }}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ messages[-1].role }}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ messages[loop.index + 1].role }}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ messages[1:] }}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{% for o in messages %}{{ o.role }}{% endfor %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{% for o in [1] %}{{ messages[loop.index0 + 1].role }}{% endfor %}{% endfor %}",
    "{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ m.content }}{% else %}none{% endfor %}",
    "{% for m in messages[1:] %}{{ m.content }}{% endfor %}",
    "{% for m in messages | reverse %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ m.content }}{% endfor %}{% for m in messages %}{{ m.role }}{% endfor %}",
    "{% for m in messages %}{{ m.content }}{{ add_generation_prompt }}{% endfor %}",
    "{% for m in messages %}{{ m.content }}{{ strftime_now('%s') }}{% endfor %}",
    "{% for m in messages %}{{ m.content }}{{ [1, 2, 3] | random }}{% endfor %}",
    "{% set c = cycler('a', 'b') %}{% for m in messages %}{{ c.next() }}{{ m.content }}{% endfor %}",
    "{% set j = joiner() %}{% for m in messages %}{{ j() }}{{ m.content }}{% endfor %}",
    "{% set r = [1, 2, 3] | reverse %}{% for m in messages %}{{ r | list }}{{ m.content }}{% endfor %}",
    "{% macro w(m) %}{{ messages | length }}{% endmacro %}{% for m in messages %}{{ w(m) }}{% endfor %}",
    "{% set messages = messages %}{% for m in messages %}{{ m.content }}{% endfor %}",
    "{% if tools %}{% for m in messages %}{{ m.content }}{% endfor %}{% endif %}",
]


@pytest.mark.parametrize("template", REWRITING)
def test_a_template_that_may_change_what_it_wrote_is_written_whole(tmp_path, template):
    model = ChatModel(make_chat_model(tmp_path / "m", template))
    messages = model.messages([Turn("user", "a"), Turn("assistant", "b"), Turn("user", "c")], ())
    assert model.render_from(messages, 0, (), {}, add_generation_prompt=True) is None


def test_a_template_that_looks_back_before_the_first_message_is_written_whole(models):
    # The one before the first is the last one, which is another when the conversation goes on.
    model = models["refusing"]
    messages = model.messages([Turn("tool", "a"), Turn("user", "b")], ())
    assert model.render_from(messages, 0, (), {}, add_generation_prompt=True) is None


def test_an_option_with_the_name_of_something_else_is_refused_as_ever(models):
    model = models["chatml"]
    messages = model.messages([Turn("user", "a")], ())
    assert model.render_from(messages, 0, (), {"messages": []}, add_generation_prompt=True) is None
