"""Servers of OpenAI's `/embeddings`: a request and its answer pass unchanged, but for the model's name."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import orjson

from leyden.libs.service.providers import Provider
from leyden.libs.service.secrets import read_secret
from leyden.services.gateway.embeddings.request import Embedded, EmbeddingRequest
from leyden.services.gateway.errors import Unavailable

ANSWER_SECONDS = 60.0


@dataclass(frozen=True)
class Server:
    """A server of embeddings.

    Args: key: sent in place of the agent's; remedy: where the key is set; model: its model; None: the agent's choice
    """

    http: httpx.AsyncClient
    name: str
    url: str
    key: str | None
    remedy: str
    model: str | None = None

    async def embed(self, request: EmbeddingRequest) -> Embedded:
        """Returns the server's answer. Raises: Unavailable: it has none, or refuses the gateway's key."""
        body = request.body
        if self.model is not None:
            body = orjson.dumps({**request.document, "model": self.model})
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {self.key}"} if self.key else {})
        try:
            answer = await self.http.post(f"{self.url.rstrip('/')}/embeddings", content=body, headers=headers)
        except httpx.HTTPError as error:
            message = f"The server of embeddings does not answer ({type(error).__name__}); try again."
            raise Unavailable(message, code="embeddings_unavailable", retry_after_seconds=1) from error
        if answer.status_code in {401, 403}:
            message = f"The server of embeddings refuses the gateway's key: {self.remedy}."
            raise Unavailable(message, code="embeddings_unavailable")
        if answer.status_code == httpx.codes.TOO_MANY_REQUESTS or answer.status_code >= 500:
            message = f"The server of embeddings has no answer (status {answer.status_code}); try again."
            raise Unavailable(message, code="embeddings_unavailable", retry_after_seconds=1)
        return await asyncio.to_thread(_embedded, answer)


class Servers:
    """The servers that the settings name.

    Args: url: the base URL of the operator's server, which ends with `/v1` as a rule, and api_key, its key; None: there
        is none
    """

    def __init__(self, url: str | None, api_key: str | None, providers: Mapping[str, Provider]) -> None:
        self._http = httpx.AsyncClient(timeout=ANSWER_SECONDS, trust_env=False)
        self.default = (
            Server(self._http, "server", url, api_key, "set GATEWAY_EMBEDDINGS_API_KEY") if url is not None else None
        )
        self._providers = providers
        self._keys = {name: read_secret(None, one.api_key_file) for name, one in providers.items()}

    def of(self, name: str, model: str | None) -> Server:
        """Returns a provider.

        Args:   model: its model; None: the agent's choice
        Raises: Unavailable: the gateway knows no such provider
        """
        if name not in self._providers:
            known = ", ".join(sorted(self._providers)) or "none"
            message = f"The gateway knows no provider {name!r} (GATEWAY_PROVIDERS names {known})."
            raise Unavailable(message, code="provider_unknown")
        remedy = "check its api_key_file in GATEWAY_PROVIDERS"
        return Server(self._http, name, f"{self._providers[name].url}", self._keys[name], remedy, model)

    async def close(self) -> None:
        """Closes all connections."""
        await self._http.aclose()


def _embedded(answer: httpx.Response) -> Embedded:
    media_type = answer.headers.get("content-type")
    try:
        document = orjson.loads(answer.content)
    except orjson.JSONDecodeError:
        document = None
    found = document if isinstance(document, dict) else {}
    model, usage = found.get("model"), found.get("usage")
    tokens = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return Embedded(
        answer.content,
        answer.status_code,
        media_type,
        model=model if isinstance(model, str) else None,
        dimensions=_dimensions(found.get("data")),
        tokens=tokens if type(tokens) is int else None,
    )


def _dimensions(data: Any) -> int | None:
    """The length of the first vector: a list of numbers, or the base64 of as many float32."""
    vector = data[0].get("embedding") if isinstance(data, list) and data and isinstance(data[0], dict) else None
    if isinstance(vector, str):
        try:
            return len(base64.b64decode(vector, validate=True)) // 4
        except ValueError:
            return None
    return len(vector) if isinstance(vector, list) else None
