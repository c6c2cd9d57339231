"""Completions: OpenAI's `POST /v1/completions`, which continues a raw prompt without the model's chat template."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from pydantic import Field

from leyden.libs.contracts.conversation import Dialect, Json, Turn
from leyden.services.gateway.calls.context import Answer, Completion, ModelRequest, TokenLogprob
from leyden.services.gateway.dialects.base import WireFormat
from leyden.services.gateway.dialects.body import Integer, Wire, read_object, validated
from leyden.services.gateway.dialects.chat_completions import parse_document
from leyden.services.gateway.dialects.openai import Chunks, answer_body
from leyden.services.gateway.errors import BadRequest

KIND = "text_completion"
DEFAULT_MAX_TOKENS = 16
"""OpenAI's own."""
REMEDIES = {
    "echo": "join the prompt and the answer in the agent",
    "suffix": "write the text after the gap into the prompt, in the form that the model was trained on",
    "best_of": "ask for `n` choices and choose among them",
    "messages": "send them to /chat/completions",
    "tools": "send them to /chat/completions",
    "functions": "send them to /chat/completions",
}
OWN = frozenset({"prompt", "logprobs", *REMEDIES})

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Prompt = Annotated[str, Field(min_length=1)] | Annotated[list[TokenId], Field(min_length=1)]


class _Own(Wire):
    prompt: Prompt | Annotated[list[Prompt], Field(min_length=1, max_length=1)]
    logprobs: Integer | None = Field(default=None, ge=0, le=5)


class Completions(WireFormat):
    """The dialect of text completions; a request has one prompt, of text or of token ids."""

    def parse(self, body: bytes, *, max_choices: int) -> ModelRequest:
        """Parses and validates a body; the fields beside the prompt are those of chat completions.

        Raises: BadRequest: not JSON, a field is wrong, or the model cannot serve a field
        """
        document = read_object(body, param="prompt")
        own = validated(_Own, document, {})
        for name, remedy in REMEDIES.items():
            if document.get(name) and not (name == "best_of" and document[name] == document.get("n", 1)):
                raise BadRequest(f"{name} is not supported; {remedy}.", param=name, code="unsupported_parameter")
        prompt = own.prompt[0] if isinstance(own.prompt, list) and not isinstance(own.prompt[0], int) else own.prompt
        shared = {name: value for name, value in document.items() if name not in OWN and value is not None}
        text = prompt if isinstance(prompt, str) else ""
        chat = {"max_tokens": DEFAULT_MAX_TOKENS, "messages": [{"role": "user", "content": text}], **shared}
        if own.logprobs is not None:
            chat |= {"logprobs": True, "top_logprobs": own.logprobs}
        return replace(
            parse_document(chat, hashlib.sha256(body).digest(), max_choices=max_choices),
            dialect=Dialect.COMPLETIONS,
            turns=(Turn("user", text),),
            parameters={name: value for name, value in document.items() if name != "prompt"},
            raw_prompt=prompt if isinstance(prompt, str) else tuple(prompt),
        )

    def body(self, _request: ModelRequest, completion: Completion) -> Json:
        """Returns a `text_completion` object."""
        texts = [
            _choice(answer.index, answer.turn.content, answer.logprobs, answer.finish_reason)
            for answer in completion.answers
        ]
        return answer_body(KIND, f"cmpl-{completion.request_id}", completion, texts)

    def stream(self, request: ModelRequest, request_id: str, created: int, _prompt_tokens: int) -> CompletionChunks:
        """Returns a writer of a completion's chunks."""
        return CompletionChunks(request, f"cmpl-{request_id}", created)


class CompletionChunks(Chunks):
    """The chunks of one stream."""

    kind = KIND

    def reasoning(self, _index: int, _text: str) -> bytes:
        """Encodes nothing: a completion's text is not split."""
        return b""

    def text(self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None) -> bytes:
        """Encodes one chunk with text."""
        return self._encode(_choice(index, text, logprobs, None))

    def rest(self, answer: Answer, text: str, logprobs: Sequence[TokenLogprob] | None) -> bytes:
        """Encodes a chunk with the rest of the text; no bytes where there is none."""
        return self.text(answer.index, text, logprobs) if text or logprobs else b""

    def _ended(self, answer: Answer) -> Json:
        return _choice(answer.index, "", None, answer.finish_reason)


def _choice(index: int, text: str, logprobs: Sequence[TokenLogprob] | None, finish_reason: str | None) -> Json:
    return {"index": index, "text": text, "logprobs": _logprobs(logprobs), "finish_reason": finish_reason}


def _logprobs(logprobs: Sequence[TokenLogprob] | None) -> Json | None:
    if logprobs is None:
        return None
    return {
        "tokens": [entry.text for entry in logprobs],
        "token_logprobs": [entry.logprob for entry in logprobs],
        "top_logprobs": [{top.text: top.logprob for top in entry.top} for entry in logprobs],
    }
