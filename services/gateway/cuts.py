"""Where a text can be cut so that its two parts have the tokens of the whole.

Tokenizers look for added tokens first, in the text as it is, and treat what lies between them piece by piece: an added
token ends what is before it and begins what is after it. Left out are added tokens to which that does not apply: those
looked for in normalised text, those that take the white space before them, and those that may overlap with another one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer


@dataclass(frozen=True, slots=True)
class Cuts:
    """Added tokens before which any text can be cut."""

    texts: Sequence[str]

    @classmethod
    def of(cls, tokenizer: Tokenizer, template: str) -> Cuts:
        """Those that a template writes.

        Args: template: its source, and whatever else it may take them from
        """
        added = list(tokenizer.get_added_tokens_decoder().values())
        if any(token.single_word for token in added):
            # What comes after decides whether they are tokens.
            return cls(())
        raw = [token for token in added if not token.normalized]
        written = [token for token in raw if token.content and token.content in template]
        return cls([token.content for token in written if _begins(token.content, raw)])

    def last(self, text: str, upto: int) -> int | None:
        """The last place to cut a text that is not after `upto`; None where there is none."""
        place = max((text.rfind(token, 0, upto + len(token)) for token in self.texts), default=-1)
        return place if place >= 0 else None

    def pieces(self, text: str) -> list[str]:
        """The text cut at every place, none empty."""
        places = (
            [found.start() for found in re.finditer("|".join(map(re.escape, self.texts)), text)] if self.texts else []
        )
        ends = zip([0, *places], [*places, len(text)], strict=True)
        return [text[begin:end] for begin, end in ends if begin < end]


def _begins(text: str, raw: Sequence[AddedToken]) -> bool:
    """Whether nothing before the text belongs to a token that is looked for where it stands."""
    takes_spaces = any(token.lstrip and token.content.startswith(text) for token in raw)
    return not (takes_spaces or text[0].isspace() or _overlaps(text, [token.content for token in raw]))


def _overlaps(text: str, others: Sequence[str]) -> bool:
    """Whether one of the others, the text among them, can begin before the text and end within or after it."""
    heads = [text[:length] for length in range(1, len(text))]
    return any(
        text in other[1:] or any(other.endswith(head) and len(other) > len(head) for head in heads) for other in others
    )
