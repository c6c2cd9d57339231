"""Sampled tokens as text while they come: whole characters only, and never more than may be shown yet."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from leyden.services.gateway.spelling import Spelling
from leyden.services.gateway.tools import OPEN

Decode = Callable[[Sequence[int]], str]

_INCOMPLETE = "\ufffd"


class ByteStream:
    """As `TextStream`, of tokens that are spelled in bytes: each is looked at once."""

    __slots__ = ("_begun", "_bytes_of")

    def __init__(self, spelling: Spelling) -> None:
        self._bytes_of = spelling.__getitem__
        self._begun = b""

    def feed(self, ids: Sequence[int]) -> str:
        """The characters that these tokens complete."""
        spelled = self._begun + b"".join(map(self._bytes_of, ids))
        text, used = codecs.utf_8_decode(spelled, "replace", False)
        self._begun = spelled[used:]
        return text


class TextStream:
    """The text of a growing list of tokens, decoded in a short window so that each step costs the same.

    A character whose bytes are spread over tokens is held until it is whole.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._window = self._read = 0

    def feed(self, ids: Sequence[int]) -> str:
        """The characters that these tokens complete."""
        self._ids.extend(ids)
        known = self._decode(self._ids[self._window : self._read])
        text = self._decode(self._ids[self._window :])
        if len(text) <= len(known) or text.endswith(_INCOMPLETE):
            return ""
        # One step back is enough context for tokenizers that join a space to the word after it.
        self._window, self._read = self._read, len(self._ids)
        return text[len(known) :]


def showable(text: str, stops: Sequence[str], *, calls_tools: bool) -> int:
    """How many characters of an unfinished answer may be shown.

    Held back: a stop string and what follows it, and the beginning of one at the end of the text; where tools may be
    called, the same for the mark of a tool call with the white space before it.

    >>> showable("The end", ["\\n\\nObservation"], calls_tools=False)
    7
    >>> showable("The end\\n", ["\\n\\nObservation"], calls_tools=False)
    7
    """
    marks = [*stops, OPEN] if calls_tools else stops
    length = min((_before(text, mark) for mark in marks), default=len(text))
    return len(text[:length].rstrip()) if calls_tools else length


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The text before the first stop string, and that stop string; the text itself and None where there is none."""
    found = [(position, stop) for stop in stops if (position := text.find(stop)) >= 0]
    if not found:
        return text, None
    position, stop = min(found)
    return text[:position], stop


def _before(text: str, mark: str) -> int:
    position = text.find(mark)
    if position >= 0:
        return position
    partial = next((k for k in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:k])), 0)
    return len(text) - partial
