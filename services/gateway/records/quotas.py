"""The most calls and objects that one attempt may store."""

from __future__ import annotations

from collections.abc import Sequence

from leyden.libs.service.quota import Quota
from leyden.libs.store.attempts import AttemptKey
from leyden.services.gateway.errors import BadRequest
from leyden.services.gateway.metrics import REFUSED


class AttemptQuota(Quota[AttemptKey]):
    """A limit of all attempts."""

    def check(self, attempt: AttemptKey, sizes: Sequence[int]) -> None:
        """Passes an attempt that may store items of these sizes. Raises: BadRequest."""
        if self.fitting(attempt, sizes) < len(sizes):
            REFUSED.labels(self.limit.noun).inc()
            raise BadRequest(f"T{self.limit.message()[1:]}.", code="attempt_limit")
