"""The experts that an engine chose, out of its answer into the form of the record.

SGLang returns them with a request's last event: base64 of int32[tokens - 1 - start, layers, experts of a token], where
`tokens` are prompt and answer. The last token has none, because nothing was computed from it. Tokens of the
prefix cache have those of the pass that computed them. Layers without experts have zeros.
"""

from __future__ import annotations

import base64

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


def request_fields(routed_from: int | None) -> Json:
    """The fields of a request that ask for the experts from a position on; None asks for none."""
    if routed_from is None:
        return {}
    return {"return_routed_experts": True, "routed_experts_start_len": routed_from}


def read_experts(meta: Json, start: int, tokens: int) -> RoutedExperts | None:
    """Reads the experts of the tokens [start, tokens - 1); None where there are no such tokens, or too many.

    Args: meta: `meta_info` of a finished answer; tokens: of prompt and answer
    Raises: Unavailable: the engine returned none; ValueError: they are malformed
    """
    encoded = meta.get("routed_experts")
    if encoded is None:
        raise Unavailable(
            "The engine returned no routed experts, which training.routing_replay needs, so the call failed. Start"
            " SGLang with --enable-return-routed-experts and a model with experts, or leave the field out.",
            code="engine_returns_no_experts",
            retry_after_seconds=1,
        )
    rows = tokens - 1 - start
    if rows <= 0:
        return None
    if len(encoded) / _BASE64_BYTES > MAX_BYTES:
        ROUTINGS_LOST.inc()
        return None
    found = np.frombuffer(base64.b64decode(encoded, validate=True), "<i4")
    if not len(found) or len(found) % rows:
        raise ValueError(f"{len(found)} routed experts of {rows} tokens")
    most = int(found.max())
    if most >= 2**16 - 1:
        raise ValueError(f"expert {most} is beyond all numbers of experts")
    kind = np.dtype("u1" if most < 2**8 - 1 else "<u2")
    # The engine pads with negative numbers.
    ids = np.where(found < 0, np.iinfo(kind).max, found).astype(kind)
    return RoutedExperts(start, len(found) // rows, kind.itemsize, ids.tobytes())
