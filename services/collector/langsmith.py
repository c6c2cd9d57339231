"""LangSmith's ingest, multipart and JSON, into spans with the attributes that its OpenTelemetry exporter writes.

A client sends a run twice, as `post` when it begins and as `patch` when it ends, and the second has its name, type and
times, too. So a run is stored once an operation has its end, and whatever begins and never ends is not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import orjson

from leyden.services.collector.conventions import Limits, Sender, SpanRejected, is_pause, span_row
from leyden.services.collector.decode import Rows
from leyden.services.collector.otlp import STATUS_ERROR, STATUS_OK, Attributes, WireSpan
from leyden.services.collector.wire import MAX_RECORDS, BadBody, TooMany, loads

Run = dict[str, Any]
OPERATIONS = ("post", "patch")
_FIELDS = frozenset({"inputs", "outputs", "error", "extra"})
_NAME = re.compile(rb'\bname="([^"]{1,300})"')
_PYTHON = re.compile(r"(\w{1,100})\(")
_ANY = re.compile(r"^(\w{0,100}(?:Error|Exception))\b", re.MULTILINE)


class Multipart:
    """Reads bodies of `POST /runs/multipart` with one boundary."""

    def __init__(self, boundary: str) -> None:
        self._boundary = boundary.encode()

    def __call__(self, body: bytes, /, *, json: bool, sender: Sender, rewards_granted: bool) -> Rows:
        """The spans of the runs that end in a body.

        Raises: BadBody; TooMany
        """
        runs: dict[str, Run] = {}
        for count, (name, content) in enumerate(_parts(body, self._boundary)):
            if count >= MAX_RECORDS:
                raise TooMany
            operation, _, rest = name.partition(".")
            run_id, _, part = rest.partition(".")
            if operation not in OPERATIONS or part not in {"", *_FIELDS}:
                # Events, attachments and feedback are not kept.
                continue
            # Inputs and outputs of most runs are whole conversations, and stay the texts that they are.
            found = content.decode(errors="replace") if part in {"inputs", "outputs"} else loads(content)
            _merge(runs.setdefault(run_id, {}), {part: found} if part else _object(found))
        return _rows(list(runs.values()), sender)


def decode_batch(body: bytes, *, json: bool, sender: Sender, rewards_granted: bool) -> Rows:
    """The spans of the runs that end in a body of `POST /runs/batch`.

    Raises: BadBody; TooMany
    """
    document = _object(loads(body))
    runs: dict[str, Run] = {}
    for operation in OPERATIONS:
        sent = document.get(operation, [])
        if not isinstance(sent, list):
            raise BadBody(f"not a batch of runs: {operation} is no list")
        if len(sent) > MAX_RECORDS:
            raise TooMany
        for run in sent:
            _merge(runs.setdefault(str(_object(run).get("id")), {}), run)
    return _rows(list(runs.values()), sender)


def decode_run(body: bytes, *, json: bool, sender: Sender, rewards_granted: bool, run_id: str | None = None) -> Rows:
    """The span of a body of `POST /runs` or `PATCH /runs/{id}`; none where the run has not ended.

    Args:   run_id: that of the path, of a body without any
    Raises: BadBody
    """
    return _rows([{"id": run_id, **_object(loads(body))}], sender)


def _parts(body: bytes, boundary: bytes) -> Iterator[tuple[str, bytes]]:
    """The names and contents of a form's parts (RFC 7578). Raises: BadBody."""
    first, *parts = body.split(b"--" + boundary)
    if first.strip() or not parts or parts.pop().strip() != b"--":
        raise BadBody("not a multipart form with the boundary of its content type, or cut short")
    for part in parts:
        head, found, content = part.partition(b"\r\n\r\n")
        name = _NAME.search(head)
        if not found or name is None:
            raise BadBody("not a multipart form: a part has no name")
        yield name[1].decode(errors="replace"), content.removesuffix(b"\r\n")


def _object(found: Any) -> Run:
    if not isinstance(found, dict):
        raise BadBody("not a run: no JSON object")
    return found


def _merge(run: Run, operation: Run) -> None:
    """Adds an operation's facts; a later one that lacks a fact keeps the earlier one's."""
    run |= {name: value for name, value in operation.items() if value is not None}


