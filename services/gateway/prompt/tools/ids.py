"""Ids of tool calls as a chat template takes them; agents and records have those of the answer."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from leyden.libs.contracts.conversation import Turn

SHORT = 9
"""Letters and digits of an id in the templates of Mistral, which refuse every other length."""
_SHORT = re.compile(rf"[A-Za-z0-9]{{{SHORT}}}")


def short_ids(turns: Sequence[Turn]) -> Iterator[Turn]:
    """Yields the turns with ids of nine letters and digits: an id of another form becomes the start of its hash."""
    for turn in turns:
        calls = tuple(replace(call, id=_short(call.id)) for call in turn.tool_calls)
        answered = turn.tool_call_id
        if calls or answered is not None:
            turn = replace(turn, tool_calls=calls, tool_call_id=None if answered is None else _short(answered))
        yield turn


def _short(call_id: str) -> str:
    if _SHORT.fullmatch(call_id):
        return call_id
    return hashlib.blake2b(call_id.encode(), digest_size=SHORT).hexdigest()[:SHORT]
