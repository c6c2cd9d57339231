"""The verdict of a grader of the operator's own code: a number as JSON, or an object with it."""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from leyden.libs.contracts.rewards import MAX_REWARD, is_reward
from leyden.libs.contracts.states import ComponentState
from leyden.libs.grading.grade import Grade, cut

MAX_VERDICT_BYTES = 64 * 1024
NAME = "reward.json"
"""The file of the working folder that holds it."""
_SHAPE = 'write a number, null, or {"reward": number, "explanation": text}'


class _Verdict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    reward: Annotated[float, Field(allow_inf_nan=True)] | None
    explanation: str = ""
    extracted: str | None = None


def grade_of_verdict(file: bytes | None, stdout: bytes) -> Grade:
    """Returns the grade that a program wrote: its file counts, and else the last line of its output. Null is
    `not_applicable`.

    Raises: ValueError: there is none, or it is no number
    """
    place, written = (NAME, file) if file is not None else ("its last line", _last_line(stdout))
    if written is None:
        raise ValueError(f"it wrote no reward: there is no {NAME}, and its output is empty")
    if len(written) > MAX_VERDICT_BYTES:
        raise ValueError(f"{place} has more than {MAX_VERDICT_BYTES} bytes")
    verdict = _read(place, written)
    if verdict.reward is None:
        explanation = verdict.explanation or "the grader gave null"
        return Grade(ComponentState.NOT_APPLICABLE, explanation=cut(explanation))
    if not is_reward(verdict.reward):
        raise ValueError(f"{place} has the reward {verdict.reward:g}, which is not within ±{MAX_REWARD:g}")
    shown = None if verdict.extracted is None else cut(verdict.extracted)
    return Grade(ComponentState.SCORED, verdict.reward, shown, cut(verdict.explanation))


def _last_line(stdout: bytes) -> bytes | None:
    return stdout.rstrip().rpartition(b"\n")[2] or None


def _read(place: str, written: bytes) -> _Verdict:
    shown = written[:100].decode(errors="replace")
    try:
        found = json.loads(written)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is no JSON: {shown!r}") from error
    try:
        return _Verdict.model_validate(found if isinstance(found, dict) else {"reward": found})
    except ValidationError as error:
        raise ValueError(f"{place} is {shown!r}: {_SHAPE}") from error
