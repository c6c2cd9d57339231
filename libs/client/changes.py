"""A run's changes as the API streams them: `GET /v1/events`, server-sent events with ids that resume it."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator

import httpx

from leyden.libs.client.errors import NotFound, Unreachable
from leyden.libs.client.transport import Transport
from leyden.libs.contracts.api.runs import RUN_PARTS

QUIET_SECONDS = 10.0
"""Progress inside a step and alarms have no event: whoever shows them looks again after so long."""
SILENCE_SECONDS = 6.0
"""The API writes every two seconds: a proxy that keeps its events, or a lost connection, is told by the silence."""
POLL_SECONDS = 1.0
PAUSE_SECONDS = 0.5
POLLS = 60
"""So many looks without a stream, before it is tried again."""


def run_changes(http: Transport, run_id: str) -> Generator[tuple[str, ...], None, None]:
    """Names of what changed in a run, without an end: all of them at first, each change once.

    Nothing is named when a look is due without an event: after 10 s, and while the API is away. The stream goes on
    behind the last event that came. All names come every second while no stream comes
    through, as behind a proxy that keeps it.
    """
    last: str | None = None
    told = time.monotonic()
    while True:
        is_stripped, before = False, last
        try:
            for found, names in _events(http, run_id, last):
                last = found or last
                if names or time.monotonic() - told >= QUIET_SECONDS:
                    told = time.monotonic()
                    yield names
            # The API writes an event before it ends a stream.
            is_stripped = last is before
        except NotFound:
            # An older API; whoever looks is told that there is no such run.
            is_stripped = True
        except Unreachable as error:
            is_stripped = last is before and isinstance(error.__cause__, httpx.ReadTimeout)
            if not is_stripped:
                yield ()
        for _ in range(POLLS if is_stripped else 0):
            yield RUN_PARTS
            time.sleep(POLL_SECONDS)
        time.sleep(PAUSE_SECONDS)


def _events(http: Transport, run_id: str, last: str | None) -> Iterator[tuple[str | None, tuple[str, ...]]]:
    """The id and the names of each whole event; neither for a sign of life."""
    headers = {"last-event-id": last} if last else None
    with http.stream("/v1/events", {"run": run_id}, headers=headers, silence_seconds=SILENCE_SECONDS) as chunks:
        rest = b""
        for chunk in chunks:
            *blocks, rest = (rest + chunk).split(b"\n\n")
            yield from map(_event, blocks)


def _event(block: bytes) -> tuple[str | None, tuple[str, ...]]:
    fields = dict(line.split(": ", 1) for line in block.decode(errors="replace").splitlines() if ": " in line)
    if "id" not in fields or "data" not in fields:
        return None, ()
    return fields["id"], tuple(json.loads(fields["data"]))
