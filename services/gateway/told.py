"""An engine's event stream: of each event only what no earlier one has told is read.

SGLang's events are cumulative: each repeats all tokens so far, which read whole would cost the square of their number.
The lists of an event go on where those of the one before it ended, so that what is known of them is cut out and never
parsed again. Mostly nothing else has changed but the count of tokens: then the new tokens alone are read, and no
document is made. With `--incremental-streaming-output` each event tells its own tokens alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import orjson

from leyden.services.gateway.request import Json

DONE = b"[DONE]"
_DONE_BYTES = 20
"""More than the end of a stream is long."""
_FIELD = b"data:"
_FIELD_BYTES = len(_FIELD)
_IDS = re.compile(rb'"output_ids": ?\[')
_LOGPROBS = re.compile(rb'"output_token_logprobs": ?\[')
_COMMA = ord(",")
_COUNT = b"\0"
"""Stands for the count of tokens in what is expected of an event. No JSON has it."""
_CHANCES = 4
"""How often something else may change before no event of the stream is expected to be like the last."""


class Events:
    """The events of a stream that is cut anywhere, each with the name of its field, `data:`, before it."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def of(self, piece: bytes) -> Sequence[bytes]:
        """The events that are whole with this piece."""
        if (
            not self._rest
            and piece.endswith(b"\n\n")
            and piece.find(b"\n") == len(piece) - 2
            and piece.startswith(_FIELD)
            and len(piece) > _DONE_BYTES
        ):
            # As engines send them: one alone, and whole.
            return (piece,)
        text = self._rest + piece if self._rest else piece
        # An event is one line, which some end with \r\n. Most arrive whole: long, they are copied as seldom as can be.
        whole, self._rest = (text, b"") if text.endswith(b"\n") else text.rpartition(b"\n")[::2]
        return list(_events(whole))


def _events(text: bytes) -> Iterator[bytes]:
    start = 0
    while start < len(text):
        # `split` looks at every byte by itself: of long lines that is most of the cost.
        end = text.find(b"\n", start)
        end = len(text) if end < 0 else end
        if text.startswith(_FIELD, start):
            event = text[start:end]
            if len(event) > _DONE_BYTES or event[_FIELD_BYTES:].strip() != DONE:
                yield event
        start = end + 1


