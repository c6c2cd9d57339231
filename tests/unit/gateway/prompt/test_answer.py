"""The part of an unfinished answer that may be shown."""

from __future__ import annotations

import pytest

from leyden.services.gateway.prompt.answer import cut_at_stop, visible_length


@pytest.mark.parametrize(
    ("text", "stops", "tools", "shown"),
    [
        ("abc", [], False, "abc"),
        ("abc", ["cd"], False, "ab"),
        ("abcde", ["cd"], False, "ab"),
        ("ab\n\nObs", ["\n\nObservation"], False, "ab"),
        ("ab\n", ["x"], False, "ab\n"),
        ("ab \n<tool", [], True, "ab"),
        ("ab \n<tool_call>{}</tool_call>", [], True, "ab"),
        ("ab \n", [], True, "ab"),
        ("ab <toolbox", [], True, "ab <toolbox"),
        ("aa", ["aab"], False, ""),
    ],
)
def test_the_beginning_of_a_stop_string_or_a_call_is_hidden(text, stops, tools, shown):
    assert text[: visible_length(text, stops, hides_calls=tools)] == shown


def test_the_first_stop_string_in_the_text_cuts_it():
    assert cut_at_stop("abcabc", ["cab", "bc"]) == ("a", "bc")
    assert cut_at_stop("abc", ["x"]) == ("abc", None)
