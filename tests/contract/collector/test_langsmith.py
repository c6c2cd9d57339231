"""Posts of LangSmith's clients become spans: recorded from langsmith 0.15.0 (Python) and 0.12.0 (JavaScript)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from leyden.libs.contracts.capability import Scope
from leyden.libs.store import tables
from tests.contract.collector.test_otlp import Collector, collector  # noqa: F401  # the fixture

BOUNDARY = "ae3773cfa17d457c96e18d7c8a8b8d9b"
HEADERS = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
SLOW = "01a21cff-e62d-75b0-a6c0-dd5947ef8b5e"
FAILED = "01a21cff-ec27-769d-944d-6780e0a960d9"
OVERFLOWING = "01a21cff-ec27-769d-944d-6780e0a960da"
RUNTIME = {"sdk": "langsmith-py", "library": "langchain-core"}
METADATA = {"LANGSMITH_TRACING": "true", "LANGSMITH_ENDPOINT": "http://collector/r/x/1/langsmith", "revision_id": "d4"}


def run(run_id: str, **facts: Any) -> dict[str, Any]:
    return {
        "id": run_id,
        "start_time": "2026-11-27T12:34:22.382045+00:00",
        "tags": [],
        "dotted_order": f"20261127T123422382045Z{run_id}",
        "trace_id": run_id,
        "session_name": "default",
        "name": "get_weather",
        "run_type": "tool",
        **facts,
    }


def extra(call: int) -> dict[str, Any]:
    return {
        "color": "green",
        "tool_call_id": f"call_c0123456789abcdef01234567_{call}",
        "runtime": RUNTIME,
        "metadata": METADATA,
    }


def form(*parts: tuple[str, Any], boundary: str = BOUNDARY) -> bytes:
    """The parts as the client for Python writes them."""
    lines = []
    for name, document in parts:
        content = json.dumps(document, separators=(",", ":"))
        lines += [f"--{boundary}", f'Content-Disposition: form-data; name="{name}"', "Content-Type: application/json"]
        lines += [f"Content-Length: {len(content)}", "", content]
    return "\r\n".join([*lines, f"--{boundary}--", ""]).encode()


STARTED = form(
    (f"post.{SLOW}", run(SLOW)),
    (f"post.{SLOW}.inputs", {"city": "Rome"}),
    (f"post.{SLOW}.outputs", {}),
    (f"post.{SLOW}.events", [{"name": "start", "time": "2026-11-27T12:34:22.382045+00:00"}]),
    (f"post.{SLOW}.extra", extra(0)),
)
MESSAGE = {"content": "light rain", "type": "tool", "tool_call_id": "call_c0123456789abcdef01234567_0"}
ENDED = form(
    (f"post.{FAILED}", run(FAILED, end_time="2026-11-27T12:34:23.913000+00:00")),
    (f"post.{FAILED}.inputs", {"city": "Atlantis"}),
    (f"post.{FAILED}.outputs", {}),
    (f"post.{FAILED}.extra", extra(1)),
    (
        f"post.{FAILED}.error",
        "ValueError('city not found')Traceback (most recent call last):\n\nValueError: city not found",
    ),
    (f"patch.{SLOW}", run(SLOW, end_time="2026-11-27T12:34:23.910193+00:00", parent_run_id=None, session_id=None)),
    (f"patch.{SLOW}.inputs", {"city": "Rome"}),
    (f"patch.{SLOW}.outputs", {"output": {**MESSAGE, "status": "success"}}),
    (f"patch.{SLOW}.extra", extra(0)),
)


def facts(spans: Sequence[tables.Span]) -> list[tuple[str | None, str, str | None, str | None]]:
    return [(span.tool, f"{span.status}", span.error_type, span.tool_call_id) for span in spans]


async def test_the_runs_of_tools_become_spans_when_they_end(collector: Collector) -> None:  # noqa: F811
    assert (await collector.post("/langsmith/runs/multipart", STARTED, HEADERS)).status_code == 202
    assert await collector.spans() == []
    answers = [await collector.post("/langsmith/runs/multipart", ENDED, HEADERS) for _ in range(2)]
    assert [(answer.status_code, answer.json()) for answer in answers] == [(202, {}), (202, {})]
    spans = sorted(await collector.spans(), key=lambda span: str(span.tool_call_id))
    assert facts(spans) == [
        ("get_weather", "ok", None, "call_c0123456789abcdef01234567_0"),
        ("get_weather", "error", "ValueError", "call_c0123456789abcdef01234567_1"),
    ]
    [slow, failed] = spans
    assert (slow.trace_id, slow.span_id, slow.parent_span_id) == (SLOW.replace("-", ""), "a6c0dd5947ef8b5e", None)
    assert slow.end_ns - slow.start_ns == 1_528_148_000
    assert slow.attributes["gen_ai.prompt"] == '{"city":"Rome"}'
    assert failed.attributes["exception.message"].startswith("ValueError('city not found')")
    # The client's environment, which names the attempt.
    assert not [name for name in slow.attributes if "LANGSMITH_" in name]


async def test_javascripts_times_boundaries_and_messages_are_read(collector: Collector) -> None:  # noqa: F811
    boundary = "----LangSmithFormBoundarywj0yic9jen"
    kwargs = {"status": "error", "content": "Tool error: gone", "tool_call_id": "call_c0123456789abcdef01234567_0"}
    outputs = {"output": {"lc": 1, "type": "constructor", "id": ["langchain_core"], "kwargs": kwargs}}
    times = {"start_time": "2026-11-27T12:34:44.073001Z", "end_time": 1795782884123}
    child = run(FAILED, **times, parent_run_id=SLOW, trace_id=SLOW)
    sent = form(
        (f"post.{SLOW}", run(SLOW, **times)),
        (f"post.{SLOW}.outputs", outputs),
        (f"post.{FAILED}", child),
        (
            f"post.{FAILED}.error",
            "city not found: Atlantis\n\nError: city not found: Atlantis\n    at a.mjs",
        ),
        boundary=boundary,
    )
    answer = await collector.post(
        "/langsmith/runs/multipart", sent, {"content-type": f"multipart/form-data; boundary={boundary}"}
    )
    assert answer.status_code == 202
    spans = await collector.spans()
    assert {(span.status, span.error_type, span.parent_span_id) for span in spans} == {
        ("error", None, None),
        ("error", "Error", "a6c0dd5947ef8b5e"),
    }
    assert {span.end_ns - span.start_ns for span in spans} == {49_999_000}


async def test_a_batch_and_a_single_run_are_read_as_well(collector: Collector) -> None:  # noqa: F811
    ended = {"end_time": "2026-11-27T12:34:23.910193+00:00"}
    batch = {
        "post": [run(SLOW, inputs={"city": "Rome"}, extra=extra(0))],
        "patch": [{"id": SLOW, "trace_id": SLOW, **ended, "outputs": {"output": "rain"}, "inputs": None}],
    }
    as_json = {"content-type": "application/json"}
    assert (await collector.post("/langsmith/runs/batch", json.dumps(batch), as_json)).status_code == 202
    single = json.dumps(run(FAILED, **ended, error="GraphInterrupt((Interrupt(value=1),))"))
    assert (await collector.post("/langsmith/runs", single, as_json)).status_code == 202
    authorization = {"authorization": f"Bearer {collector.key()}"}
    patched = run(FAILED, **ended, run_type="llm", outputs={"id": "chatcmpl-c0123456789abcdef01234567"})
    # As the JavaScript client does where it sends no batches: the path alone names the run.
    patch = json.dumps({name: value for name, value in patched.items() if name != "id"})
    answer = await collector.client.patch(
        f"{collector.url}/langsmith/runs/{FAILED}", content=patch, headers={**authorization, **as_json}
    )
    assert answer.status_code == 202
    tool, model = sorted(await collector.spans(), key=lambda span: span.kind, reverse=True)
    assert facts([tool]) == [("get_weather", "ok", None, "call_c0123456789abcdef01234567_0")]
    assert tool.attributes["gen_ai.prompt"] == '{"city":"Rome"}'
    # The pause of the graph before it is none of its own.
    assert (model.kind, model.response_id, model.status) == ("llm", "chatcmpl-c0123456789abcdef01234567", "ok")


async def test_clients_learn_what_the_collector_takes(collector: Collector) -> None:  # noqa: F811
    answer = await collector.client.get(f"{collector.url}/langsmith/info", headers={"x-api-key": collector.key()})
    assert answer.json()["batch_ingest_config"]["use_multipart_endpoint"] is True
    assert answer.json()["batch_ingest_config"]["size_limit_bytes"] == 2 * 2**20


async def test_the_key_alone_names_the_attempt_and_opens_no_other(collector: Collector) -> None:  # noqa: F811
    root = collector.url.partition("/r/")[0]
    headers = {**HEADERS, "x-api-key": collector.key()}
    answer = await collector.client.post(f"{root}/langsmith/runs/multipart", content=ENDED, headers=headers)
    assert (answer.status_code, len(await collector.spans())) == (202, 2)
    other = f"{root}/r/another/1/langsmith/runs/multipart"
    assert (await collector.client.post(other, content=ENDED, headers=headers)).status_code == 403
    unused = {**HEADERS, "x-api-key": "unused"}
    url = f"{collector.url}/langsmith/runs/multipart"
    assert (await collector.client.post(url, content=ENDED, headers=unused)).status_code == 401
    rewards = collector.key(frozenset({Scope.REWARD}))
    assert (await collector.post("/langsmith/runs/multipart", ENDED, HEADERS, rewards)).status_code == 403


@pytest.mark.parametrize(
    ("path", "content", "headers", "status"),
    [
        ("multipart", ENDED, {"content-type": "application/json"}, 415),
        ("multipart", ENDED, {"content-type": "multipart/form-data"}, 415),
        ("multipart", ENDED[:-10], HEADERS, 400),
        ("multipart", b"", HEADERS, 400),
        ("multipart", f"--{BOUNDARY}\r\n\r\n1\r\n--{BOUNDARY}--".encode(), HEADERS, 400),
        ("multipart", form((f"post.{SLOW}", 5)), HEADERS, 400),
        ("multipart", form((f"post.{SLOW}", run(SLOW))).replace(b'"id"', b"id"), HEADERS, 400),
        ("multipart", form(*[(f"post.{n}.extra", {}) for n in range(20_001)]), HEADERS, 413),
        ("multipart", bytes(4 * 2**20 + 1), HEADERS, 413),
        ("multipart", ENDED, {**HEADERS, "content-encoding": "zstd"}, 415),
        ("batch", b"[", {}, 400),
        ("batch", b"[]", {}, 400),
        ("batch", b'{"post": {}}', {}, 400),
        ("batch", b'{"post": [5]}', {}, 400),
        ("batch", b'{"post": %s}' % json.dumps([{}] * 20_001).encode(), {}, 413),
    ],
)
async def test_bad_data_gets_an_error_status(
    collector: Collector,  # noqa: F811
    path: str,
    content: bytes,
    headers: dict[str, str],
    status: int,
) -> None:
    headers = {"content-type": "application/json"} | headers
    answer = await collector.post(f"/langsmith/runs/{path}", content, headers)
    assert (answer.status_code, await collector.spans()) == (status, []), answer.text


async def test_runs_with_bad_ids_or_times_are_left_out_and_counted(collector: Collector) -> None:  # noqa: F811
    ended = {"end_time": "2026-11-27T12:34:23.910193+00:00"}
    broken = [run("x", **ended), run(FAILED, end_time="soon"), run(FAILED, end_time=1e300)]
    runs = [*broken, run(OVERFLOWING, **ended, start_time=1e306), run(SLOW, **ended)]
    answer = await collector.post(
        "/langsmith/runs/batch", json.dumps({"post": runs}), {"content-type": "application/json"}
    )
    assert (answer.status_code, answer.json()["rejected"]) == (202, 3)
    assert [span.trace_id for span in await collector.spans()] == [SLOW.replace("-", "")]


async def test_runs_nested_too_deep_to_be_written_are_left_out_and_counted(collector: Collector) -> None:  # noqa: F811
    ended: dict[str, Any] = {"end_time": "2026-11-27T12:34:23.910193+00:00"}
    deep: list[Any] = []
    for _ in range(300):
        deep = [deep]
    broken = [run(FAILED, **ended, inputs={"a": deep}), run(OVERFLOWING, **ended, outputs={"a": deep})]
    # No failure of its own: text that is no JSON.
    runs = [*broken, run(SLOW, **ended, run_type="tool", outputs="an error of the tool")]
    answer = await collector.post(
        "/langsmith/runs/batch", json.dumps({"post": runs}), {"content-type": "application/json"}
    )
    assert (answer.status_code, answer.json()["rejected"]) == (202, 2)
    assert "nested too deep" in answer.json()["message"]
    assert len(await collector.spans()) == 1


async def test_a_text_cut_inside_an_emoji_costs_no_batch(collector: Collector) -> None:  # noqa: F811
    """JavaScript cuts texts in units of UTF-16, and writes the half as an escape that is no Unicode."""
    ended: dict[str, Any] = {"end_time": "2026-11-27T12:34:23.910193+00:00"}
    runs = [run(FAILED, **ended, inputs={"a": "HALF"}), run(SLOW, **ended)]
    body = json.dumps({"post": runs}).replace("HALF", "\\\\ud83d \\ud83d\\ude00 \\ud83d")
    answer = await collector.post("/langsmith/runs/batch", body, {"content-type": "application/json"})
    assert (answer.status_code, answer.json()) == (202, {})
    [cut] = [span for span in await collector.spans() if span.trace_id == FAILED.replace("-", "")]
    assert json.loads(cut.attributes["gen_ai.prompt"]) == {"a": "\\ud83d \U0001f600 \ufffd"}
