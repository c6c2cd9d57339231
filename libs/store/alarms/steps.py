"""Rules about the metrics of a run's steps: pure functions of numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from statistics import fmean, median, variance
from typing import Any

from leyden.libs.contracts.alarms import ALARM_RULES, Finding

FIRST, NEWEST = 20, 24
"""Steps that the rules compare: those from 1 on, and the newest."""


@dataclass(frozen=True)
class MadeStep:
    """A step, the trainer's metrics, and the mean reward of its groups; None where it is unknown."""

    number: int
    metrics: dict[str, Any]
    created_at: datetime
    reward: float | None = None

    def metric(self, name: str) -> float | None:
        """A number among the metrics."""
        value = self.metrics.get(name)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def judge_steps(steps: Sequence[MadeStep], max_gap: float) -> list[Finding]:
    """The rules about metrics that hold.

    Args: steps: the first and the newest, in their order; max_gap: training.max_logprob_gap
    """
    found = (
        *(_entropy(steps), _kl(steps), _gradients(steps), _gap(steps, max_gap), _uncompared(steps)),
        *(unpublished(steps), _reward(steps)),
    )
    return [one for findings in found for one in findings]


def unpublished(steps: Sequence[MadeStep]) -> Iterator[Finding]:
    """The rule about the object store, which needs no document of the run."""
    if steps and steps[-1].metric("publication_failed"):
        number = steps[-1].number
        reason = f"at step {number} the object store did not get version {number} or one before it"
        yield Finding("not_published", reason, {"step": number})


def seconds_between(steps: Sequence[MadeStep]) -> float | None:
    """The median time between two of the newest steps; None where there are too few."""
    rule = ALARM_RULES["stalled"]
    newest = steps[-rule.window - 1 :]
    gaps = [(b.created_at - a.created_at).total_seconds() for a, b in pairwise(newest) if b.number == a.number + 1]
    return median(gaps) if len(gaps) >= rule.at_least - 1 else None


def _values(steps: Sequence[MadeStep], name: str) -> list[float]:
    return [value for step in steps if (value := step.metric(name)) is not None]


def _made(steps: Sequence[MadeStep], name: str) -> int:
    """Number of steps so far, or 0 while the rule needs more."""
    number = steps[-1].number if steps else 0
    return number if number >= ALARM_RULES[name].at_least else 0


def _entropy(steps: Sequence[MadeStep]) -> Iterator[Finding]:
    rule = ALARM_RULES["entropy_collapse"]
    if not _made(steps, rule.name):
        return
    first = _values([one for one in steps if one.number <= rule.window], "entropy")
    newest = _values(steps[-rule.window :], "entropy")
    if first and newest and fmean(newest) < rule.limit * fmean(first):
        figures = {"entropy": fmean(newest), "first": fmean(first), "share": fmean(newest) / fmean(first)}
        reason = f"entropy fell from {fmean(first):.3g} in the first {rule.window} steps to {fmean(newest):.3g}"
        yield Finding(rule.name, reason, figures)


def _kl(steps: Sequence[MadeStep]) -> Iterator[Finding]:
    rule = ALARM_RULES["kl_high"]
    newest = _values(steps[-rule.window :], "kl_reference")
    if _made(steps, rule.name) and newest and fmean(newest) > rule.limit:
        reason = f"the KL from the reference is {fmean(newest):.3g} nats a token in the last {len(newest)} steps"
        yield Finding(rule.name, reason, {"kl": fmean(newest), "limit": rule.limit})


def _gradients(steps: Sequence[MadeStep]) -> Iterator[Finding]:
    """A step without anything to train has norm 0, which shows nothing."""
    rule = ALARM_RULES["gradient_jump"]
    norms = [value for value in _values(steps[-NEWEST:], "gradient_norm") if value > 0]
    newest, before = norms[-rule.window :], norms[: -rule.window]
    if not _made(steps, rule.name) or len(before) < rule.at_least - rule.window:
        return
    if median(newest) > rule.limit * median(before):
        figures = {"gradient_norm": median(newest), "before": median(before), "times": median(newest) / median(before)}
        reason = (
            f"the gradient norm is {median(newest):.3g} in the last {rule.window} steps, {median(before):.3g} before"
        )
        yield Finding(rule.name, reason, figures)


def _gap(steps: Sequence[MadeStep], max_gap: float) -> Iterator[Finding]:
    rule = ALARM_RULES["gap_near_limit"]
    newest = _values(steps, "logprob_gap_mean")[-rule.window :]
    if len(newest) >= rule.at_least and fmean(newest) > rule.limit * max_gap:
        reason = (
            f"log-probabilities of trainer and engine differ by {fmean(newest):.2g} on average in the last"
            f" {len(newest)} steps; the run fails above training.max_logprob_gap {max_gap:g}"
        )
        yield Finding(rule.name, reason, {"gap": fmean(newest), "max_logprob_gap": max_gap})


def _uncompared(steps: Sequence[MadeStep]) -> Iterator[Finding]:
    rule = ALARM_RULES["not_compared"]
    newest = steps[-rule.window :]
    uncompared = sum(step.metric("logprob_gap_tokens") == 0 for step in newest)
    if uncompared:
        reason = (
            f"in {uncompared} of the last {len(newest)} steps trainer and engine were not compared: the weights that"
            " sampled the tokens are gone, or there is no memory for a second model"
        )
        yield Finding(rule.name, reason, {"count": uncompared, "steps": len(newest)})


def _reward(steps: Sequence[MadeStep]) -> Iterator[Finding]:
    rule = ALARM_RULES["reward_flat"]
    if not _made(steps, rule.name):
        return
    first = [one.reward for one in steps if one.number <= rule.window and one.reward is not None]
    newest = [one.reward for one in steps[-rule.window :] if one.reward is not None]
    if min(len(first), len(newest)) < rule.window // 2:
        return
    rise = fmean(newest) - fmean(first)
    error = (variance(first) / len(first) + variance(newest) / len(newest)) ** 0.5
    if rise <= rule.limit * error:
        reason = (
            f"the mean reward of the last {rule.window} steps ({fmean(newest):.3g}) is hardly above that of the first"
            f" {rule.window} ({fmean(first):.3g}, standard error of the difference {error:.2g})"
        )
        figures = {"reward": fmean(newest), "first": fmean(first), "standard_error": error}
        yield Finding(rule.name, reason, figures)
