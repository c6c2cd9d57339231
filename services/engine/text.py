"""The folder's tokenizer, incremental decoding, and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

# Decoding with this many earlier tokens gives the same text as decoding all: no merge spans more tokens.
_CONTEXT_TOKENS = 6
_INCOMPLETE = "�"


class Text:
    """The tokenizer of a Hugging Face folder."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special: bool = True) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special)
        return text


class Decoder:
    """Decodes a growing sequence of tokens incrementally, at a constant cost per token.

    A token that ends inside a character adds no text until the rest of the character arrives.
    """

    def __init__(self, text: Text, skip_special: bool) -> None:
        self._text, self._skip_special = text, skip_special
        self._context = 0
        self._read = 0
        self._decoded = ""

    def advance(self, token_ids: Sequence[int]) -> str:
        """Returns the text of all of `token_ids`, which begin with the tokens of the previous call."""
        before = self._text.decode(token_ids[self._context : self._read], self._skip_special)
        longer = self._text.decode(token_ids[self._context :], self._skip_special)
        if not longer.endswith(_INCOMPLETE):
            self._decoded += longer[len(before) :]
            self._read = len(token_ids)
            self._context = max(self._context, self._read - _CONTEXT_TOKENS)
        return self._decoded


class StopStrings:
    """Finds stop strings in the text of a growing sequence of tokens."""

    def __init__(self, text: Text, stops: Sequence[str]) -> None:
        self._decoder, self._stops = Decoder(text, skip_special=False), stops
        self._searched = 0

    def matched(self, token_ids: Sequence[int]) -> str | None:
        """Returns the stop string that the newest tokens complete: the first in the text, then in the request."""
        text = self._decoder.advance(token_ids)
        start = max(0, self._searched - max(map(len, self._stops)))
        self._searched = len(text)
        found = [(place, stop) for stop in self._stops if (place := text.find(stop, start)) >= 0]
        return min(found, key=lambda pair: pair[0])[1] if found else None