def _rows(runs: list[Run], sender: Sender) -> Rows:
    rows, limits = Rows(), Limits()
    for run in runs:
        if run.get("end_time") is None:
            continue
        try:
            span = _span(run)
            if span is not None:
                rows.spans.append(span_row(span, sender, limits))
        except SpanRejected as error:
            rows.rejected += 1
            rows.message = str(error)
        except RecursionError:
            rows.rejected += 1
            rows.message = "a field of a run is nested too deep"
    return rows


def _span(run: Run) -> WireSpan | None:
    """The span of a run that has ended; None where LangGraph paused it. Raises: SpanRejected."""
    error = run.get("error")
    error_type = _error_type(str(error)) if error else None
    if is_pause(error_type):
        return None
    return WireSpan(
        trace_id=_uuid(run.get("trace_id") or run.get("id")),
        # The first half of a version 7 is little more than the time: two runs of one millisecond could share it.
        span_id=_uuid(run.get("id"))[16:],
        parent_span_id=_uuid(run.get("parent_run_id"))[16:],
        name=str(run.get("name") or ""),
        start_ns=_nanoseconds(run.get("start_time")),
        end_ns=_nanoseconds(run.get("end_time")),
        status_code=STATUS_ERROR if error else STATUS_OK,
        scope="langsmith",
        attributes=_attributes(run, str(error) if error else None, error_type),
    )


def _attributes(run: Run, error: str | None, error_type: str | None) -> Attributes:
    kind, inputs, outputs = str(run.get("run_type") or "chain"), run.get("inputs"), run.get("outputs")
    extra = _fields(run, "extra")
    metadata = _fields(extra, "metadata")
    tool_call_id = extra.get("tool_call_id") or metadata.get("tool_call_id")
    found = {
        "langsmith.span.kind": kind,
        "gen_ai.tool.call.id": tool_call_id if kind == "tool" and isinstance(tool_call_id, str) else None,
        "gen_ai.prompt": _text(inputs),
        "gen_ai.completion": _text(outputs),
        "error.type": error_type,
        "exception.message": error,
        **{f"langsmith.metadata.{name}": value for name, value in metadata.items() if _is_own(name, value)},
    }
    return {name: value for name, value in found.items() if value is not None}


def _is_own(name: str, value: Any) -> bool:
    """Whether metadata are the agent's: clients send their environment, too."""
    return isinstance(value, str | int | float) and not name.startswith(("LANGSMITH_", "LANGCHAIN_"))


def _text(value: Any) -> str | None:
    """Inputs or outputs as JSON. Raises: SpanRejected."""
    if isinstance(value, str) or value is None:
        return value
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError as error:
        # It reads deeper than it writes.
        raise SpanRejected(f"a run's inputs or outputs are nested too deep: {error}") from error


def _fields(holder: Run, name: str) -> Run:
    found = holder.get(name)
    return found if isinstance(found, dict) else {}


def _error_type(error: str) -> str:
    """The exception's type: of Python's `ValueError('…')…`, or of a stack of JavaScript's."""
    found = _PYTHON.match(error) or _ANY.search(error)
    return found[1] if found else "error"


def _uuid(value: Any) -> str:
    """Hex digits of a UUID; no others, for `span_row` to reject."""
    digits = str(value or "").replace("-", "").lower()
    return digits if re.fullmatch(r"[0-9a-f]{32}", digits) else ""


def _nanoseconds(value: Any) -> int:
    """A time as clients write it: ISO 8601, in UTC where it says nothing else, or milliseconds since the epoch.

    Raises: SpanRejected
    """
    try:
        if isinstance(value, int | float) and not isinstance(value, bool):
            # Microseconds first: nanoseconds exceed what a float counts one by one.
            return int(value * 1000) * 1000
        time = datetime.fromisoformat(str(value))
        if time.tzinfo is None:
            time = datetime.fromisoformat(f"{value}+00:00")
        seconds = int(time.replace(microsecond=0).timestamp())
    except (ValueError, OverflowError) as error:
        raise SpanRejected(f"a run needs start_time and end_time as ISO 8601 or in milliseconds: {error}") from error
    return seconds * 10**9 + time.microsecond * 1000
