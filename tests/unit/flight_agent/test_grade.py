import json

import pytest
from grade import Transcript, names, verdict


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        ("Take Iberia at 7:40.", True),
        ("take IBERIA", True),
        ("Take Iberian wine.", False),
        ("Take TAP at 7:40.", False),
        ("", False),
    ],
)
def test_an_answer_names_the_carrier_as_a_word(answer: str, named: bool) -> None:
    assert names(answer, "Iberia") is named


def test_success_is_an_answer_that_names_what_search_found() -> None:
    assert json.loads(verdict(Transcript(("memory", "search"), "Take Iberia.", 3), "Iberia")) == {
        "reward": 1,
        "memory_first": True,
        "success": True,
        "first_tool": "memory",
        "calls": 3,
    }


def test_a_conversation_without_an_answer_earns_nothing() -> None:
    assert json.loads(verdict(Transcript(("none", "search", "search"), None, 3), "Iberia")) == {
        "reward": 0,
        "memory_first": False,
        "success": False,
        "first_tool": "none",
        "calls": 3,
    }
