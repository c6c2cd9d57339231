"""Writes the spans of embeddings; while Postgres is down, a write waits for `hold_seconds`."""

from __future__ import annotations

from leyden.libs.store.attempts import AttemptKey
from leyden.libs.store.database import Database, Refused
from leyden.libs.store.records.spans import AttemptEnded, NewSpan, has_request, write_telemetry
from leyden.libs.telemetry import logger
from leyden.services.gateway.calls.context import Attempt
from leyden.services.gateway.errors import GatewayError, KeyRefused
from leyden.services.gateway.records.quotas import AttemptQuota
from leyden.services.gateway.records.reader import HeldStore

SPAN_BYTES = 300
"""A row without its attributes."""

log = logger()


class EmbeddingSpans(HeldStore):
    """The spans of all attempts, which count as stored calls. Args: quota: of the calls of an attempt."""

    def __init__(self, database: Database, *, hold_seconds: float, quota: AttemptQuota) -> None:
        super().__init__(database, hold_seconds=hold_seconds)
        self._quota = quota

    def check_room(self, attempt: AttemptKey) -> None:
        """Passes an attempt that may store one more call. Raises: BadRequest."""
        self._quota.check(attempt, [SPAN_BYTES])

    async def has(self, attempt: Attempt, digest: str) -> bool:
        """Whether a request with this digest is stored. Raises: Unavailable."""
        key = attempt.run_id, attempt.rollout_id, attempt.attempt
        return await self._read(lambda session: has_request(session, *key, digest))

    async def add(self, span: NewSpan) -> None:
        """Returns once the span is durable.

        Raises: Unavailable: the store was down for longer than `hold_seconds`; KeyRefused: the attempt has ended;
            GatewayError: the store refuses the span
        """
        try:
            with self._quota.storing(AttemptKey(span.rollout_id, span.attempt), [SPAN_BYTES + len(span.attributes)]):
                await self._held(lambda: write_telemetry(self._database, [span], []))
        except AttemptEnded as error:
            raise KeyRefused("This attempt has ended.", status=403, cause="ended") from error
        except Refused as error:
            log.error("embedding refused by the store", rollout_id=span.rollout_id, error=str(error))
            raise GatewayError("The store refused the record of embeddings.", code="record_refused") from error
