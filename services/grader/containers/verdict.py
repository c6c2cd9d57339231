"""Reads the verdict of a container grader: Harbor's `reward.json`, named numbers, or `reward.txt`, one number."""

from __future__ import annotations

import json

from pydantic import BaseModel, ConfigDict, ValidationError

from leyden.libs.contracts.rewards import MAX_REWARD, is_reward
from leyden.libs.contracts.states import ComponentState
from leyden.libs.grading.grade import Grade, cut
from leyden.services.grader.containers.pod import MAX_BYTES, VERDICTS

REWARD = "reward"
"""The name of the number that counts where the document names none."""
SIGNALLED = 128
"""A shell whose program was ended by a signal exits with this more than the signal's number."""
LAST_SIGNAL = 64


class _Words(BaseModel):
    model_config = ConfigDict(frozen=True)

    exit: str | None
    file: str | None = None
    text: str = ""


class NoVerdict(ValueError):
    """The grader has written no number; its log may say why."""


def grade_of_words(words: str, key: str | None) -> Grade:
    """Returns the grade in the last words of `collect`. The exit status does not matter, as in Harbor, unless a signal
    ended the grader.

    Args:   key: the name of the number; None: `reward`, or the only one
    Raises: NoVerdict
    """
    try:
        found = _Words.model_validate_json(words)
    except ValidationError as error:
        raise NoVerdict(f"its verdict is lost: {words[:100]!r}") from error
    how = f"it exited with {(found.exit or '').strip() or 'no status'}"
    status = int(found.exit) if found.exit and found.exit.strip().isdecimal() else None
    if status is not None and SIGNALLED < status <= SIGNALLED + LAST_SIGNAL:
        raise NoVerdict(f"it was ended by signal {status - SIGNALLED}")
    if found.file is None:
        raise NoVerdict(f"it wrote neither {' nor '.join(VERDICTS)} in /logs/verifier, and {how}")
    if len(found.text.encode()) > MAX_BYTES:
        raise NoVerdict(f"{found.file} has more than {MAX_BYTES} bytes")
    numbers = _numbers(found.file, found.text)
    name = key or (REWARD if REWARD in numbers or len(numbers) != 1 else next(iter(numbers)))
    if name not in numbers:
        raise NoVerdict(f"{found.file} has no number {name!r}, but {', '.join(numbers) or 'none'}: name one as key")
    value = numbers[name]
    if not is_reward(value):
        raise NoVerdict(f"{found.file} has {name} {value:g}, which is not within ±{MAX_REWARD:g}")
    others = "".join(f", {one} {number:g}" for one, number in numbers.items() if one != name)
    return Grade(ComponentState.SCORED, value, None, cut(f"{name} {value:g} in {found.file}{others}; {how}"))


def _numbers(file: str, text: str) -> dict[str, float]:
    """Raises: NoVerdict"""
    try:
        read = float(text) if file.endswith(".txt") else json.loads(text)
    except (ValueError, RecursionError) as error:
        kind = "number" if file.endswith(".txt") else "JSON"
        raise NoVerdict(f"{file} is no {kind}: {text[:100]!r}") from error
    named = read if isinstance(read, dict) else {REWARD: read}
    if not all(isinstance(one, int | float) and not isinstance(one, bool) for one in named.values()):
        raise NoVerdict(f'{file} is {text[:100]!r}: write numbers by name, such as {{"reward": 1.0}}')
    try:
        return {name: float(one) for name, one in named.items()}
    except OverflowError as error:
        raise NoVerdict(f"{file} has a number that is too large: {text[:100]!r}") from error
