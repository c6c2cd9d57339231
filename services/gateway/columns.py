"""A whole answer's log-probabilities as columns.

An engine tells a list for each of thousands of tokens. To make all these lists, and to look into each, takes as long as
everything else that is done with the answer.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import orjson

from leyden.services.gateway.request import Json

_NAME = b'"output_token_logprobs"'
_FIELDS = 3


@dataclass(frozen=True, slots=True)
class Columns:
    """Of each token its log-probability and its id; no booleans are among them."""

    logprobs: list[float]
    tokens: list[int]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, part: slice) -> Columns:
        return Columns(self.logprobs[part], self.tokens[part])


def whole_document(body: bytes) -> Json:
    """The document of an answer that came whole.

    Its `output_token_logprobs` are `Columns` where they are a log-probability, an id and null for each of `output_ids`
    in turn, and otherwise as the engine tells them.

    Raises: ValueError: the body is no JSON
    """
    flat, lists = _flat(body)
    # What does not fit is read as it is, which also tells what is wrong with it.
    with suppress(LookupError, TypeError, ValueError, AttributeError):
        document: Json = orjson.loads(flat)
        values = document["meta_info"]["output_token_logprobs"]
        columns, rest = Columns(values[0::_FIELDS], values[1::_FIELDS]), values[2::_FIELDS]
        is_whole = len(values) == _FIELDS * lists and rest.count(None) == lists
        if is_whole and columns.tokens == document["output_ids"]:
            document["meta_info"]["output_token_logprobs"] = columns
            return document
    plain: Json = orjson.loads(body)
    return plain


def _flat(body: bytes) -> tuple[bytes, int]:
    """The body with one list in place of lists in a list, and how many these were; nothing where there are none."""
    name = body.find(_NAME)
    start = body.find(b"[[", name)
    # Up to the next text, which may have brackets of its own.
    end = body.rfind(b"]]", start, body.find(b'"', start))
    if min(name, start, end) < 0 or body[name + len(_NAME) : start].strip() != b":":
        return b"", 0
    values = body[start + 2 : end]
    flat = values.translate(None, b"[]")
    # No true or false is among numbers and null, which an id would be equal to.
    if b"t" in flat or b"f" in flat:
        return b"", 0
    return b"".join([body[:start], b"[", flat, b"]", body[end + 2 :]]), (len(values) - len(flat)) // 2 + 1
