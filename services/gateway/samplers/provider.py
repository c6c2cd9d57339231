"""Models of other providers that play a role of a run: they speak OpenAI's chat completions and are never trained."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import httpx
import numpy as np
import orjson

from leyden.libs.contracts.config import Policy
from leyden.libs.service.secrets import read_secret
from leyden.services.gateway.calls.context import Answer, Attempt, CallContext, ModelRequest, Prompt, SampledTokens
from leyden.services.gateway.dialects.chat_client import ProvidedAnswer, read_answer, request_document
from leyden.services.gateway.errors import BadRequest, Unavailable
from leyden.services.gateway.prompt.models import ServedModel
from leyden.services.gateway.prompt.prefix import Conversation, IndexedPrompt
from leyden.services.gateway.samplers.base import Answered
from leyden.services.gateway.settings import ModelProvider

MAX_ANSWER_BYTES = 32 * 1024**2
REFUSALS = frozenset({400, 413, 422})
"""Statuses with which a provider refuses what the agent asks for."""


class Providers:
    """Clients of the providers that the settings name.

    Args: silence_seconds: how long a provider may take for an answer
    """

    def __init__(self, providers: Mapping[str, ModelProvider], *, silence_seconds: float) -> None:
        self._providers = providers
        self._keys = {name: read_secret(None, one.api_key_file) for name, one in providers.items()}
        # The gateway limits its calls itself: a wait for a connection would not count as waiting.
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(silence_seconds, connect=5.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=100),
            trust_env=False,
        )

    async def ask(self, provider: str, model: str | None, request: ModelRequest, request_id: str) -> ProvidedAnswer:
        """Asks a provider.

        Args:   model: the name of its model; None for the one that the request names
        Raises: Unavailable: it has no answer, whatever the request says; BadRequest: it refuses the request
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
        document = request_document(
            request,
            model or request.model,
            limit_name=known.max_tokens_name,
            takes_extras=known.extra_parameters,
        )
        url = f"{known.url.rstrip('/')}/chat/completions"
        try:
            async with self._http.stream("POST", url, content=orjson.dumps(document), headers=headers) as response:
                body = await _read(provider, response)
        except httpx.HTTPError as error:
            message = f"Provider {provider} does not answer ({type(error).__name__}); try again."
            raise _unavailable(message) from error
        _check_status(provider, response, body)
        try:
            return read_answer(body, request.choices, request_id)
        except ValueError as error:
            raise _unavailable(f"Provider {provider} answers with no chat completion ({error}).") from error

    async def close(self) -> None:
        """Closes all connections."""
        await self._http.aclose()


class Answerer(Protocol):
    """Answers a request in place of a policy: a provider, or the conversation of the task."""

    async def ask(self, provider: str, model: str | None, request: ModelRequest, request_id: str) -> ProvidedAnswer:
        """Returns the answer. Raises: Unavailable, BadRequest."""


class ProviderSampler:
    """A Sampler of a policy that another provider answers. Nothing was sampled from tokens: the record has prompt and
    answer as the run's own model would read and write them, so that it can be fine-tuned on them."""

    def __init__(
        self, providers: Answerer, policy: Policy, request: ModelRequest, served: ServedModel, indexed: IndexedPrompt
    ) -> None:
        self.request = request
        self.chat = served.chat
        self.indexed = indexed
        self.constraint: dict[str, str] = {}
        self._prefixes = served.prefixes
        self._providers = providers
        self._policy = policy
        self._answer: ProvidedAnswer | None = None

    @classmethod
    async def prepare(
        cls, providers: Answerer, policy: Policy, request: ModelRequest, served: ServedModel, attempt: Attempt
    ) -> ProviderSampler:
        """Renders the prompt for the record; one that the template of the run's model refuses has no tokens."""
        conversation = Conversation(request.turns, request.tools, request.template_options)
        indexed = IndexedPrompt(Prompt(np.zeros(0, np.int32), None, 0, 0, False), conversation, "", [], None)
        if request.raw_prompt is None:
            with suppress(BadRequest):
                indexed = await served.prefixes.whole(attempt.key, request)
        return cls(providers, policy, request, served, indexed)

    async def sample(
        self, context: CallContext, choices: Sequence[SampledTokens], progressed: Callable[[], None]
    ) -> None:
        """Asks the provider once for all choices."""
        # Before the answer: the time of another provider's model is no wait for the platform.
        for choice in choices:
            choice.accepted_at = time.perf_counter()
        assert self._policy.provider is not None
        self._answer = await self._providers.ask(
            self._policy.provider, self._policy.provider_model, context.request, context.request_id
        )
        for choice in choices:
            choice.ended_at = time.perf_counter()
        if self.indexed.text:
            with suppress(BadRequest):
                for choice, answer in zip(choices, self._answer.answers, strict=True):
                    choice.written_ids = await self._prefixes.written(context.attempt.key, self.indexed, answer.turn)

    def answered(self, context: CallContext, choices: Sequence[SampledTokens]) -> Answered:
        """The provider's answer, with the tokens that it counted."""
        assert self._answer is not None
        return Answered(list(self._answer.answers), self._answer.prompt_tokens, self._answer.completion_tokens)

    def remember(self, context: CallContext, choices: Sequence[SampledTokens], answers: Sequence[Answer]) -> None:
        """Nothing: no prompt of tokens continues the answers."""


async def _read(provider: str, response: httpx.Response) -> bytes:
    body = bytearray()
    async for part in response.aiter_bytes():
        body += part
        if len(body) > MAX_ANSWER_BYTES:
            raise _unavailable(f"Provider {provider} answers with more than {MAX_ANSWER_BYTES} bytes.")
    return bytes(body)


def _check_status(provider: str, response: httpx.Response, body: bytes) -> None:
    """Raises: BadRequest: the request is at fault; Unavailable: the provider, its account or the settings are."""
    status = response.status_code
    if status == 200:
        return
    said = body[:500].decode(errors="replace")
    if status in REFUSALS:
        raise BadRequest(f"Provider {provider} refuses the request ({status}): {said}")
    if status in {401, 403}:
        raise _unavailable(
            f"Provider {provider} refuses the gateway's key: check the api_key_file in GATEWAY_PROVIDERS."
        )
    if status in {408, 409, 429} or status >= 500:
        seconds = response.headers.get("retry-after", "")
        message = f"Provider {provider} answers {status}; try again."
        raise _unavailable(message, int(seconds) if seconds.isdecimal() else 1)
    message = (
        f"Provider {provider} answers {status}: check its url in GATEWAY_PROVIDERS, provider_model and the account."
    )
    raise _unavailable(f"{message} {said}")


def _unavailable(message: str, retry_after_seconds: int = 1) -> Unavailable:
    return Unavailable(message, code="provider_unavailable", retry_after_seconds=retry_after_seconds)
