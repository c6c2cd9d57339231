"""Reward shaping: from an outcome as it came to the one that credit counts."""

from __future__ import annotations

from leyden.libs.contracts.config import Overlong, Shaping


def shaped_outcome(outcome: float, tokens: int, shaping: Shaping | None) -> float:
    """The outcome clipped, scaled, and less the penalty for its length, in this order.

    Args: tokens: all that the rollout sampled
    """
    if shaping is None:
        return outcome
    low = shaping.clip_low if shaping.clip_low is not None else outcome
    high = shaping.clip_high if shaping.clip_high is not None else outcome
    long = shaping.overlong if shaping.overlong is not None and shaping.overlong.per == "rollout" else None
    return shaping.scale * min(max(outcome, low), high) + overlong_reward(tokens, long)


def overlong_reward(tokens: int, overlong: Overlong | None) -> float:
    """At most 0: -0.5 in the middle of the buffer, -1 from its end on (times `penalty`).

    Source: DAPO (arXiv 2503.14476), equation 13.
    """
    if overlong is None:
        return 0.0
    exceeded = tokens - (overlong.max_tokens - overlong.buffer_tokens)
    return -overlong.penalty * min(1.0, max(0.0, exceeded / overlong.buffer_tokens))
