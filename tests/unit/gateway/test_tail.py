"""Templates that can begin at any message, and the moments when they must not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.services.gateway.render import ChatModel
from leyden.services.gateway.request import ToolCall, Turn
from leyden.services.gateway.tail import UNRENDERABLE, _Run
from tests.fakes.chat_model import CHATML, CHATML_FORGETTING, CHATML_WITH_TOOLS, make_chat_model
from tests.fakes.templates import (
    COUNTED_SEARCH,
    DEEPSEEK,
    GEMMA,
    GLM,
    GPT_OSS,
    LEAVING,
    LLAMA,
    MISTRAL,
    NUMBERED,
    PICTURES,
    QWEN,
    QWEN3,
    REFUSING,
    SMOLLM,
)  # fmt: skip

# Shapes that may change what they wrote, some of them each time.
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
    # The search keeps more than its find, the state is a list, the loop is left.
    QWEN3.replace("{%- set ns.open = false %}", "{%- if index is odd %}{%- set ns.open = false %}{%- endif %}"),
    "{% set ns = namespace(l=[]) %}{% for m in messages %}{% set ns.l = ns.l + [m.role] %}{{ ns.l }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'tool' %}{% break %}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{% endfor %}{% for m in messages %}{{ ns.n }}{{ m.content }}{% endfor %}",
    "{% set f = messages[0] %}{% for m in messages %}{{ f['role'] }}{{ f.content }}{{ m.content }}{% endfor %}",
    "{% set ns = namespace(k=loop_from) %}{% for m in messages %}{{ m.content if ns.k != 1 }}{% endfor %}",
    "{% if tools %}{% set rest = messages[1:] %}{% for m in rest %}{{ m.content }}{% endfor %}{% else %}"
    "{% set rest = messages[-2:] %}{% for m in rest %}{{ m.role }}{% endfor %}{% endif %}",
]
COMMON = {
    "chatml": CHATML, "tools": CHATML_WITH_TOOLS, "forgetting": CHATML_FORGETTING, "smollm": SMOLLM, "qwen": QWEN,
    "numbered": NUMBERED, "qwen3": QWEN3, "glm": GLM, "llama": LLAMA, "mistral": MISTRAL, "gemma": GEMMA,
    "deepseek": DEEPSEEK, "pictures": PICTURES, "gpt-oss": GPT_OSS,
}  # fmt: skip
ALL = COMMON | {"leaving": LEAVING, "refusing": REFUSING, "counted search": COUNTED_SEARCH}
ALL |= {str(number): template for number, template in enumerate(REWRITING)}
TOOLS: Any = ({"type": "function", "function": {"name": "f"}},)

turns = st.lists(
    st.builds(
        Turn,
        role=st.sampled_from(["system", "user", "assistant", "tool", "tool"]),
        content=st.sampled_from(["", "a", "<r>", "</think>b", "é<|im_end|>", "{{ 1 }}"]),
        tool_calls=st.sampled_from([(), (), (ToolCall("1", "f", '{"x": 1}'), ToolCall("2", "g", "{}"))]),
    ),
    min_size=1,
    max_size=6,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatModel]:
    folder = tmp_path_factory.mktemp("models")
    return {name: ChatModel(make_chat_model(folder / name, template)) for name, template in ALL.items()}


def whole(model: ChatModel, messages: list[Any], tools: Any, options: dict[str, Any], *, prompt: bool) -> str | None:
    try:
        return model._template.render(model._variables(messages, tools, options, prompt))
    except UNRENDERABLE:
        return None


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=50, deadline=None)
@given(
    st.lists(turns, min_size=2, max_size=5),
    st.sampled_from([(), TOOLS]),
    st.sampled_from([{}, {"style": "~"}]),
    st.data(),
)
def test_a_conversation_that_goes_on_has_the_same_text_written_from_what_was_reached(
    models, name, rounds, tools, options, data
):
    model, since, settled, messages = models[name], None, "", []
    for added in rounds:
        messages = [*messages, *model.messages(added, ())]
        prompt = data.draw(st.booleans())
        text = whole(model, messages, tools, options, prompt=prompt)
        tail = model.render_from(messages, since, tools, options, add_generation_prompt=prompt)
        if tail is None:
            since, settled = None, ""
            continue
        texts = tail.texts if since else [tail.before, *tail.texts]
        assert settled + "".join(texts) == text
        # Any messages but the last may be settled, and any may follow the one after them.
        first = since.start if since else 0
        last = data.draw(st.integers(first, len(messages) - 1))
        messages = messages[: last + 1]
        reached = tail.reached(last)
        settled = settled + "".join(texts[: len(texts) - len(tail.texts) + last - first]) if reached else ""
        since = reached


def asked(*roles: str) -> list[Turn]:
    return [Turn(role, f"{role} {number}") for number, role in enumerate(roles)]


@pytest.mark.parametrize("name", COMMON)
@pytest.mark.parametrize("kind", ["talk", "tools"])
def test_templates_in_use_go_on_from_the_last_answer(models, name, kind):
    model, since, begun = models[name], None, []
    first = (
        asked("system", "user", "assistant", "user") if kind == "talk" else asked("system", "user", "assistant", "tool")
    )
    for round_number in range(6):
        following = asked("assistant", first[-1].role) * round_number
        messages = model.messages([*first, *following], ())
        tail = model.render_from(messages, since, (), {}, add_generation_prompt=True)
        assert tail is not None
        begun.append(len(messages) - len(tail.texts))
        since = tail.reached(len(messages) - 3)
        assert since is not None
    assert begun == [0, 1, 3, 5, 7, 9]


def test_a_new_question_that_drops_earlier_thoughts_is_written_whole(models):
    model = models["qwen3"]
    messages = model.messages(asked("user", "assistant", "tool", "assistant", "tool"), ())
    tail = model.render_from(messages, None, (), {}, add_generation_prompt=True)
    since = tail.reached(3) if tail else None
    more = [*messages, *model.messages(asked("assistant", "tool"), ())]
    assert since is not None
    assert model.render_from(more, since, (), {}, add_generation_prompt=True) is not None
    more = [*messages, *model.messages(asked("assistant", "user"), ())]
    assert model.render_from(more, since, (), {}, add_generation_prompt=True) is None


def test_a_search_looks_at_no_message_twice(models, monkeypatch):
    looked: list[int] = []
    search = _Run._search

    def counted(run, number, items, *others, **names):
        for message in search(run, number, items, *others, **names):
            looked.append(items.index(message))
            yield message

    monkeypatch.setattr(_Run, "_search", counted)
    model, since = models["qwen3"], None
    roles = ["user", "assistant", "tool"]
    for _ in range(4):
        looked.clear()
        messages = model.messages(asked(*roles), ())
        tail = model.render_from(messages, since, (), {}, add_generation_prompt=True)
        since = tail.reached(len(roles) - 2) if tail else None
        roles += ["assistant", "tool"]
    assert looked == [8, 7, 6, 5, 0]


NEVER = [
    "{% for m in messages %}{{ messages | length }}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ loop.length }}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ m.content }}{{ strftime_now('%s') }}{% endfor %}",
    "{% for m in messages | reverse %}{{ m.content }}{% endfor %}",
]


@pytest.mark.parametrize("template", NEVER)
def test_a_template_whose_steps_depend_on_what_is_to_come_is_written_whole(tmp_path, template):
    model = ChatModel(make_chat_model(tmp_path / "m", template))
    messages = model.messages(asked("user", "assistant", "user"), ())
    assert model.render_from(messages, None, (), {}, add_generation_prompt=True) is None


def test_a_template_that_looks_back_before_the_first_message_is_written_whole(models):
    # The one before the first is the last one, which is another when the conversation goes on.
    model = models["refusing"]
    messages = model.messages(asked("tool", "user"), ())
    assert model.render_from(messages, None, (), {}, add_generation_prompt=True) is None


def test_an_option_with_the_name_of_something_else_is_refused_as_ever(models):
    model = models["chatml"]
    messages = model.messages(asked("user"), ())
    assert model.render_from(messages, None, (), {"messages": []}, add_generation_prompt=True) is None
