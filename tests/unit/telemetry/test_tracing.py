import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from leyden.libs.telemetry import inject, parse_traceparent, span, tracing

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(autouse=True, params=["exported", "unread"])
def exported(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows holds whether or not the process's spans go anywhere."""
    tracer = TracerProvider(sampler=ALWAYS_ON).get_tracer("leyden") if request.param == "exported" else None
    monkeypatch.setattr(tracing, "_tracer", tracer)


def test_a_span_continues_its_parent_and_is_the_parent_of_what_is_injected() -> None:
    assert inject() is None
    with span("outer", parent=PARENT) as outer:
        child = parse_traceparent(inject())
        assert child is not None
        assert child.trace_id == "0af7651916cd43dd8448eb211c80319c"
        assert int(child.span_id, 16) == outer.get_span_context().span_id
        with span("inner"):
            assert parse_traceparent(inject()).trace_id == child.trace_id
    assert inject() is None


def test_traces_start_sampled_so_that_agents_sdks_send_their_spans() -> None:
    with span("root"):
        assert int(inject().rpartition("-")[2], 16) & 1


@pytest.mark.parametrize("text", [None, "", "nonsense", f"00-{'0' * 32}-b7ad6b7169203331-01", PARENT[:-4]])
def test_malformed_traceparents_are_none(text: str | None) -> None:
    assert parse_traceparent(text) is None
    with span("fresh", parent=text):
        assert parse_traceparent(inject()) is not None
