"""Graders of text: equality, the words shared with a reference, choices, patterns and length."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from leyden.libs.contracts.config import graders
from leyden.libs.grading.facts import AttemptFacts, Scored, text_of, texts_of

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def squad(text: str) -> str:
    """Returns the text as SQuAD compares it: lower case, without punctuation, articles and repeated spaces.

    Source: the evaluation script of SQuAD 1.1 (arXiv 1606.05250)

    >>> squad("The  Eiffel-Tower, in Paris!")
    'eiffeltower in paris'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1(text: str, reference: str) -> float:
    """Returns the harmonic mean of precision and recall over the words of both texts, after `squad`.

    Two empty texts have 1. Worked: 2 shared words of 3 and of 2 have precision 2/3, recall 1 and F1 0.8.

    >>> f1("the tall Eiffel Tower", "Eiffel Tower")
    0.8
    """
    return _f1(_bag(text), _bag(reference))


class _Bag(NamedTuple):
    counts: Counter[str]
    length: int


def _bag(text: str) -> _Bag:
    words = squad(text).split()
    return _Bag(Counter(words), len(words))


def _f1(text: _Bag, reference: _Bag) -> float:
    length = text.length + reference.length
    # In this order: it goes through the words of the reference, of which an agent cannot make many.
    return 2 * (reference.counts & text.counts).total() / length if length else 1.0


def token_f1(grader: graders.TokenF1, facts: AttemptFacts) -> Scored:
    """The best F1 with any of the references."""
    references = texts_of(grader.reference, facts)
    expected = [_bag(one) for one in references]
    text = text_of(grader.output, facts)
    bag = _bag(text)
    values = [_f1(bag, one) for one in expected]
    value = max(values)
    return value, text, f"F1 {value:.4g} with {references[values.index(value)]!r}"


_NORMALISE: dict[str, Callable[[str], str]] = {
    "none": str.strip,
    "case": lambda text: text.strip().casefold(),
    "squad": squad,
}


def string_check(grader: graders.StringCheck, facts: AttemptFacts) -> Scored:
    """Holds for any of the references; `ne` for all of them."""
    references = texts_of(grader.reference, facts)
    expected = [_normalised(grader, one) for one in references]
    text = text_of(grader.output, facts)
    normalised = _normalised(grader, text)
    found = [_relation(grader.operation, normalised, one) for one in expected]
    holds = all(found) if grader.operation == "ne" else any(found)
    shown = " or ".join(repr(one) for one in references)
    return float(holds), text, f"{grader.operation} {shown}: {'yes' if holds else 'no'}"


def _normalised(grader: graders.StringCheck, text: str) -> str:
    normal = _NORMALISE[grader.normalise](text)
    return normal.casefold() if grader.operation == "ilike" else normal


def _relation(operation: str, text: str, reference: str) -> bool:
    match operation:
        case "eq":
            return text == reference
        case "ne":
            return text != reference
        case _:
            return reference in text


_ARTICLE = re.compile(r"[a-z] +[*_`'\"(]*\w")


def choice(grader: graders.Choice, facts: AttemptFacts) -> Scored:
    """The last option in the text counts: agents write their thoughts first.

    A small letter before another word, as in "a better fit", is mostly an article: it counts as option A only where
    the text has no other option.
    """
    references, text = texts_of(grader.reference, facts), text_of(grader.output, facts)
    right = {one.strip().casefold() for one in references}
    options = "|".join(re.escape(one) for one in sorted(grader.options, key=len, reverse=True))
    every = list(re.finditer(rf"(?<!\w)({options})(?!\w)", text, re.IGNORECASE))
    meant = [one for one in every if one[0] in grader.options or not _ARTICLE.match(text, one.start())]
    found = [one[0] for one in meant or every]
    if not found:
        return 0.0, None, f"none of {', '.join(grader.options)} stands in the output"
    is_right = found[-1].casefold() in right
    return float(is_right), found[-1], f"{'is' if is_right else 'is not'} {' or '.join(references)}"


def regex(grader: graders.Regex, facts: AttemptFacts) -> Scored:
    """The caller limits the time: patterns may take exponential time."""
    pattern = re.compile(grader.pattern, re.MULTILINE)
    found = pattern.search(text_of(grader.output, facts))
    if found is None:
        return 0.0, None, f"{grader.pattern!r} was not found"
    return 1.0, found[0], f"{grader.pattern!r} was found"


def length(grader: graders.Length, facts: AttemptFacts) -> Scored:
    """Falls linearly from 1 at a bound."""
    text = text_of(grader.output, facts)
    count = len(text.split()) if grader.unit == "words" else len(text)
    value = 1.0
    if count < grader.at_least:
        value = count / grader.at_least
    elif grader.at_most is not None and count > grader.at_most:
        value = max(0.0, 2.0 - count / grader.at_most)
    return value, None, f"{count} {grader.unit}"
