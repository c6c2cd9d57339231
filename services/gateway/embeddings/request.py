"""One request for embeddings and its answer, whoever makes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from leyden.libs.contracts.conversation import Json
from leyden.services.gateway.dialects.body import read_object

MAX_VALUES = 310_000
"""Values of a body: OpenAI's limit of 300,000 tokens in one request, each an id, and some more."""


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
    """Answers requests: a server of OpenAI's API, or the bundled model."""

    @property
    def name(self) -> str:
        """The name of the provider, for the record."""

    async def embed(self, request: EmbeddingRequest) -> Embedded:
        """Returns the answer. Raises: BadRequest: the request is at fault; Unavailable: there is no answer."""


def read_request(body: bytes) -> EmbeddingRequest:
    """Parses a body. Raises: BadRequest: it is no JSON object, or has too many values."""
    return EmbeddingRequest(body, read_object(body, param="input", most=MAX_VALUES))
