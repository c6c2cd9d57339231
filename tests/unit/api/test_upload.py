"""Rows parsed from an upload are the same for any size of its chunks."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.services.api.upload import BadUpload, Limits, UploadTooLarge, read_rows

LIMITS = Limits(upload_bytes=2**20, row_bytes=200, problems=3)


async def chunked(body: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(body), size):
        yield body[start : start + size]


async def rows_of(body: bytes, size: int = 7, limits: Limits = LIMITS) -> list[str]:
    return [row async for row in read_rows(chunked(body, size), limits)]


async def problems_of(body: bytes, size: int = 7) -> dict[str, str]:
    with pytest.raises(BadUpload) as caught:
        await rows_of(body, size)
    return {problem.path: problem.message for problem in caught.value.problems}


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
async def test_lines_and_arrays_give_the_same_rows_at_any_cut(size: int) -> None:
    lines = '\ufeff{"b": "é]", "a": [1, {"x": "\\u00e9"}]}\r\n\n{"n": -1.5e3}'.encode()
    array = ' [\n{"b": "é]", "a": [1, {"x": "\\u00e9"}]} ,\n {"n": -1.5e3} ] \n'.encode()
    expected = ['{"a":[1,{"x":"é"}],"b":"é]"}', '{"n":-1500.0}']
    assert await rows_of(lines, size) == expected
    assert await rows_of(array, size) == expected


OBJECTS = st.lists(
    st.dictionaries(
        st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=5),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text('ab\\"é[]{},\n', max_size=8),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=2),
            max_leaves=5,
        ),
        max_size=3,
    ),
    min_size=1,
    max_size=4,
)


@given(OBJECTS, st.integers(1, 20), st.sampled_from([None, 2]))
async def test_every_array_is_read_back_unchanged(rows: list[dict[str, object]], size: int, indent: int | None) -> None:
    limits = Limits(upload_bytes=2**20, row_bytes=10_000, problems=3)
    read = await rows_of(json.dumps(rows, indent=indent).encode(), size, limits)
    assert [json.loads(row) for row in read] == rows


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("[1]", "must be a JSON object, not an array"),
        ("null", "not null"),
        ("7", "not a number"),
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"a": -Infinity}', "-Infinity is not JSON"),
        ('{"a": 1e400}', "too large"),
        ('{"a": {"b": 1, "b": 2}}', "key 'b' appears twice"),
        ('{"a": "x\\u0000"}', "U+0000"),
        ('{"a": "\\ud800"}', "surrogate"),
        ('{"a": "' + "x" * 200 + '"}', "longer than 200 bytes"),
    ],
)
async def test_a_row_that_cannot_be_stored_is_reported_with_its_place_and_reason(row: str, words: str) -> None:
    lines = await problems_of(f'{{"a": 1}}\n{row}\n'.encode())
    array = await problems_of(f'[{{"a": 1}},\n{row}]'.encode())
    assert list(lines) == ["line 2"]
    assert words in lines["line 2"]
    assert list(array) == ["line 2 (row 2)"]
    assert words in array["line 2 (row 2)"]


async def test_a_backslash_before_u0000_is_only_text() -> None:
    assert await rows_of(rb'{"a": "\\u0000"}') == [r'{"a":"\\u0000"}']


async def test_problems_are_gathered_up_to_the_limit() -> None:
    assert list(await problems_of(b"1\n2\n{}\n3\n4\n5\n")) == ["line 1", "line 2", "line 4"]


@pytest.mark.parametrize(
    ("body", "path", "words"),
    [
        (b"", "line 1", "empty"),
        (b" \n\n", "line 1", "empty"),
        (b"[]", "line 1", "empty"),
        (b"[{}", "line 1 (row 2)", "add ]"),
        (b'[{"a": ', "line 1 (row 1)", "not JSON"),
        (b"[{}\n{}]", "line 2 (row 2)", "expected , or ]"),
        (b"[{}] {}", "line 1 (row 2)", "after the end"),
        (b'[{"a" 1, "long": "enough that more is known to come"}]', "line 1 (row 1)", "not JSON"),
        (b"{}\n\xff{}", "byte 3", "not UTF-8"),
        (b'{}\n{"a": "\xc3', "byte 10", "not UTF-8"),
        (b"{oops}", "line 1", "column 2"),
        (b"[" + b"[" * 5000, "line 1 (row 1)", ""),
    ],
)
async def test_an_invalid_upload_is_refused_with_the_line(body: bytes, path: str, words: str) -> None:
    found = await problems_of(body, 3)
    assert list(found) == [path]
    assert words in found[path]


async def test_an_endless_line_is_refused_at_the_limit() -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield b'{"a": "'
        while True:
            yield b"x" * 100

    with pytest.raises(BadUpload, match="refused"):
        await anext(read_rows(endless(), LIMITS))


async def test_more_than_the_limit_is_too_large_even_when_every_row_is_good() -> None:
    with pytest.raises(UploadTooLarge, match="exceeds 10 bytes"):
        await rows_of(b"{}\n" * 10, 3, Limits(upload_bytes=10, row_bytes=10, problems=3))
