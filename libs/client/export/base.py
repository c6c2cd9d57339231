"""The seam between selection and formats."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from leyden.libs.client.export.conversations import Conversation
from leyden.libs.contracts.api.rollouts import Rollout
from leyden.libs.contracts.conversation import Json

Reader = Callable[[Rollout], Sequence[Conversation]]
LeftOut = Counter[str]
"""Reasons with the count of what a format could not or must not write."""


class Inexpressible(Exception):
    """The format has no form for a conversation; the message names the plural of what is left out."""


class Format(Protocol):
    """Rows of JSON from rollouts, one rollout at a time in memory."""

    def rows(
        self, rollouts: Iterable[Rollout], read: Reader, left_out: LeftOut, *, per_task: int | None
    ) -> Iterator[Json]:
        """Converts rollouts in their order.

        Args: read: gives the conversations of a rollout; left_out: is counted up; per_task: at most so many rollouts
            of a task, the first ones
        """
        ...


class ByConversation(ABC):
    """A format with one row a conversation."""

    def rows(
        self, rollouts: Iterable[Rollout], read: Reader, left_out: LeftOut, *, per_task: int | None
    ) -> Iterator[Json]:
        """Converts each conversation."""
        return by_rollout(rollouts, read, per_task, lambda conversation: [self.row(conversation)])

    @abstractmethod
    def row(self, conversation: Conversation) -> Json:
        """Converts one conversation."""


def by_rollout(
    rollouts: Iterable[Rollout],
    read: Reader,
    per_task: int | None,
    convert: Callable[[Conversation], Iterable[Json]],
) -> Iterator[Json]:
    """The rows of each conversation. A rollout without any does not count for `per_task`."""
    written: Counter[tuple[str, int]] = Counter()
    for rollout in rollouts:
        # Each dataset numbers its own tasks.
        task = rollout.dataset_id, rollout.task_number
        if per_task is not None and written[task] >= per_task:
            continue
        rows = [row for conversation in read(rollout) for row in convert(conversation)]
        written[task] += bool(rows)
        yield from rows
