"""The text of tokens whose tokenizer writes bytes as letters, as nearly all do.

A table of the tokens that came so far spells an answer in a third of the tokenizer's time.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel


def _byte_of_letter() -> dict[str, int]:
    """GPT-2's letters for bytes: visible ones stand for themselves, the others follow from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(0x100) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}


_BYTES = _byte_of_letter()


class Spelling(dict[int, bytes]):
    """The bytes of each token, found when it is first asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> bytes:
        text = self._tokenizer.id_to_token(token) or ""
        # With any other letter in it a token is no bytes but that text.
        is_bytes = all(letter in _BYTES for letter in text)
        spelled = bytes(_BYTES[letter] for letter in text) if is_bytes else text.encode()
        self[token] = spelled
        return spelled

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Spelling | None:
        """None for a tokenizer that makes its text in another way."""
        return cls(tokenizer) if isinstance(tokenizer.decoder, ByteLevel) else None

    def text(self, tokens: Sequence[int]) -> str:
        """As the tokenizer decodes them, special ones included; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.__getitem__, tokens)).decode("utf-8", "replace")
