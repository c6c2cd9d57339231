"""One request's body into the rows it asks to store, and what of it cannot be stored."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from leyden.libs.contracts.rewards import MAX_REWARD
from leyden.libs.store.records.spans import NewReward, NewSpan
from leyden.services.collector.conventions import (
    Limits,
    Sender,
    SpanRejected,
    has_unusable_reward,
    log_reward,
    span_rewards,
    span_row,
)
from leyden.services.collector.otlp import (
    WireLog,
    WireSpan,
    logs_from_json,
    logs_from_protobuf,
    spans_from_json,
    spans_from_protobuf,
)

REWARDS_NOT_GRANTED = "rewards were ignored: the key does not grant scope reward"
UNUSABLE_REWARD = f"a reward was ignored: it is no finite number within ±{MAX_REWARD:g}"


@dataclass(slots=True)
class Rows:
    """The rows of a request. `rejected` counts spans, or log records, that are not stored; `message` says why."""

    spans: list[NewSpan] = field(default_factory=list)
    rewards: list[NewReward] = field(default_factory=list)
    rejected: int = 0
    message: str = ""

    def __len__(self) -> int:
        return len(self.spans) + len(self.rewards)

    def leave_out(self, rewards: Sequence[NewReward], reason: str) -> None:
        """Leaves out these rewards. Those of log records count as rejected; a span of which one is lost is stored."""
        left_out = set(rewards)
        kept = [one for one in self.rewards if one not in left_out]
        self.rejected += 0 if self.spans else len(self.rewards) - len(kept)
        self.rewards, self.message = kept, self.message or reason


class Decode(Protocol):
    """Reads the body of an export. Raises: BadBody; TooMany"""

    def __call__(self, body: bytes, /, *, json: bool, sender: Sender, rewards_granted: bool) -> Rows: ...


def decode_traces(body: bytes, *, json: bool, sender: Sender, rewards_granted: bool) -> Rows:
    """The rows of an ExportTraceServiceRequest.

    Args: rewards_granted: whether the sender may give rewards; if not, they are left out and the message says so
    Raises: BadBody: nothing of the body can be read
    """
    wire: Iterable[WireSpan] = spans_from_json(body) if json else spans_from_protobuf(body)
    rows, limits = Rows(), Limits()
    for span in wire:
        try:
            row = span_row(span, sender, limits)
        except SpanRejected as error:
            rows.rejected += 1
            rows.message = str(error)
            continue
        rows.spans.append(row)
        rows.rewards.extend(span_rewards(span, row, sender))
        if has_unusable_reward(span):
            rows.message = rows.message or UNUSABLE_REWARD
    return rows if rewards_granted else _without_rewards(rows)


def decode_logs(body: bytes, *, json: bool, sender: Sender, rewards_granted: bool) -> Rows:
    """The rewards among an ExportLogsServiceRequest's records; other records are accepted and not kept.

    Raises: BadBody: nothing of the body can be read
    """
    wire: Iterable[WireLog] = logs_from_json(body) if json else logs_from_protobuf(body)
    rows = Rows()
    for log in wire:
        try:
            reward = log_reward(log, sender)
        except SpanRejected as error:
            rows.rejected += 1
            rows.message = str(error)
            continue
        if reward is not None:
            rows.rewards.append(reward)
        elif has_unusable_reward(log):
            rows.message = rows.message or UNUSABLE_REWARD
    return rows if rewards_granted else _without_rewards(rows)


def _without_rewards(rows: Rows) -> Rows:
    if rows.rewards:
        rows.rewards = []
        rows.message = rows.message or REWARDS_NOT_GRANTED
    return rows
