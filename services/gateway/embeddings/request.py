"""One request for embeddings and its answer, whoever makes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from pydantic import Field

from leyden.libs.contracts.conversation import Json
from leyden.services.gateway.dialects.body import Integer, Wire, read_object
from leyden.services.gateway.errors import BadRequest

MAX_VALUES = 310_000
"""Values of a body: OpenAI's limit of 300,000 tokens in one request, each an id, and some more."""

MAX_INPUTS = 2048
"""OpenAI's limit of one request."""
SEND_TEXTS = (
    "This model of embeddings has a vocabulary of its own, so that token ids of another one say nothing: send texts"
    " (LangChain's OpenAIEmbeddings does with check_embedding_ctx_length=False), or name a provider in the run"
    " (embeddings: {provider: NAME})."
)


class Texts(Wire):
    """The fields of a request of texts."""

    model: str = Field(max_length=1000)
    input: str | list[str] | list[int] | list[list[int]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Integer | None = Field(default=None, ge=1)

    def texts(self) -> list[str]:
        """Raises: BadRequest: there is none, one is empty, there are too many, or they are token ids."""
        given = [self.input] if isinstance(self.input, str) else self.input
        texts = [one for one in given if isinstance(one, str)]
        if len(texts) < len(given):
            raise BadRequest(SEND_TEXTS, param="input", code="unsupported_value")
        if not texts or not all(texts):
            message = "input must not be empty, and neither must any text in it."
            raise BadRequest(message, param="input", code="invalid_value")
        if len(texts) > MAX_INPUTS:
            message = f"input has more than {MAX_INPUTS} texts: send them in several requests."
            raise BadRequest(message, param="input", code="invalid_value")
        return texts


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """A request. Args: body: as the agent sent it; document: the same, parsed, with nothing but its size checked"""

    body: bytes
    document: Json

    @property
    def model(self) -> str | None:
        """The model that the agent names."""
        model = self.document.get("model")
        return model if isinstance(model, str) else None

    @property
    def inputs(self) -> list[object]:
        """The inputs, texts or lists of token ids as a rule."""
        given = self.document.get("input")
        if not isinstance(given, list):
            return [] if given is None else [given]
        return [given] if given and isinstance(given[0], int) else given

    @property
    def texts(self) -> list[str]:
        """The inputs that are texts."""
        return [one for one in self.inputs if isinstance(one, str)]


@dataclass(frozen=True, slots=True)
class Embedded:
    """An answer with its HTTP status; each further field is None where the answer does not tell it.

    Args: dimensions: of one vector; tokens: of all inputs
    """

    content: bytes
    status: int = 200
    media_type: str | None = "application/json"
    model: str | None = None
    dimensions: int | None = None
    tokens: int | None = None


class Embedder(Protocol):
    """Answers requests: a server of OpenAI's API, the engines of a pool, or the bundled model."""

    @property
    def name(self) -> str:
        """The name of the provider or the pool, for the record."""

    async def embed(self, request: EmbeddingRequest) -> Embedded:
        """Returns the answer. Raises: BadRequest: the request is at fault; Unavailable: there is no answer."""


def read_request(body: bytes) -> EmbeddingRequest:
    """Parses a body. Raises: BadRequest: it is no JSON object, or has too many values."""
    return EmbeddingRequest(body, read_object(body, param="input", most=MAX_VALUES))
