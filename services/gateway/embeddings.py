"""Embeddings: passed on to another server, for the policy makes none. Nothing is recorded or trained."""

from __future__ import annotations

import asyncio

import httpx
from starlette.responses import Response

from leyden.services.gateway.errors import NotServed, Unavailable

ANSWER_SECONDS = 60.0
MAX_REQUESTS = 16
"""At once; further ones wait before their bodies are read."""
REMEDY = (
    "This platform serves no embeddings: set GATEWAY_EMBEDDINGS_URL, or give the agent an embedding model of its own."
)


class Embeddings:
    """A client of the server that makes embeddings; requests and answers pass unchanged.

    Args: url: its base URL, which ends with `/v1` as a rule; None: each request is refused with the remedy
          api_key: sent in place of the agent's key, which means nothing there
    """

    def __init__(self, url: str | None, api_key: str | None) -> None:
        self.turns = asyncio.Semaphore(MAX_REQUESTS)
        self._url = url.rstrip("/") if url else None
        authorization = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.AsyncClient(timeout=ANSWER_SECONDS, trust_env=False, headers=authorization)

    async def answer(self, body: bytes) -> Response:
        """Returns the server's answer. Raises: NotServed: there is no server; Unavailable: it does not answer."""
        if self._url is None:
            raise NotServed(REMEDY, code="embeddings_not_configured")
        try:
            answer = await self._http.post(
                f"{self._url}/embeddings", content=body, headers={"content-type": "application/json"}
            )
        except httpx.HTTPError as error:
            message = f"The server of embeddings does not answer ({type(error).__name__}); try again."
            raise Unavailable(message, code="embeddings_unavailable", retry_after_seconds=1) from error
        if answer.status_code in {401, 403}:
            message = "The server of embeddings refuses the gateway's key: set GATEWAY_EMBEDDINGS_API_KEY."
            raise Unavailable(message, code="embeddings_unavailable")
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))

    async def close(self) -> None:
        await self._http.aclose()
