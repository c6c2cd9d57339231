"""The experts that an engine chose, out of its answer into the form of the record.

SGLang returns them with a request's last event: base64 of int32[tokens - 1 - start, layers, experts of a token], where
`tokens` are prompt and answer. The last token has none, because nothing was computed from it. Tokens of the
prefix cache have those of the pass that computed them. Layers without experts have zeros.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass

import numpy as np

from leyden.libs.contracts.conversation import Json
from leyden.libs.contracts.samples import RoutedExperts
from leyden.services.gateway.errors import Unavailable
from leyden.services.gateway.metrics import ROUTINGS_LOST

MAX_BYTES = 32 * 2**20
"""Most bytes of a call's record: 87,000 tokens of 48 layers with 8 of at most 255 experts. A longer call
has no record, and the trainer its own choice."""
_BASE64_BYTES = 16 / 3
"""An int32 in base64."""
_PIECE_BYTES = 2**18
"""Base64 that is decoded at once, of whole numbers: each piece keeps all threads waiting for a fraction of a
millisecond."""
# Texts in JSON escape their quotes, so that none of them holds this.
_VALUE = re.compile(rb'"routed_experts"\s*:\s*"')


def request_fields(routed_from: int | None) -> Json:
    """The fields of a request that ask for the experts from a position on; None asks for none."""
    if routed_from is None:
        return {}
    return {"return_routed_experts": True, "routed_experts_start_len": routed_from}


@dataclass(frozen=True, slots=True)
class Chosen:
    """Experts of an engine's answer, one after another, as unsigned integers of `item_bytes` bytes whose largest number
    stands for none. ids: None: there are more than a record holds.
    """

    count: int
    item_bytes: int
    ids: bytes | None


def cut_experts(event: bytes) -> tuple[bytes, memoryview | None]:
    """Takes the base64 of experts out of an event: the JSON parser keeps all threads waiting while it reads that.

    Returns: the event with null in its place; the base64, None where there is none
    """
    found = _VALUE.search(event)
    end = event.find(b'"', found.end()) if found else -1
    if found is None or end < 0:
        return event, None
    return b"null".join((event[: found.end() - 1], event[end + 1 :])), memoryview(event)[found.end() : end]


def decode_experts(encoded: memoryview) -> Chosen:
    """Decodes and narrows the experts of an answer, piece by piece. Raises: ValueError: they are malformed"""
    if len(encoded) / _BASE64_BYTES > MAX_BYTES:
        return Chosen(0, 0, None)
    found, most = [np.empty(0, "<u2")], -1
    for start in range(0, len(encoded), _PIECE_BYTES):
        piece = np.frombuffer(base64.b64decode(encoded[start : start + _PIECE_BYTES], validate=True), "<i4")
        most = max(most, int(piece.max(initial=-1)))
        if most >= 2**16 - 1:
            raise ValueError(f"expert {most} is beyond all numbers of experts")
        # The engine pads with negative numbers.
        found.append(np.where(piece < 0, 2**16 - 1, piece).astype("<u2"))
    ids = np.concatenate(found)
    if most < 2**8 - 1:
        # The largest number becomes the largest of the smaller type.
        ids = ids.astype("u1")
    return Chosen(len(ids), ids.itemsize, ids.tobytes())


def read_experts(chosen: Chosen | None, start: int, tokens: int) -> RoutedExperts | None:
    """The record of the tokens [start, tokens - 1); None where there are no such tokens, or too many.

    Args: chosen: of a finished answer; tokens: of prompt and answer
    Raises: Unavailable: the engine returned none; ValueError: they are not so many
    """
    if chosen is None:
        raise Unavailable(
            "The engine returned no routed experts, which training.routing_replay needs, so the call failed. Start"
            " SGLang with --enable-return-routed-experts and a model with experts, or leave the field out.",
            code="engine_returns_no_experts",
            retry_after_seconds=1,
        )
    rows = tokens - 1 - start
    if rows <= 0:
        return None
    if chosen.ids is None:
        ROUTINGS_LOST.inc()
        return None
    if not chosen.count or chosen.count % rows:
        raise ValueError(f"{chosen.count} routed experts of {rows} tokens")
    return RoutedExperts(start, chosen.count // rows, chosen.item_bytes, chosen.ids)
