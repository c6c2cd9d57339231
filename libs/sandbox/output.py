"""One output of an agent: its end, and its last line with a reward, however much follows it.

Memory is bounded. The supervisor imports this file, so it uses the standard library's fast modules alone.
"""

from __future__ import annotations

MAX_LINE_BYTES = 256 * 1024
"""The largest line with a reward; of a longer one, one byte more is kept."""
_NAMES = b'"reward"', b'"rewards"'


class Output:
    """The end of a stream and its last line with a reward."""

    def __init__(self) -> None:
        self.tail = bytearray()
        self._reward_line = b""
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

    def reward_line(self) -> bytes:
        """The last line with a reward, cut behind MAX_LINE_BYTES; empty where there is none."""
        self._end_line()
        return self._reward_line

    def _begin_line(self) -> None:
        self._line = bytearray()
        self._has_name = False
        self._seen = b""

    def _add(self, part: bytes) -> None:
        self._line += part[: MAX_LINE_BYTES + 1 - len(self._line)]
        if not self._has_name:
            window = self._seen + part
            self._has_name = any(name in window for name in _NAMES)
            self._seen = window[-len(_NAMES[-1]) :]

    def _end_line(self) -> None:
        line = self._line.strip()
        if self._has_name and line.startswith(b"{") and _has_reward(line):
            self._reward_line = bytes(line)
        self._begin_line()


def _has_reward(line: bytearray) -> bool:
    """Whether a line is an object with `reward` or `rewards`. One that is cut or broken has what it names."""
    # Here: the import takes longer than the rest of a supervisor's start.
    import json

    try:
        found = json.loads(line.decode(errors="replace"))
    except (ValueError, RecursionError):
        return True
    return "reward" in found or "rewards" in found
