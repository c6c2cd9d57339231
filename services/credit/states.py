"""The state of a call: the tools used before it on its path, with their statuses.

GiGPO (arXiv 2505.10978) compares actions in the same anchor state of the environment. The platform does not see the
environment, so the history of tools and statuses stands in for it; a call without a tool is part of that history too.
Siblings start in the same state and stay in it while their histories are equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from leyden.services.credit.air import ToolUse
from leyden.services.credit.forest import Forest

MAX_KEY_LENGTH = 400
NO_TOOL = "-"
START = ""
"""The state of a rollout before its first call."""


def state_keys(forest: Forest, uses: Mapping[str, Sequence[ToolUse]]) -> dict[str, str]:
    """The state of each call by call id, as `memory:ok>search:error` after a memory that worked and a failed search.

    States of later roots begin with the number of the root: the first call of a sub-agent is not that of the agent.
    """
    keys: dict[str, str] = {}
    roots = 0
    for node in forest.nodes:
        if node.parent is None:
            keys[node.call.id] = f"root{roots}" if roots else START
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
