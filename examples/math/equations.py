"""Reads calculations off a solution in words."""

import re
from fractions import Fraction

from calculator import value

MOST_STEPS = 5
EQUATION = re.compile(r"([\d(][\d.+\-*/() ]*?)\s*=\s*(\d+(?:\.\d+)?)")
UNITS = re.compile(r"[€£$,]|[a-z]+(?:/[a-z]+)?|%", re.IGNORECASE)


def equations(solution: str, answer: str) -> list[str]:
    """Return the left sides of a solution's equations, up to the one that has the answer; nothing if none has it.

    >>> equations("He buys 2 x €3 = €6 of nails.\\nSo he has $10 - $6 = $4.", "4")
    ['2 * 3', '10 - 6']
    """
    found: list[str] = []
    for line in solution.splitlines():
        plain = re.sub(r"(?<=\d) x (?=\D?\d)", " * ", line).replace("×", "*").replace("÷", "/")
        for left, right in EQUATION.findall(UNITS.sub("", plain)):
            expression = " ".join(left.split())
            try:
                result = value(expression)
            except (ValueError, ArithmeticError):
                continue
            if expression == right or result != Fraction(right):
                continue
            if expression not in found:
                found.append(expression)
            if result == Fraction(answer):
                return found if len(found) <= MOST_STEPS else []
    return []
