"""Embeddings: passed on to the run's provider or the operator's server, for the policy makes none. None is recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import httpx
import orjson
from starlette.responses import Response

from leyden.libs.contracts.config import EmbeddingModel
from leyden.libs.service.providers import Provider
from leyden.libs.service.secrets import read_secret
from leyden.services.gateway.dialects.body import read_object
from leyden.services.gateway.errors import NotServed, Unavailable

ANSWER_SECONDS = 60.0
MAX_REQUESTS = 16
"""At once; further ones wait before their bodies are read."""
REMEDY = (
    "This run has no embeddings: name a provider in it (embeddings: {provider: NAME}), set GATEWAY_EMBEDDINGS_URL, or"
    " give the agent an embedding model of its own."
)


@dataclass(frozen=True)
class Server:
    """A server of embeddings. Args: key: sent in place of the agent's; remedy: where the key is set."""

    url: str
    key: str | None
    remedy: str


class Embeddings:
    """A client of the servers that make embeddings; requests and answers pass unchanged, but for the model's name.

    Args: url: the base URL of the operator's server, which ends with `/v1` as a rule, and api_key, its key; None: a
        request whose run names no provider is refused with the remedy
    """

    def __init__(self, url: str | None, api_key: str | None, providers: Mapping[str, Provider]) -> None:
        self.turns = asyncio.Semaphore(MAX_REQUESTS)
        self._default = Server(url, api_key, "set GATEWAY_EMBEDDINGS_API_KEY") if url else None
        self._providers = {
            name: Server(
                f"{one.url}", read_secret(None, one.api_key_file), "check its api_key_file in GATEWAY_PROVIDERS"
            )
            for name, one in providers.items()
        }
        self._http = httpx.AsyncClient(timeout=ANSWER_SECONDS, trust_env=False)

    async def answer(self, body: bytes, model: EmbeddingModel | None) -> Response:
        """Returns the server's answer.

        Args:   model: of the run
        Raises: NotServed: there is no server; BadRequest: the body is no JSON object; Unavailable: the server does not
            answer, or the gateway knows no such provider
        """
        server = self._default if model is None else self._provider(model.provider)
        if server is None:
            raise NotServed(REMEDY, code="embeddings_not_configured")
        if model is not None and model.provider_model is not None:
            body = orjson.dumps({**read_object(body, param="input"), "model": model.provider_model})
        headers = {"content-type": "application/json"} | (
            {"authorization": f"Bearer {server.key}"} if server.key else {}
        )
        try:
            answer = await self._http.post(f"{server.url.rstrip('/')}/embeddings", content=body, headers=headers)
        except httpx.HTTPError as error:
            message = f"The server of embeddings does not answer ({type(error).__name__}); try again."
            raise Unavailable(message, code="embeddings_unavailable", retry_after_seconds=1) from error
        if answer.status_code in {401, 403}:
            message = f"The server of embeddings refuses the gateway's key: {server.remedy}."
            raise Unavailable(message, code="embeddings_unavailable")
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))

    def _provider(self, name: str) -> Server:
        if name not in self._providers:
            known = ", ".join(sorted(self._providers)) or "none"
            message = f"The gateway knows no provider {name!r} (GATEWAY_PROVIDERS names {known})."
            raise Unavailable(message, code="provider_unknown")
        return self._providers[name]

    async def close(self) -> None:
        await self._http.aclose()
