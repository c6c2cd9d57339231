"""The most calls and objects that one attempt may store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from leyden.libs.contracts.conversation import Turn
from leyden.libs.service.quota import Amount, Limit, Quota
from leyden.libs.store.attempts import AttemptKey
from leyden.libs.store.records.calls import NewCall
from leyden.services.gateway.errors import BadRequest
from leyden.services.gateway.metrics import REFUSED
from leyden.services.gateway.settings import Settings

CALL_BYTES, TURN_BYTES = 1000, 100
"""A row of a call and a turn without texts and tokens."""


class AttemptQuota:
    """A limit of all attempts."""

    def __init__(self, limit: Limit) -> None:
        self._quota: Quota[AttemptKey] = Quota(limit)

    def check(self, attempt: AttemptKey, sizes: Sequence[int]) -> None:
        """Passes an attempt that may store items of these sizes. Raises: BadRequest."""
        if self._quota.fitting(attempt, sizes) < len(sizes):
            limit = self._quota.limit
            REFUSED.labels(limit.noun).inc()
            raise BadRequest(f"T{limit.message()[1:]}.", code="attempt_limit")

    @contextmanager
    def storing(self, attempt: AttemptKey, sizes: Sequence[int]) -> Iterator[None]:
        """Counts items that are being stored."""
        with self._quota.storing(attempt, sizes):
            yield


def calls_quota(settings: Settings) -> AttemptQuota:
    """The limit of stored calls."""
    names = "GATEWAY_MAX_ATTEMPT_CALLS", "GATEWAY_MAX_ATTEMPT_CALL_BYTES"
    return AttemptQuota(Limit(Amount(settings.max_attempt_calls, settings.max_attempt_call_bytes), "calls", names))


def objects_quota(settings: Settings) -> AttemptQuota:
    """The limit of objects of the Responses API."""
    names = "GATEWAY_MAX_ATTEMPT_OBJECTS", "GATEWAY_MAX_ATTEMPT_OBJECT_BYTES"
    most = Amount(settings.max_attempt_objects, settings.max_attempt_object_bytes)
    return AttemptQuota(Limit(most, "objects", names))


def call_bytes(row: NewCall) -> int:
    """The size of a call's row, nearly."""
    tokens = len(row.prompt_ids) + len(row.sampled_ids) + len(row.generator_logprobs) + len(row.policy_versions)
    turns = [*row.turns, *([] if row.answer is None else [row.answer])]
    return (
        CALL_BYTES + tokens + sum(map(_turn_bytes, turns)) + sum(TURN_BYTES + len(str(one)) for one in row.tools or ())
    )


def _turn_bytes(turn: Turn) -> int:
    calls = sum(len(call.arguments) for call in turn.tool_calls)
    return TURN_BYTES + len(turn.content) + len(turn.reasoning or "") + calls
