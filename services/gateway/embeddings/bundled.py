"""The embedding model of one machine: averages of the token vectors in the wheel `wordllama`, on one thread.

The wheel is read for its files alone: its code configures the root logger, and fetches its tokenizer from the internet.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import Field
from tokenizers import Tokenizer

from leyden.libs.contracts.conversation import Json
from leyden.services.gateway.dialects.body import Integer, validated
from leyden.services.gateway.embeddings.request import Embedded, EmbeddingRequest, Texts
from leyden.services.gateway.errors import BadRequest, Unavailable

PACKAGE = "wordllama"
MODEL = "wordllama-l2-supercat"
WEIGHTS, TOKENIZER = "weights/l2_supercat_256.safetensors", "tokenizers/l2_supercat_tokenizer_config.json"
DIMENSIONS = 256
MAX_TOKENS, MAX_ALL_TOKENS = 8192, 300_000
"""OpenAI's limits: tokens of an input, and of all of a request."""
LONGEST_TOKEN = 16
"""Characters of the vocabulary's longest token: no text with more than `MAX_TOKENS` times as many is encoded."""
SECONDS = 30.0
"""A request waits and runs for so long; the clock is read between two inputs, of which the longest takes 0.2 s."""


class Body(Texts):
    """The fields of a request."""

    dimensions: Integer = Field(default=DIMENSIONS, ge=1, le=DIMENSIONS)


class BundledModel:
    """The model; its files are read at the first request. Args: folder: of the wheel's package."""

    name = "bundled"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="embed")

    async def embed(self, request: EmbeddingRequest) -> Embedded:
        """Returns unit vectors, [inputs, dimensions]; one of fewer dimensions is the beginning of the whole one.

        Raises: BadRequest: an input is empty, too long, or token ids; Unavailable: others take too long
        """
        work = asyncio.get_running_loop().run_in_executor
        return await work(self._thread, self._embed, request.document, time.monotonic() + SECONDS)

    def close(self) -> None:
        """Ends the thread after the request at hand."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _embed(self, document: Json, deadline: float) -> Embedded:
        body = validated(Body, document, {})
        vectors, tokens = list[npt.NDArray[np.float32]](), 0
        for ids in self._encoded(body.texts()):
            tokens += len(ids)
            if tokens > MAX_ALL_TOKENS:
                message = f"The inputs have more than {MAX_ALL_TOKENS} tokens together: send them in several requests."
                raise BadRequest(message, param="input", code="context_length_exceeded")
            if time.monotonic() > deadline:
                message = "The bundled model of embeddings has too much to do; try again, or send fewer texts at once."
                raise Unavailable(message, code="embeddings_unavailable", retry_after_seconds=1)
            vectors.append(self._vector(ids, body.dimensions))
        data = [
            {"object": "embedding", "index": index, "embedding": _written(vector, body.encoding_format)}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        content = orjson.dumps(
            {"object": "list", "data": data, "model": MODEL, "usage": usage}, option=orjson.OPT_SERIALIZE_NUMPY
        )
        return Embedded(content, model=MODEL, dimensions=body.dimensions, tokens=tokens)

    def _encoded(self, texts: Sequence[str]) -> Iterator[list[int]]:
        for index, one in enumerate(texts):
            ids = self._tokenizer.encode(one, add_special_tokens=False).ids if len(one) <= _LONGEST_TEXT else None
            if ids is None or len(ids) > MAX_TOKENS:
                message = f"Input {index} has more than {MAX_TOKENS} tokens: divide it into shorter texts."
                raise BadRequest(message, param="input", code="context_length_exceeded")
            yield ids

    def _vector(self, ids: Sequence[int], dimensions: int) -> npt.NDArray[np.float32]:
        mean: npt.NDArray[np.float32] = self._table[ids, :dimensions].astype(np.float32).mean(axis=0)
        length = float(np.linalg.norm(mean))
        return mean / length if length else mean

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self._folder / TOKENIZER))

    @cached_property
    def _table(self) -> npt.NDArray[np.float16]:
        """The vectors of all tokens, [vocabulary, 256], as the file has them."""
        path = self._folder / WEIGHTS
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            tensor = json.loads(file.read(header_bytes))["embedding.weight"]
        offset = 8 + header_bytes + tensor["data_offsets"][0]
        return np.memmap(path, dtype="<f2", mode="r", offset=offset, shape=tuple(tensor["shape"]))


_LONGEST_TEXT = MAX_TOKENS * LONGEST_TOKEN


def bundled_model() -> BundledModel | None:
    """Returns the model; None where its wheel is not installed."""
    found = find_spec(PACKAGE)
    folders = list(found.submodule_search_locations or ()) if found is not None else []
    return BundledModel(Path(folders[0])) if folders else None


def _written(vector: npt.NDArray[np.float32], form: str) -> npt.NDArray[np.float32] | str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if form == "base64" else vector
