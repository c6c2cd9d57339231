"""The grader of texts that are nearly a reference: the longest subsequence of words or characters that both share."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Sequence

from leyden.libs.contracts.config import graders
from leyden.libs.grading.facts import AttemptFacts, Scored, text_of, texts_of

MAX_COMPARED = 50_000
"""Characters of each text, from its end. Why: the time grows with the product of both lengths; two texts of so many
characters take 0.6 s."""

_WORD = re.compile(r"[^\W_]+")


def shared(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    """Returns the length of the longest common subsequence.

    Source: Hyyrö, "Bit-parallel LCS-length computation revisited" (2004): a bit for each item of the first sequence,
    which is 0 where the length grows.

    >>> shared("police killed the gunman".split(), "police kill the gunman".split())
    3
    """
    masks = defaultdict[Hashable, int](int)
    for place, item in enumerate(first):
        masks[item] |= 1 << place
    full = bits = (1 << len(first)) - 1
    for item in second:
        if met := bits & masks.get(item, 0):
            bits = ((bits + met) | (bits - met)) & full
    return len(first) - bits.bit_count()


def similarity(first: Sequence[Hashable], second: Sequence[Hashable]) -> float:
    """Returns 2 · shared / (both lengths), from 0 to 1: the F1 of precision and recall. Two empty sequences have 1."""
    length = len(first) + len(second)
    return 2 * shared(first, second) / length if length else 1.0


def rouge_l(text: str, reference: str) -> float:
    """Returns the F1 of ROUGE-L over the words of both texts, in lower case and without stems.

    Source: Lin, "ROUGE" (2004), section 3.1 with beta 1. Differs from Google's `rouge_score` in words with letters
    beyond a to z, which that one cuts apart.

    >>> rouge_l("police kill the gunman", "police killed the gunman")
    0.75
    >>> rouge_l("the gunman kill police", "police killed the gunman")
    0.5
    """
    return similarity(_WORD.findall(text.lower()), _WORD.findall(reference.lower()))


def fuzzy(text: str, reference: str) -> float:
    """Returns the normalised similarity by insertions and deletions of characters, as `rapidfuzz.fuzz.ratio` / 100.

    >>> round(fuzzy("this is a test", "this is a test!"), 4)
    0.9655
    """
    return similarity(text.strip(), reference.strip())


_MEASURES = {"rouge_l": rouge_l, "fuzzy": fuzzy}


def text_similarity(grader: graders.TextSimilarity, facts: AttemptFacts) -> Scored:
    """The best similarity to any of the references."""
    references = texts_of(grader.reference, facts)
    text = text_of(grader.output, facts)
    measure = _MEASURES[grader.measure]
    values = [measure(text[-MAX_COMPARED:], one[-MAX_COMPARED:]) for one in references]
    value = max(values)
    return value, text, f"{grader.measure} {value:.4g} with {references[values.index(value)]!r}"
