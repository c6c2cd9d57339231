"""The state in which a call was made: what the agent's tools had done before it.

GiGPO (arXiv 2505.10978) compares actions taken in the same anchor state of the environment. The platform does not see
the environment, so the history of tools and their statuses on the way to the call stands in for it; a call that used
no tool is part of that history too. Siblings begin in the same state, and stay in the same as long as the same things
happened.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from leyden.services.credit.air import ToolUse
from leyden.services.credit.forest import Forest

MAX_KEY_LENGTH = 400
NO_TOOL = "-"


def state_keys(forest: Forest, uses: Mapping[str, Sequence[ToolUse]]) -> dict[str, str]:
    """The state of each call, by call id; `memory:ok>search:error` after a memory that worked and a search that failed.

    Roots beyond the first begin with their number, since a sub-agent's first call is not the agent's first call.
    """
    keys: dict[str, str] = {}
    roots = 0
    for node in forest.nodes:
        if node.parent is None:
            keys[node.call.id] = f"root{roots}" if roots else ""
            roots += 1
        else:
            before = keys[node.parent.call.id]
            step = _step(uses.get(node.parent.call.id, ()))
            keys[node.call.id] = _bounded(f"{before}>{step}" if before else step)
    return keys


def _step(uses: Sequence[ToolUse]) -> str:
    return "+".join(f"{use.tool}:{use.status}" for use in uses) or NO_TOOL


def _bounded(key: str) -> str:
    return key if len(key) <= MAX_KEY_LENGTH else f"#{hashlib.sha256(key.encode()).hexdigest()[:32]}"
