"""Engines of a pool that embed: SGLang's `/v1/embeddings`, which gets the texts of a request and nothing else of it.

SGLang reads more fields, which are no agent's to set: an adapter behind a colon in the model's name, a request's id, a
priority. A token id beyond its vocabulary ends it.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence

import httpx
import orjson

from leyden.libs.contracts.conversation import Json
from leyden.libs.contracts.states import EngineState
from leyden.libs.store.engines import EngineStatus
from leyden.libs.telemetry import RateLimitedLogger, logger
from leyden.services.gateway.dialects.body import validated
from leyden.services.gateway.embeddings.request import Embedded, EmbeddingRequest, Texts
from leyden.services.gateway.embeddings.servers import ANSWER_SECONDS, Server
from leyden.services.gateway.engine.sglang import refusal
from leyden.services.gateway.errors import BadRequest, Unavailable

MODEL = "default"
"""SGLang's name for the model that it has."""
_NO_MODEL_OF_EMBEDDINGS = "--is-embedding"
"""In SGLang's words, where its model samples text."""

limited_log = RateLimitedLogger(logger())

ReadEngines = Callable[[str], Awaitable[Sequence[EngineStatus] | None]]


class EmbeddingPools:
    """The pools of the controller that embed.

    Args: read: the engines of a pool as the controller last saw them, None where there is no such pool; api_key: of all
        engines
    """

    def __init__(self, read: ReadEngines, api_key: str | None) -> None:
        self._http = httpx.AsyncClient(timeout=ANSWER_SECONDS, trust_env=False)
        self._read, self._api_key = read, api_key

    def of(self, name: str) -> EnginesOfPool:
        """Returns the engines of a pool, which each request looks up."""
        return EnginesOfPool(name, self._read, self._server)

    async def close(self) -> None:
        """Closes all connections."""
        await self._http.aclose()

    def _server(self, name: str, url: str) -> Server:
        return Server(self._http, name, f"{url.rstrip('/')}/v1", self._api_key, "set GATEWAY_ENGINE_API_KEY")


class EnginesOfPool:
    """The engines of one pool. Any of them answers, since all have one model."""

    def __init__(self, name: str, read: ReadEngines, server: Callable[[str, str], Server]) -> None:
        self.name, self._read, self._server = name, read, server

    async def embed(self, request: EmbeddingRequest) -> Embedded:
        """Returns the answer of an engine.

        Raises: BadRequest: the request is at fault; Unavailable: there is no such pool, or none of its engines answers
        """
        sent = _sent(request)
        engines = await self._read(self.name)
        if engines is None:
            message = f"No pool {self.name!r} makes embeddings: add one with `embeddings` to CONTROLLER_POOLS."
            raise Unavailable(message, code="pool_unknown")
        troubles = [f"{one.url}: {one.detail}" for one in engines if one.state is not EngineState.SERVING]
        serving = [one.url for one in engines if one.state is EngineState.SERVING]
        for url in random.sample(serving, len(serving)):
            try:
                answer = await self._server(self.name, url).embed(sent)
            except Unavailable as error:
                troubles.append(f"{url}: {error}")
                continue
            if answer.status < 400:
                return answer
            refused = refusal(answer.status, answer.content.decode(errors="replace"))
            if isinstance(refused, BadRequest) and _NO_MODEL_OF_EMBEDDINGS not in str(refused):
                raise refused
            troubles.append(f"{url}: {refused}")
        limited_log.warning("no engine embeds", pool=self.name, engines=troubles[:10])
        message = (
            f"No engine of pool {self.name!r} makes embeddings: start SGLang with --is-embedding there; `leyden pools"
            " --json` tells what each engine says."
        )
        raise Unavailable(message, code="embeddings_unavailable", retry_after_seconds=1)


def _sent(request: EmbeddingRequest) -> EmbeddingRequest:
    """Returns the request that an engine gets. Raises: BadRequest: it has no texts."""
    asked = validated(Texts, request.document, {})
    document: Json = {"model": MODEL, "input": asked.texts(), "encoding_format": asked.encoding_format}
    if asked.dimensions is not None:
        document["dimensions"] = asked.dimensions
    return EmbeddingRequest(orjson.dumps(document), document)
