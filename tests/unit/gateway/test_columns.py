"""A whole answer of an engine, read by columns: the same as read plainly, whatever it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.services.gateway.columns import Columns, whole_document
from leyden.services.gateway.request import Json

NAME = "output_token_logprobs"


def answer(entries: Any, tokens: list[int]) -> Json:
    return {"text": f'"{NAME}":[[ ],[ ]]', "output_ids": tokens, "meta_info": {"id": "a", NAME: entries, "e2e": 0.5}}


def plainly(document: Json) -> Json:
    """With lists in place of columns."""
    columns = document["meta_info"][NAME]
    if not isinstance(columns, Columns):
        return document
    entries = [[logprob, token, None] for logprob, token in zip(columns.logprobs, columns.tokens, strict=True)]
    return {**document, "meta_info": {**document["meta_info"], NAME: entries}}


@pytest.mark.parametrize("write", [orjson.dumps, lambda document: json.dumps(document).encode()])
def test_entries_of_three_fields_become_columns(write: Callable[[Json], bytes]) -> None:
    document = answer([[-0.5, 7, None], [-1, 8, None], [-1e-7, 9, None]], [7, 8, 9])
    read = whole_document(write(document))
    assert read["meta_info"][NAME] == Columns([-0.5, -1, -1e-7], [7, 8, 9])
    assert plainly(read) == document


@pytest.mark.parametrize(
    ("entries", "tokens"),
    [
        ([[-0.5, 7, "],["], [-1.0, 8, "]]"]], [7, 8]),
        ([[-0.5, 7], [-1.0, 8], [-1.0, 9]], [7, 8, 9]),
        ([[-0.5, 7], [-1.0, 8, None, 9.5]], [7, 8]),
        ([[-0.5, 7, [1], [2]]], [7]),
        ([[-0.5, 7, 1.0]], [7]),
        ([[-0.5, 7, None]], [8]),
        ([[-0.5, True, None]], [1]),
        ([[False, 7, None]], [7]),
        ([[-0.5, 7, None], [-1.0, 8, None]], [7]),
        ([[]], []),
        ([], []),
        (None, [7]),
        ("[[1,2,3]]", [7]),
    ],
)
def test_anything_else_stays_as_it_is_told(entries: Any, tokens: list[int]) -> None:
    document = answer(entries, tokens)
    assert whole_document(orjson.dumps(document)) == document


FIELDS = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-2, 2) | st.text('[]," 1', max_size=4)
NESTED = st.recursive(FIELDS, lambda inner: st.lists(inner, max_size=4), max_leaves=12)


@given(NESTED, st.lists(st.integers(0, 9), max_size=4), st.booleans())
def test_what_is_read_is_what_was_told(entries: Any, tokens: list[int], is_spaced: bool) -> None:
    document = answer(entries, tokens)
    body = json.dumps(document).encode() if is_spaced else orjson.dumps(document)
    read = whole_document(body)
    if isinstance(read["meta_info"][NAME], Columns):
        assert [*chain(*entries)] == [*chain(*plainly(read)["meta_info"][NAME])]
    else:
        assert read == document


@given(st.binary(max_size=60), st.integers(0, 200))
def test_what_is_no_json_is_refused(noise: bytes, at: int) -> None:
    body = orjson.dumps(answer([[-0.5, 7, None], [-1.0, 8, None]], [7, 8]))
    spoilt = body[:at] + noise + body[at:]
    try:
        plain = orjson.loads(spoilt)
    except ValueError:
        with pytest.raises(ValueError, match=r"."):
            whole_document(spoilt)
    else:
        assert whole_document(spoilt) == plain or plainly(whole_document(spoilt)) == plain
