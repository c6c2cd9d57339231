"""Tokens to text and back: the folder's tokenizer, incremental decoding and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

# Decoding again from this many tokens back gives the same text: merges across the border are complete by then.
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
    """Text of a growing sequence of tokens, at a cost per token that does not grow with it.

    A token that ends inside a character adds nothing until the rest of the character is there.
    """

    def __init__(self, text: Text, skip_special: bool) -> None:
        self._text, self._skip_special = text, skip_special
        self._context = 0
        self._read = 0
        self._decoded = ""

    def advance(self, token_ids: Sequence[int]) -> str:
        """The text of all of `token_ids`, which begin with those of the call before."""
        before = self._text.decode(token_ids[self._context : self._read], self._skip_special)
        longer = self._text.decode(token_ids[self._context :], self._skip_special)
        if not longer.endswith(_INCOMPLETE):
            self._decoded += longer[len(before) :]
            self._read = len(token_ids)
            self._context = max(self._context, self._read - _CONTEXT_TOKENS)
        return self._decoded


class StopStrings:
    """Looks for stop strings in the text of a growing sequence of tokens."""

    def __init__(self, text: Text, stops: Sequence[str]) -> None:
        self._decoder, self._stops = Decoder(text, skip_special=False), stops
        self._searched = 0

    def matched(self, token_ids: Sequence[int]) -> str | None:
        """The stop string that the newest tokens completed: the first in the text, the first given among equals."""
        text = self._decoder.advance(token_ids)
        start = max(0, self._searched - max(map(len, self._stops)))
        self._searched = len(text)
        found = [(place, stop) for stop in self._stops if (place := text.find(stop, start)) >= 0]
        return min(found, key=lambda pair: pair[0])[1] if found else None
