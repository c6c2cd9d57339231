"""Embeddings in the forms of Ollama and Gemini (`/api/embed`, `embedContent`): each is a request of OpenAI's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import orjson
from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from leyden.libs.contracts.conversation import Json
from leyden.services.gateway.dialects.base import WireFormat
from leyden.services.gateway.dialects.body import Integer, Wire, read_object, validated
from leyden.services.gateway.dialects.gemini.dialect import Gemini
from leyden.services.gateway.dialects.ollama import OllamaChat
from leyden.services.gateway.embeddings.request import MAX_VALUES
from leyden.services.gateway.errors import BadRequest


class EmbeddingForm(Protocol):
    """One vendor's form of requests and answers."""

    @property
    def wire_format(self) -> WireFormat:
        """The form of errors."""

    def asked(self, body: bytes) -> bytes:
        """Returns the request in OpenAI's form. Raises: BadRequest."""

    def answered(self, content: bytes) -> bytes:
        """Returns an answer of OpenAI's form, with vectors of floats, in the vendor's."""


class _OllamaBody(Wire):
    model: str = Field(max_length=1000)
    input: str | list[str]
    dimensions: Integer | None = Field(default=None, ge=1)


class OllamaEmbed:
    """Ollama's form. Its options change nothing: `truncate` does not either, and too long a text is refused."""

    wire_format: WireFormat = OllamaChat()

    def asked(self, body: bytes) -> bytes:
        """Returns the request in OpenAI's form. Raises: BadRequest."""
        asked = validated(_OllamaBody, read_object(body, param="input", most=MAX_VALUES), {})
        return _openai(asked.model, asked.input, asked.dimensions)

    def answered(self, content: bytes) -> bytes:
        """Returns an answer of OpenAI's form in Ollama's."""
        found = orjson.loads(content)
        counted = {"prompt_eval_count": tokens} if (tokens := _tokens(found)) is not None else {}
        return orjson.dumps({"model": found.get("model"), "embeddings": _vectors(found), **counted})


class _Google(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)


class _Part(_Google):
    text: str | None = None


class _Content(_Google):
    parts: list[_Part] = Field(min_length=1)


class _One(_Google):
    content: _Content
    output_dimensionality: Integer | None = Field(default=None, ge=1)


class _Batch(_Google):
    requests: list[_One] = Field(min_length=1)


class GeminiEmbed:
    """Google's form. Task types and titles change nothing. Args: model: of the path; action: the end of the path"""

    def __init__(self, model: str, action: Literal["embedContent", "batchEmbedContents"]) -> None:
        self.wire_format: WireFormat = Gemini(model)
        self._model, self._is_batch = model, action == "batchEmbedContents"

    def asked(self, body: bytes) -> bytes:
        """Returns the request in OpenAI's form. Raises: BadRequest: something is no text, or lengths differ."""
        document = read_object(body, param="content", most=MAX_VALUES)
        requests = validated(_Batch, document, {}).requests if self._is_batch else [validated(_One, document, {})]
        lengths = {one.output_dimensionality for one in requests}
        if len(lengths) > 1:
            message = "outputDimensionality differs among the requests: send those of one length at a time."
            raise BadRequest(message, param="outputDimensionality", code="unsupported_value")
        return _openai(self._model, [_text(one.content) for one in requests], lengths.pop())

    def answered(self, content: bytes) -> bytes:
        """Returns an answer of OpenAI's form in Google's."""
        found = orjson.loads(content)
        vectors = [{"values": vector} for vector in _vectors(found)]
        counted = {"usageMetadata": {"promptTokenCount": tokens}} if (tokens := _tokens(found)) is not None else {}
        made: Json = {"embeddings": vectors} if self._is_batch else {"embedding": vectors[0]}
        return orjson.dumps({**made, **counted})


def _text(content: _Content) -> str:
    texts = [part.text for part in content.parts if part.text is not None]
    if len(texts) < len(content.parts):
        raise BadRequest(
            "Parts other than text are not embedded: send text.", param="content", code="unsupported_value"
        )
    return "".join(texts)


def _openai(model: str, texts: str | Sequence[str], dimensions: int | None) -> bytes:
    document: Json = {"model": model, "input": texts, "encoding_format": "float"}
    return orjson.dumps(document if dimensions is None else document | {"dimensions": dimensions})


def _vectors(found: Any) -> list[Any]:
    return [one["embedding"] for one in found["data"]]


def _tokens(found: Any) -> int | None:
    usage = found.get("usage") or {}
    tokens: int | None = usage.get("prompt_tokens")
    return tokens
