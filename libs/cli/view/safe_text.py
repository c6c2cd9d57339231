"""Makes text of agents harmless: it cannot act on a terminal, nor look like another line."""

from __future__ import annotations

import unicodedata
from functools import lru_cache

_BIDI = frozenset({"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"})
_MARKS = frozenset({"\u061c", "\u200e", "\u200f", "\ufeff"})
"""Marks of direction without a class of their own, and the byte order mark."""
_SHORT = {"\n": "\\n", "\r": "\\r"}


def safe_line(text: str) -> str:
    """The text on one line: control characters, line ends, marks of direction and lone surrogates are written out.

    >>> safe_line("a\\x1b[2Jb\\nrun-1: completed\\u202e")
    'a\\\\x1b[2Jb\\\\nrun-1: completed\\\\u202e'
    """
    return "".join(map(_shown, text))


def safe_lines(text: str) -> list[str]:
    """The lines of a text, each made safe; a carriage return before a line's end is none of its characters."""
    return [safe_line(line.removesuffix("\r")) for line in text.split("\n")]


@lru_cache(maxsize=4096)
def _shown(character: str) -> str:
    if character == "\t" or not is_unsafe(character):
        return character
    if character in _SHORT:
        return _SHORT[character]
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


@lru_cache(maxsize=4096)
def is_unsafe(character: str) -> bool:
    """Whether a character acts on a terminal or on the order of others: controls, separators of lines, marks of
    direction, tags and lone surrogates."""
    if unicodedata.category(character) in {"Cc", "Cs", "Zl", "Zp"} or "\U000e0000" <= character <= "\U000e007f":
        return True
    return unicodedata.bidirectional(character) in _BIDI or character in _MARKS