class Told:
    """What one stream has told so far.

    Args: cuts: whether the known part of cumulative events is cut out; no list but those of tokens and their
        log-probabilities may then be of interest
    """

    # One block of memory each: those of hundreds of streams do not stay in the caches.
    __slots__ = (
        "_between", "_chances", "_count", "_counts_hold", "_cuts", "_ids", "_ids_at", "_ids_name",
        "_is_incremental", "_logprobs_length", "_logprobs_name", "_tail",
    )  # fmt: skip

    def __init__(self, *, cuts: bool) -> None:
        self._cuts = cuts
        self._chances = _CHANCES
        self._between = self._tail = b""
        self._count = 0
        self._counts_hold = False
        self._is_incremental: bool | None = None
        self._ids = bytearray()
        self._ids_name = self._logprobs_name = b""
        self._ids_at = self._logprobs_length = 0

    def more(self, event: bytes) -> tuple[list[int], list[list[Any]]] | None:
        """The tokens that are new with their log-probabilities, where nothing but them and the count of all is new.

        None where that is not so: then `documents` tells.
        """
        if not self._tail:
            return None
        try:
            return self._more(event)
        except (LookupError, ValueError):
            self._tail = b""
            self._chances -= 1
            return None

    def _more(self, event: bytes) -> tuple[list[int], list[list[Any]]]:
        start, known, end = self._new_ids(event)
        opened = end + len(self._between)
        more = opened + self._logprobs_length
        ids: list[int] = orjson.loads(b"[%b]" % event[known + 1 : end])
        count = self._count + len(ids)
        tail = self._tail.replace(_COUNT, b"%d" % count)
        tail_at = _end(event) - len(tail)
        if not (event.startswith(self._between, end) and event.startswith(tail, tail_at) and event[more] == _COMMA):
            raise ValueError("more is new than tokens")
        entries: list[list[Any]] = orjson.loads(b"[%b]" % event[more + 1 : tail_at])
        if len(entries) != len(ids):
            raise ValueError("tokens without log-probabilities, or the other way round")
        self._logprobs_length = tail_at - opened
        self._ids += event[known:end]
        self._ids_at = start
        self._count = count
        return ids, entries

    def documents(self, events: Sequence[bytes]) -> Iterable[tuple[Json, int]]:
        """What events that arrived together tell, and how many tokens come before the first of each document's lists.

        Of cumulative events the last tells everything.
        """
        return (self._read(events[0]),) if len(events) == 1 else self._each(events)

    def _each(self, events: Sequence[bytes]) -> Iterator[tuple[Json, int]]:
        for number, event in enumerate(events, 1):
            if self._is_incremental is not False or number == len(events):
                yield self._read(event)

    def _read(self, event: bytes) -> tuple[Json, int]:
        if self._ids:
            try:
                return self._rest(event)
            except (LookupError, TypeError, ValueError):
                # One that is not as expected is read whole, and refused there when it is wrong.
                self._ids.clear()
                self._tail = b""
        document: Json = orjson.loads(event[_FIELD_BYTES:])
        if "meta_info" not in document:
            return document, 0
        ids, meta = len(document.get("output_ids") or []), document["meta_info"]
        first = self._first(ids, meta.get("completion_tokens"))
        self._count = first + ids
        if self._is_incremental is False and self._cuts:
            self._keep(event, is_even=len(meta.get("output_token_logprobs") or []) == ids)
        return document, first

    def _first(self, ids: int, told: object) -> int:
        """How many tokens were told before those of an event. Its count of all tokens says which kind of stream it is,
        where the first event has shown that it counts what it tells.
        """
        if not ids:
            # It tells of no token, and so nothing of the kind.
            return self._count
        if self._count == 0:
            self._counts_hold = told == ids
        elif self._is_incremental is None:
            self._is_incremental = self._counts_hold and told == self._count + ids
        return self._count if self._is_incremental else 0

    def _keep(self, event: bytes, *, is_even: bool) -> None:
        """Notes where the lists stand and end: the next event is expected to go on there."""
        ids = _IDS.search(event)
        logprobs = _LOGPROBS.search(event, ids.end()) if ids else None
        self._ids.clear()
        if ids and logprobs and is_even:
            self._ids_at, self._ids_name, self._logprobs_name = ids.start(), ids.group(), logprobs.group()
            self._logprobs_length = event.find(b"]]", logprobs.end()) + 1 - logprobs.end()
            self._ids += event[ids.start() : event.find(b"]", ids.end())]

    def _rest(self, event: bytes) -> tuple[Json, int]:
        """What is new, read without what is known.

        Raises: LookupError, TypeError, ValueError: the event must be read whole
        """
        start, known, end = self._new_ids(event)
        opened = event.index(self._logprobs_name, end) + len(self._logprobs_name)
        more = opened + self._logprobs_length
        if event[more] != _COMMA:
            raise ValueError("the log-probabilities do not go on where they ended")
        document: Json = orjson.loads(b'{"output_ids":[' + event[known + 1 : opened] + event[more + 1 :])
        count = len(document["output_ids"])
        if len(document["meta_info"]["output_token_logprobs"]) != count:
            raise ValueError("tokens without log-probabilities, or the other way round")
        # A text that holds brackets may be taken for the end: the next event then does not go on there.
        closed = event.index(b"]]", more) + 1
        first = self._count
        self._count = first + count
        if self._chances:
            self._expect(document["meta_info"], event[end:opened], event[closed : _end(event)])
        self._logprobs_length = closed - opened
        self._ids += event[known:end]
        self._ids_at = start
        return document, first

    def _new_ids(self, event: bytes) -> tuple[int, int, int]:
        """Where the list of tokens begins, where what is known of it ends, and where it ends.

        Raises: ValueError, LookupError: it does not go on where it ended
        """
        # What stands before the lists may have grown, too.
        start = event.index(self._ids_name, self._ids_at)
        known = start + len(self._ids)
        end = event.index(b"]", known)
        if not (event.startswith(self._ids, start) and event[known] == _COMMA):
            raise ValueError("the tokens do not go on where they ended")
        return start, known, end

    def _expect(self, meta: Json, between: bytes, tail: bytes) -> None:
        """Notes what stands between the lists and after them, where it may be expected again: further tokens then have
        the policy version of the last one.
        """
        spans = meta.get("weight_versions") or [{"start": 0, "end": self._count}]
        goes_on = spans[-1]["start"] < self._count == spans[-1]["end"]
        self._tail = b""
        if goes_on and meta.get("finish_reason") is None:
            self._between = between
            self._tail = re.sub(rb'(": ?)%d(?=[,}\]])' % self._count, rb"\g<1>" + _COUNT, tail)


def _end(event: bytes) -> int:
    """Where it ends, without the lines after one that came alone."""
    return len(event) - 2 if event.endswith(b"\n\n") else len(event)
