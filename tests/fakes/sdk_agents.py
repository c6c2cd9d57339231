"""One agent for each dialect, on the official SDK's own client: they ask, and tell what they received in one form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import anthropic
import httpx
import httpx2
import openai

REPEATABLE_STATUS = {408, 409, 429}
REPEATABLE_TYPES = {"service_unavailable", "overloaded_error", "api_error", "rate_limit_error", "requests"}
MAX_TOKENS = 256


@dataclass(frozen=True)
class Received:
    """A complete answer: the id of its call, without the dialect's prefix, and its text."""

    request_id: str
    text: str


class ResponseFailed(Exception):
    """A stream of the responses dialect ended with `response.failed`."""


class SdkAgent(Protocol):
    """An agent with one conversation. `shown` is the text that the latest stream has delivered so far."""

    shown: str

    async def ask(self, question: str, *, stream: bool) -> Received:
        """Asks, and adds question and answer to the conversation once the answer is complete.

        Raises: AssertionError: a stream ended without an error and without its dialect's last event
        """
        ...


class ChatAgent:
    """Chat completions by `openai`."""

    def __init__(self, client: openai.AsyncOpenAI) -> None:
        self._create: Any = client.chat.completions.create
        self._messages: list[Any] = []
        self.shown = ""

    async def ask(self, question: str, *, stream: bool) -> Received:
        messages = [*self._messages, {"role": "user", "content": question}]
        answer = await self._create(model="m", messages=messages, max_tokens=MAX_TOKENS, stream=stream)
        if stream:
            received = await self._follow(answer)
        else:
            received = Received(answer.id.removeprefix("chatcmpl-"), answer.choices[0].message.content)
        self._messages = [*messages, {"role": "assistant", "content": received.text}]
        return received

    async def _follow(self, answer: Any) -> Received:
        self.shown, request_id, finish = "", "", None
        async for chunk in answer:
            request_id = chunk.id
            for choice in chunk.choices:
                self.shown += choice.delta.content or ""
                finish = choice.finish_reason or finish
        assert finish is not None, "the stream ended as if complete"
        return Received(request_id.removeprefix("chatcmpl-"), self.shown)


class ResponsesAgent:
    """Responses by `openai`; the gateway stores the conversation."""

    def __init__(self, client: openai.AsyncOpenAI) -> None:
        self._create: Any = client.responses.create
        self._previous: str | None = None
        self.shown = ""

    async def ask(self, question: str, *, stream: bool) -> Received:
        asked = {"model": "m", "input": question, "max_output_tokens": MAX_TOKENS, "stream": stream}
        answer = await self._create(**asked, previous_response_id=self._previous)
        response = await self._follow(answer) if stream else answer
        assert response.status == "completed", response.status
        self._previous = response.id
        return Received(response.id.removeprefix("resp_"), response.output_text)

    async def _follow(self, answer: Any) -> Any:
        self.shown, response = "", None
        async for event in answer:
            match event.type:
                case "response.output_text.delta":
                    self.shown += event.delta
                case "response.completed":
                    response = event.response
                case "response.failed":
                    raise ResponseFailed(event.response.error.code)
        assert response is not None, "the stream ended as if complete"
        assert response.output_text == self.shown
        return response


class MessagesAgent:
    """Messages by `anthropic`."""

    def __init__(self, client: anthropic.AsyncAnthropic) -> None:
        self._create: Any = client.messages.create
        self._messages: list[Any] = []
        self.shown = ""

    async def ask(self, question: str, *, stream: bool) -> Received:
        messages = [*self._messages, {"role": "user", "content": question}]
        answer = await self._create(model="m", messages=messages, max_tokens=MAX_TOKENS, stream=stream)
        if stream:
            received = await self._follow(answer)
        else:
            received = Received(answer.id.removeprefix("msg_"), answer.content[0].text)
        self._messages = [*messages, {"role": "assistant", "content": received.text}]
        return received

    async def _follow(self, answer: Any) -> Received:
        self.shown, request_id, is_complete = "", "", False
        async for event in answer:
            match event.type:
                case "message_start":
                    request_id = event.message.id
                case "content_block_delta":
                    self.shown += event.delta.text
                case "message_stop":
                    is_complete = True
        assert is_complete, "the stream ended as if complete"
        return Received(request_id.removeprefix("msg_"), self.shown)


def may_be_repeated(error: Exception) -> bool:
    """Whether an agent that gets this error knows that it may ask again."""
    if isinstance(error, ResponseFailed):
        return str(error) in {"server_error", "rate_limit_exceeded"}
    if isinstance(error, (openai.APIStatusError, anthropic.APIStatusError)) and error.status_code != 200:
        return error.status_code >= 500 or error.status_code in REPEATABLE_STATUS
    lost = (openai.APIConnectionError, anthropic.APIConnectionError, httpx.TransportError, httpx2.TransportError)
    if isinstance(error, lost):
        return True
    # An error event within a stream.
    body = getattr(error, "body", None)
    cause = body.get("error", body) if isinstance(body, dict) else {}
    return cause.get("type") in REPEATABLE_TYPES
