"""structlog as JSON lines: event first, then level, time, service and facts. A processor masks secrets."""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import orjson

from leyden.libs.telemetry.imports import without_rich

with without_rich():
    import structlog
    from structlog.typing import EventDict, Processor, WrappedLogger

REDACTED = "[redacted]"

_SECRET_NAMES = frozenset(
    {
        "authorization", "api_key", "apikey", "x-api-key", "api-key", "x-goog-api-key", "cookie", "password", "secret",
        "token", "access_token", "capability", "prompt", "messages", "prompt_ids", "sampled_ids", "token_ids",
        "headers", "environment",
    }
)  # fmt: skip
# A bearer or JSON web token anywhere in a text, and the password of a URL.
_SECRET_TEXT = re.compile(
    r"(?P<bearer>\bBearer\s+)[^\s\"',]+|\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*|(?P<url>://[^\s:/@]*:)[^\s@/]+(?=@)",
    re.IGNORECASE,
)


def configure_logs(service: str, level: str = "info") -> None:
    """Sends structlog and the standard library's loggers to stdout as JSON lines.

    Args: service: a field of every line; level: debug, info, warning or error.
    """
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
        structlog.processors.format_exc_info,
        _service_processor(service),
        redact,
    ]
    structlog.configure(
        processors=[*shared, _event_first, structlog.processors.JSONRenderer(serializer=_dumps)],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stdout),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                _event_first,
                structlog.processors.JSONRenderer(serializer=_dumps),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # Libraries log only warnings and errors.
    root.setLevel(max(number, logging.WARNING))


def logger() -> structlog.typing.FilteringBoundLogger:
    """Returns structlog's logger with its type."""
    return cast(structlog.typing.FilteringBoundLogger, structlog.get_logger())


class RateLimitedLogger:
    """Limits each event to one line in `seconds`, the first at once: for warnings that repeat during an outage.

    The field `suppressed` counts the lines omitted since the last one.
    """

    def __init__(
        self,
        log: structlog.typing.FilteringBoundLogger,
        seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._seconds = seconds
        self._clock = clock
        self._written: dict[str, float] = {}
        self._suppressed: Counter[str] = Counter()

    def warning(self, event: str, **facts: object) -> None:
        """Writes a line, or counts it as suppressed."""
        now = self._clock()
        if now < self._written.get(event, -math.inf) + self._seconds:
            self._suppressed[event] += 1
            return
        self._written[event] = now
        suppressed = self._suppressed.pop(event, 0)
        self._log.warning(event, **facts, **({"suppressed": suppressed} if suppressed else {}))


@contextmanager
def bind(**facts: object) -> Iterator[None]:
    """Adds fields to every line inside the block, and inside tasks that start there."""
    # Why: structlog's `bound_contextvars` copies all context variables, twice.
    tokens = structlog.contextvars.bind_contextvars(**facts)
    try:
        yield
    finally:
        structlog.contextvars.reset_contextvars(**tokens)


def redact(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Masks values of secret fields, and bearer tokens, JSON web tokens and URL passwords inside texts.

    >>> redact(None, "info", {"event": "asked", "api_key": "k", "detail": "Bearer abc"})
    {'event': 'asked', 'api_key': '[redacted]', 'detail': 'Bearer [redacted]'}
    """
    for name, value in event.items():
        event[name] = _redacted(name, value)
    return event


def _redacted(name: str, value: Any) -> Any:
    if name.lower() in _SECRET_NAMES:
        return REDACTED
    if isinstance(value, str):
        lower = value.lower()
        # Why: the regular expression costs several times as much as these substring tests.
        may_match = "://" in lower or "eyj" in lower or "bearer" in lower
        return _SECRET_TEXT.sub(_mask, value) if may_match else value
    if isinstance(value, Mapping):
        return {key: _redacted(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_redacted("", item) for item in value]
    return value


def _mask(match: re.Match[str]) -> str:
    return (match["bearer"] or match["url"] or "") + REDACTED


def _service_processor(service: str) -> Processor:
    def add_service(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event.setdefault("service", service)
        return event

    return add_service


def _event_first(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    head = {name: event.pop(name) for name in ("event", "level", "ts", "service") if name in event}
    return {**head, **event}


def _dumps(event: EventDict, **_: object) -> str:
    try:
        return orjson.dumps(event, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
    except TypeError:
        # An agent's text with half of a surrogate pair: a line that cannot be written would end what logs it.
        return json.dumps(event, default=str)
