"""The grader of numbers."""

from __future__ import annotations

import math
import re

from leyden.libs.contracts.config import graders
from leyden.libs.grading.facts import AttemptFacts, Scored, text_of, texts_of

# Each repetition is bounded: a text of digits takes linear time.
_NUMBER = re.compile(
    r"(?<![\w.])[-+−]?[$€£]?(?P<number>"
    r"\d{1,3}(?:(?:,\d{3}){1,10}|(?:[\u00a0\u2009\u202f]\d{3}){1,10}(?!\d))(?:\.\d{1,300})?"
    r"|\d{1,300}(?:\.\d{0,300})?|\.\d{1,300})"
    r"(?P<exponent>[eE][-+]?\d{1,3})?(?:\s?/\s?(?P<below>\d{1,300}))?(?P<percent>\s?%)?"
)
NO_BREAK = "\u00a0"
_ALONE = re.compile(r"[-+−]?[$€£]?\d{1,3}(?: \d{3}){1,10}(?:\.\d{1,300})?(?:\s?%)?")
"""A text that is one number, whose groups an ordinary space divides."""
_SEPARATORS = re.compile("[, \u00a0\u2009\u202f]")
EXACT = 1e-6
"""Tolerances up to this are no share of a whole reference: counts and sums of money are right or wrong."""


def last_number(text: str) -> tuple[str, float] | None:
    """Returns the last number in the text, as it is written and as it counts.

    Commas, no-break and thin spaces divide groups of three digits. An ordinary space divides numbers, unless the whole
    text is one number.

    >>> last_number("3 of 4 are $1,234.50"), last_number("about 12 %"), last_number("-1/2")
    (('$1,234.50', 1234.5), ('12 %', 0.12), ('-1/2', -0.5))
    >>> last_number("Step 1 250"), last_number("1 250")
    (('250', 250.0), ('1 250', 1250.0))
    """
    if _ALONE.fullmatch(text.strip()):
        text = text.strip().replace(" ", NO_BREAK)
    found = None
    for match in _NUMBER.finditer(text):
        found = match
    if found is None:
        return None
    value = float(_SEPARATORS.sub("", found["number"]) + (found["exponent"] or ""))
    if found["below"] is not None:
        value = value / float(found["below"]) if float(found["below"]) else math.nan
    value *= 0.01 if found["percent"] else 1.0
    return found[0].strip().replace(NO_BREAK, " "), -value if found[0][0] in "-−" else value


def numeric(grader: graders.Numeric, facts: AttemptFacts) -> Scored:
    """Equal to any of the references."""
    references = texts_of(grader.reference, facts)
    expected = [found[1] for one in references if (found := last_number(one)) is not None]
    if not expected:
        raise ValueError(f"the reference {references[0]!r} has no number")
    found = last_number(text_of(grader.output, facts))
    if found is None:
        return 0.0, None, "no number stands in the output"
    shown, value = found
    is_equal = any(abs(value - one) <= _limit(grader.tolerance, one) for one in expected)
    return float(is_equal), shown, f"{value:g} {'equals' if is_equal else 'is not'} {expected[0]:g}"


def _limit(tolerance: float, reference: float) -> float:
    """The largest difference from the reference that is equal."""
    is_whole = reference.is_integer() and tolerance <= EXACT
    return tolerance if is_whole else tolerance * max(1.0, abs(reference))
