"""An engine's event stream: of each event only what no earlier one has told is read.

SGLang's events are cumulative: each repeats all tokens so far, which read whole would cost the square of their number.
The text of an event begins like that of the one before it, byte for byte, so that the known part is compared, cut out,
and never parsed again. With `--incremental-streaming-output` each event tells its own tokens alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter

import orjson

from services.gateway.request import Json

DONE = b"[DONE]"


class Events:
    """The events of a stream that is cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""

    def of(self, piece: bytes) -> list[bytes]:
        """The events, as JSON texts, that are whole with this piece."""
        if (
            not self._rest
            and piece.startswith(b"data:")
            and piece.find(b"\n") == len(piece) - 2
            and piece.endswith(b"\n")
        ):
            # As engines send them: one alone, and whole.
            return [piece[5:-2]] if _is_told(piece[5:-2]) else []
        text = self._rest + piece if self._rest else piece
        # Most arrive whole: they are long, and copied as seldom as can be.
        whole, self._rest = (text, b"") if text.endswith(b"\n\n") else text.rpartition(b"\n\n")[::2]
        return list(_events(whole))


def _events(text: bytes) -> Iterator[bytes]:
    start = 0
    while start < len(text):
        # `split` looks at every byte by itself: of long lines that is most of the cost.
        end = text.find(b"\n", start)
        end = len(text) if end < 0 else end
        if text.startswith(b"data:", start):
            event = text[start + 5 : end]
            if _is_told(event):
                yield event
        start = end + 1


def _is_told(event: bytes) -> bool:
    return len(event) > 2 * len(DONE) or event.strip() != DONE


@dataclass(slots=True)
class _Growing:
    """A JSON list that grows from event to event. `closing` ends its last item and it; `text` is its text without the
    last bracket, as far as it is known. `named` and `start` are where its name and it itself stood last.
    """

    name: bytes
    closing: bytes
    text: bytearray = field(default_factory=bytearray)
    named: int = 0
    start: int = 0

    def grow(self, event: bytes) -> tuple[bytes, int]:
        """What an event adds to the known text, and where the list ends in it; known from now on.

        Raises: ValueError: the list is not there, or not as it was, and must be forgotten
        """
        text = self.text
        # What stands before it may have grown, too.
        self.named = event.index(self.name, self.named)
        self.start = start = event.index(b"[", self.named)
        if not event.startswith(text, start):
            raise ValueError("an event does not repeat what an earlier one told")
        known = start + len(text)
        end = event.index(self.closing, known - 1 if text else start) + len(self.closing) - 1
        new = event[known:end]
        if b'"' in new:
            raise ValueError("a text may hold brackets, so nobody knows where the list ends")
        text += new
        return new, end

    def forget(self) -> None:
        """Begins anew."""
        self.text.clear()
        self.named = self.start = 0


class Told:
    """What one stream has told so far.

    Args: cuts: whether the known part of cumulative events is cut out; no list but those of tokens and their
        log-probabilities may then be of interest
    """

    def __init__(self, *, cuts: bool) -> None:
        self._cuts = cuts
        self._count = 0
        self._counts_hold = False
        self._is_incremental: bool | None = None
        self._lists = [_Growing(b'"output_ids"', b"]"), _Growing(b'"output_token_logprobs"', b"]]")]

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
        if self._count and self._is_incremental is False and self._cuts:
            # An event that is not as expected is read whole, and refused there when it is wrong.
            with suppress(ValueError):
                return self._rest(event)
        document: Json = orjson.loads(event)
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
        for growing in self._lists:
            growing.forget()
            with suppress(ValueError):
                growing.grow(event)
                if not is_even:
                    growing.text.clear()
        self._lists.sort(key=attrgetter("start"))

    def _rest(self, event: bytes) -> tuple[Json, int]:
        """Raises: ValueError: the event must be read whole"""
        parts, at = list[bytes](), 0
        for growing in self._lists:
            is_known = bool(growing.text)
            new, end = growing.grow(event)
            new = new.lstrip()
            if new and not (is_known and new.startswith(b",")):
                raise ValueError("an item goes on where the known text ends")
            if growing.start < at:
                raise ValueError("the lists have changed places")
            parts += (event[at : growing.start], b"[", new[1:])
            at = end
        document = orjson.loads(b"".join((*parts, event[at:])))
        new_tokens = len(document["output_ids"])
        if len(document["meta_info"]["output_token_logprobs"]) != new_tokens:
            raise ValueError("tokens without log-probabilities, or the other way round")
        first, self._count = self._count, self._count + new_tokens
        return document, first
