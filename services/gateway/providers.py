"""Models of other providers that play a role of a run: they speak OpenAI's chat completions and are never trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import orjson
from pydantic import BaseModel, ConfigDict

from leyden.libs.service import HttpAddress
from leyden.libs.service.secrets import read_secret
from leyden.services.gateway.conversation import Answer, ModelRequest
from leyden.services.gateway.dialects.chat_client import read_answers, request_document
from leyden.services.gateway.errors import BadRequest, Unavailable


class Provider(BaseModel):
    """A server of OpenAI's chat completions, and the file with its key."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    url: HttpAddress
    api_key_file: Path | None = None


@dataclass(frozen=True, slots=True)
class ProvidedAnswer:
    """A provider's answer: the choices, and the tokens that it counted."""

    answers: tuple[Answer, ...]
    prompt_tokens: int
    completion_tokens: int


class Providers:
    """Clients of the providers that the settings name.

    Args: silence_seconds: how long a provider may take for an answer
    """

    def __init__(self, providers: Mapping[str, Provider], *, silence_seconds: float) -> None:
        self._providers = providers
        self._keys = {name: read_secret(None, one.api_key_file) for name, one in providers.items()}
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(silence_seconds, connect=5.0), trust_env=False)

    async def ask(self, provider: str, model: str | None, request: ModelRequest, request_id: str) -> ProvidedAnswer:
        """Asks a provider.

        Args:   model: the name of its model; None for the one that the request names
        Raises: Unavailable: it does not answer, asks to come later, or refuses the key; BadRequest: it refuses the
            request
        """
        if request.raw_prompt is not None:
            raise BadRequest(f"Provider {provider} answers conversations: send chat completions.", param="prompt")
        known = self._providers.get(provider)
        if known is None:
            names = ", ".join(sorted(self._providers)) or "none"
            message = f"The gateway knows no provider {provider!r} (GATEWAY_PROVIDERS names {names})."
            raise Unavailable(message, code="provider_unknown")
        key = self._keys[provider]
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        body = orjson.dumps(request_document(request, model or request.model))
        try:
            response = await self._http.post(f"{known.url.rstrip('/')}/chat/completions", content=body, headers=headers)
        except httpx.HTTPError as error:
            message = f"Provider {provider} does not answer ({type(error).__name__}); try again."
            raise Unavailable(message, code="provider_unavailable", retry_after_seconds=1) from error
        return _answer(provider, response, request.choices, request_id)

    async def close(self) -> None:
        """Closes all connections."""
        await self._http.aclose()


def _answer(provider: str, response: httpx.Response, choices: int, request_id: str) -> ProvidedAnswer:
    status = response.status_code
    if status in {401, 403}:
        message = f"Provider {provider} refuses the gateway's key: check the api_key_file in GATEWAY_PROVIDERS."
        raise Unavailable(message, code="provider_unavailable")
    if status in {408, 409, 429} or status >= 500:
        seconds = response.headers.get("retry-after", "")
        raise Unavailable(
            f"Provider {provider} answers {status}; try again.",
            code="provider_unavailable",
            retry_after_seconds=int(seconds) if seconds.isdecimal() else 1,
        )
    if status != 200:
        raise BadRequest(f"Provider {provider} refuses the request ({status}): {response.text[:500]}")
    try:
        document = response.json()
        usage = document.get("usage") or {}
        return ProvidedAnswer(
            read_answers(document, choices, request_id),
            usage.get("prompt_tokens") or 0,
            usage.get("completion_tokens") or 0,
        )
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        message = f"Provider {provider} answers with no chat completion ({type(error).__name__}: {error})."
        raise Unavailable(message, code="provider_unavailable", retry_after_seconds=1) from error
