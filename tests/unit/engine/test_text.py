from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from leyden.services.engine.answer import _unfinished_stop, version_spans
from leyden.services.engine.text import Decoder, StopStrings, Text


@pytest.fixture(scope="module")
def text(tiny_model: Path) -> Text:
    return Text(tiny_model)


def test_incremental_decoding_equals_decoding_at_once(text: Text) -> None:
    ids = text.encode("naïve – 東京 ok")
    decoder = Decoder(text, skip_special=True)
    seen = [decoder.advance(ids[: count + 1]) for count in range(len(ids))]
    assert seen[-1] == "naïve – 東京 ok"
    assert all(later.startswith(earlier) and "�" not in earlier for earlier, later in itertools.pairwise(seen))


def test_a_stop_string_across_tokens_is_found_when_complete(text: Text) -> None:
    ids = text.encode("one two three")
    stops = StopStrings(text, ["wo t", "zzz"])
    found = [stops.matched(ids[: count + 1]) for count in range(len(ids))]
    assert found.index("wo t") == len("one two t") - 1


def test_text_that_may_begin_a_stop_string_is_unfinished_stop() -> None:
    assert _unfinished_stop("hello w", ["world"]) == 1
    assert _unfinished_stop("hello wor", ["world", "r"]) == 3
    assert _unfinished_stop("hello", ["world"]) == 0


def test_versions_become_half_open_spans() -> None:
    assert version_spans(["a", "a", "b"]) == [
        {"version": "a", "start": 0, "end": 2},
        {"version": "b", "start": 2, "end": 3},
    ]
    assert version_spans([]) == []
