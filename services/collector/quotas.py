"""The most spans and rewards that one attempt may store: no agent's telemetry stops credit or fills the disk."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from cachetools import LRUCache
from prometheus_client import Counter

from leyden.libs.service import Problem
from leyden.libs.service.quota import ATTEMPTS, Amount, Limit, Quota
from leyden.libs.store.database import Database
from leyden.libs.store.records.spans import NewReward, NewSpan, stored_rewards, stored_spans
from leyden.services.collector.batch import TelemetryCommit
from leyden.services.collector.conventions import Sender
from leyden.services.collector.decode import Rows
from leyden.services.collector.settings import Settings

REFUSED_ROWS = Counter("collector_refused_rows_total", "Rows beyond the limits of an attempt.", ["kind"])
REWARD_BYTES, SPAN_BYTES = 1000, 300
"""A reward, whose texts are bounded, and a span without its texts."""


class Quotas:
    """The limits of all attempts."""

    def __init__(self, settings: Settings, database: Database) -> None:
        async def spans(sender: Sender) -> Amount:
            async with database.read() as session:
                return Amount(*await stored_spans(session, sender.run_id, sender.rollout_id, sender.attempt))

        async def rewards(sender: Sender) -> Amount:
            async with database.read() as session:
                count = await stored_rewards(session, sender.rollout_id, sender.attempt)
            return Amount(count, count * REWARD_BYTES)

        of_spans = Amount(settings.max_attempt_spans, settings.max_attempt_span_bytes)
        names = "COLLECTOR_MAX_ATTEMPT_SPANS", "COLLECTOR_MAX_ATTEMPT_SPAN_BYTES"
        self._spans = Quota(Limit(of_spans, "spans", names), spans)
        of_rewards = Amount(settings.max_attempt_rewards, settings.max_attempt_rewards * REWARD_BYTES)
        names = "COLLECTOR_MAX_ATTEMPT_REWARDS", "1000 a reward"
        self._rewards = Quota(Limit(of_rewards, "rewards", names), rewards)
        self._max_misplaced = settings.max_attempt_rewards
        self._misplaced: LRUCache[Sender, int] = LRUCache(ATTEMPTS)

    async def submit(self, commit: TelemetryCommit, sender: Sender, rows: Rows) -> None:
        """Stores the rows of a request that fit; the others leave `rows`, which counts them with the reason."""
        are_logs = not rows.spans
        fitting = await self._spans.room(sender, list(map(_size, rows.spans)))
        if fitting < len(rows.spans):
            _refused("span", len(rows.spans) - fitting)
            rows.rejected += len(rows.spans) - fitting
            rows.spans, rows.message = rows.spans[:fitting], self._spans.limit.message()
        fitting = await self._rewards.room(sender, [REWARD_BYTES] * len(rows.rewards))
        if fitting < len(rows.rewards):
            _refused("reward", len(rows.rewards) - fitting)
            rows.rejected += len(rows.rewards) - fitting if are_logs else 0
            rows.rewards, rows.message = rows.rewards[:fitting], self._rewards.limit.message()
        if len(rows):
            with self._spans.storing(sender, list(map(_size, rows.spans))), self._storing_rewards(sender, rows.rewards):
                await commit.submit([*rows.spans, *rows.rewards])

    async def look_up_refusal(self, sender: Sender) -> str | None:
        """The reason to refuse a reward for an answer or a tool call before the store looks for that; else None."""
        if not await self._rewards.room(sender, [REWARD_BYTES]):
            return self._rewards.limit.message()
        if self._misplaced.get(sender, 0) >= self._max_misplaced:
            return (
                f"{self._max_misplaced} requests of this attempt (COLLECTOR_MAX_ATTEMPT_REWARDS) named answers or tool"
                " calls that it lacks, so no more are looked up: send rewards of the rollout, without an id"
            )
        return None

    def count_misplaced(self, sender: Sender) -> None:
        """Counts a request with a reward for an answer or a tool call that its attempt lacks."""
        self._misplaced[sender] = self._misplaced.get(sender, 0) + 1

    async def submit_rewards(self, commit: TelemetryCommit, sender: Sender, rewards: Sequence[NewReward]) -> None:
        """Stores all rewards of a request. Raises: Problem: 422: they do not fit."""
        if await self._rewards.room(sender, [REWARD_BYTES] * len(rewards)) < len(rewards):
            _refused("reward", len(rewards))
            raise Problem(422, self._rewards.limit.message(), cause="attempt_limit")
        with self._storing_rewards(sender, rewards):
            await commit.submit(rewards)

    def _storing_rewards(self, sender: Sender, rewards: Sequence[NewReward]) -> AbstractContextManager[None]:
        return self._rewards.storing(sender, [REWARD_BYTES] * len(rewards))


def _size(span: NewSpan) -> int:
    return SPAN_BYTES + len(span.attributes) + len(span.name)


def _refused(kind: str, count: int) -> None:
    REFUSED_ROWS.labels(kind).inc(count)
