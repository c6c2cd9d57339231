"""Fields in which documents differ."""

from __future__ import annotations

from leyden.libs.contracts.overlay import document_differences


def test_fields_are_named_by_path_with_the_value_of_each_document() -> None:
    first = {"a": {"b": 1, "same": "x"}, "list": [{"n": 1}, {"n": 2}], "empty": {}}
    second = {"a": {"b": 1.5, "same": "x"}, "list": [{"n": 1}], "empty": []}
    third = {"a": None, "list": [{"n": 1}], "empty": {}}
    assert document_differences([first, second, third]) == {
        "a": [None, None, "null"],
        "a.b": ["1", "1.5", None],
        "a.same": ['"x"', '"x"', None],
        "empty": ["{}", "[]", "{}"],
        "list.1.n": ["2", None, None],
    }


def test_equal_documents_differ_in_nothing() -> None:
    assert document_differences([{"a": [1, {"b": None}]}] * 2) == {}
