"""A valid `traceparent` is continued; any other text starts a new trace."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from leyden.libs.telemetry import extract, inject, parse_traceparent, span

IDS = st.tuples(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.integers(0, 255))
NEAR = st.from_regex(r"\A[0-9a-fA-F]{1,3}-[0-9a-g]{31,33}-[0-9a-g]{15,17}-[0-9a-g]{1,3}(-.*)?\Z")


@given(IDS)
def test_what_is_well_formed_is_continued(ids: tuple[int, int, int]) -> None:
    trace, parent, flags = ids
    text = f"00-{trace:032x}-{parent:016x}-{flags:02x}"
    assert parse_traceparent(text) == (f"{trace:032x}", f"{parent:016x}")
    with span("inner", parent=text):
        assert parse_traceparent(inject()).trace_id == f"{trace:032x}"


@given(NEAR | st.text(max_size=80) | st.binary(max_size=80).map(lambda raw: raw.decode("latin-1")))
def test_any_traceparent_gives_a_span_with_valid_ids(text: str) -> None:
    told = parse_traceparent(text)
    assert told is None or (len(told.trace_id), len(told.span_id)) == (32, 16)
    assert told is None or told.trace_id.isascii()
    extract(text)
    with span("inner", parent=text):
        assert parse_traceparent(inject()) is not None
