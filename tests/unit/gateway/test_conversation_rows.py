"""The rows that pass the check of a run's tasks are those that the gateway reads."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.libs.contracts.conversation import conversation_fault
from leyden.services.gateway.samplers.conversation import parse_conversation

NAME: st.SearchStrategy[Any] = st.sampled_from([None, "a", 7])
FUNCTION = st.fixed_dictionaries({}, optional={"name": NAME, "arguments": st.sampled_from([None, "{}", {"a": "é"}, 7])})
CALL = st.fixed_dictionaries({}, optional={"id": NAME, "function": st.none() | FUNCTION})
PART = st.fixed_dictionaries({}, optional={"type": st.sampled_from(["text", "refusal", "image_url", 7])}) | st.none()
TEXT_PART = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "refusal"])}, optional={"text": NAME, "refusal": NAME}
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"])},
    optional={
        "content": NAME | st.lists(PART | TEXT_PART, max_size=2),
        "name": NAME,
        "tool_call_id": NAME,
        "tool_calls": st.none() | st.just({}) | st.lists(CALL, max_size=2),
    },
)
TOOL = st.fixed_dictionaries({}, optional={"type": st.sampled_from([None, "function", "bash_1"]), "function": FUNCTION})
ASKED, ANSWERED = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello."}


@settings(max_examples=300, deadline=None)
@given(message=MESSAGE, tools=st.none() | st.lists(TOOL, max_size=1), options=st.sampled_from([None, {}, 7]))
def test_the_gateway_reads_each_row_that_passes_the_check(message: Any, tools: Any, options: Any) -> None:
    row = {"messages": [ASKED, message, ANSWERED], "tools": tools, "chat_template_kwargs": options}
    if conversation_fault(row) is None:
        turns = parse_conversation(row).turns
        assert [turn.role for turn in turns][::2] == ["user", "assistant"]


def test_arguments_that_are_an_object_become_text() -> None:
    call = {"function": {"name": "search", "arguments": {"city": "Zürich"}}}
    row = {"messages": [ASKED, {"role": "assistant", "tool_calls": [call]}]}
    (found,) = parse_conversation(row).turns[1].tool_calls
    assert (found.name, found.arguments) == ("search", '{"city": "Zürich"}')
