"""One output of an agent: its end, and the last lines that may hold a reward, however much follows them.

Memory is bounded. The supervisor imports this file, so it uses the standard library's fast modules alone.
"""

from __future__ import annotations

from collections import deque

MAX_LINE_BYTES = 256 * 1024
"""The largest line with a reward; of a longer one, one byte more is kept."""
CANDIDATES = 8
"""Lines that look like rewards and may not be; the last that is one counts."""
_MARK = b'"reward'


class Output:
    """The end of a stream and its lines that may hold a reward."""

    def __init__(self) -> None:
        self.tail = bytearray()
        self._found: deque[bytes] = deque(maxlen=CANDIDATES)
        self._begin_line()

    def add(self, chunk: bytes, limit: int) -> None:
        """Adds a chunk. At most twice the limit stays of the end."""
        self.tail += chunk
        if len(self.tail) > 2 * limit:
            del self.tail[:-limit]
        first, *others = chunk.split(b"\n")
        self._add(first)
        for part in others:
            self._end_line()
            self._add(part)

    def last(self, limit: int) -> bytes:
        """The last bytes of the stream."""
        return bytes(self.tail[-limit:])

    def reward_lines(self) -> bytes:
        """The last lines that begin an object and name a reward, in order, cut behind MAX_LINE_BYTES."""
        self._end_line()
        return b"\n".join(self._found)

    def _begin_line(self) -> None:
        self._line = bytearray()
        self._has_mark = False
        self._seen = b""

    def _add(self, part: bytes) -> None:
        self._line += part[: MAX_LINE_BYTES + 1 - len(self._line)]
        if not self._has_mark:
            window = self._seen + part
            self._has_mark = _MARK in window
            self._seen = window[1 - len(_MARK) :]

    def _end_line(self) -> None:
        if self._has_mark and self._line.lstrip().startswith(b"{"):
            is_cut = len(self._line) > MAX_LINE_BYTES
            self._found.append(bytes(self._line) + (_MARK if is_cut else b""))
        self._begin_line()
