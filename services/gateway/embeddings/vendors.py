"""Embeddings in the forms of Ollama and Gemini (`/api/embed`, `embedContent`): each is a request of OpenAI's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from leyden.libs.contracts.conversation import Json
from leyden.services.gateway.dialects.base import WireFormat
from leyden.services.gateway.dialects.body import Integer, Wire, first_reason, read_object, validated
from leyden.services.gateway.dialects.gemini.dialect import Gemini
from leyden.services.gateway.dialects.ollama import OllamaChat
from leyden.services.gateway.embeddings.request import MAX_VALUES
from leyden.services.gateway.errors import BadRequest, Unavailable


class EmbeddingForm(Protocol):
    """One vendor's form of requests and answers."""

    @property
    def wire_format(self) -> WireFormat:
        """The form of errors."""

    def asked(self, body: bytes) -> bytes:
        """Returns the request in OpenAI's form. Raises: BadRequest."""

    def answered(self, content: bytes) -> bytes:
        """Returns an answer of OpenAI's form, with vectors of floats, in the vendor's.

        Raises: Unavailable: there are none in it
        """


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
        answer = _answer_of(content)
        counted = {} if answer.tokens is None else {"prompt_eval_count": answer.tokens}
        return orjson.dumps({"model": answer.model, "embeddings": answer.vectors, **counted})


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
        answer = _answer_of(content)
        vectors = [{"values": vector} for vector in answer.vectors]
        counted = {} if answer.tokens is None else {"usageMetadata": {"promptTokenCount": answer.tokens}}
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


class _Vector(BaseModel):
    embedding: list[float]


class _Usage(BaseModel):
    prompt_tokens: int | None = None


class _Answer(BaseModel):
    model: str | None = None
    data: list[_Vector] = Field(min_length=1)
    usage: _Usage | None = None

    @property
    def vectors(self) -> list[list[float]]:
        return [one.embedding for one in self.data]

    @property
    def tokens(self) -> int | None:
        return self.usage.prompt_tokens if self.usage else None


def _answer_of(content: bytes) -> _Answer:
    try:
        return _Answer.model_validate_json(content)
    except ValidationError as error:
        message = f"The server of embeddings gave no vectors in OpenAI's form ({first_reason(error)})."
        raise Unavailable(message, code="embeddings_unavailable") from error
