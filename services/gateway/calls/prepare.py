"""The agent of a call: a fingerprint of its instructions and tools tells the agents of one rollout apart.

Several agents of a framework share one key and one address. Each has its own system prompt or its own tools, or names
itself in the header `x-agent-name` or its system message; LangChain sends its name with the answers that it sends back.
A name belongs to the fingerprint: later calls of the run without one have it, too (`agent_names`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import takewhile

from leyden.libs.contracts.config import Role
from leyden.services.gateway.calls.context import Agent, ModelRequest

NAME_HEADER = "x-agent-name"
MAX_NAME_LENGTH = 200


def agent_of(request: ModelRequest, header: str | None) -> Agent:
    """The agent that sends a request.

    Args: header: the value of `x-agent-name`
    """
    sent = _name(header or "")
    digest = hashlib.blake2b(digest_size=8)
    for part in (sent, *sorted(tool.name for tool in request.tools), "", *_instructions(request)):
        digest.update(part.encode("utf-8", "surrogatepass") + b"\0")
    own = takewhile(lambda turn: turn.role == "system", request.turns)
    said = (turn for turn in reversed(request.turns) if turn.role == "assistant")
    names = (turn.name for turn in (*own, *said) if turn.name)
    return Agent(digest.hexdigest(), sent or _name(next(names, "")) or None)


def role_of(roles: Sequence[Role], request: ModelRequest, agent: Agent) -> str | None:
    """The name of the first role whose conditions the request meets."""
    return next((role.name for role in roles if _meets(role, request, agent)), None)


def _meets(role: Role, request: ModelRequest, agent: Agent) -> bool:
    return (
        (role.agent_name is None or fnmatchcase(agent.name or "", role.agent_name))
        and (role.identity is None or role.identity == agent.id)
        and (role.model is None or fnmatchcase(request.model, role.model))
        and {tool.name for tool in request.tools}.issuperset(role.tools)
        and (role.system is None or any(role.system in text for text in _instructions(request)))
    )


def _instructions(request: ModelRequest) -> list[str]:
    return [turn.content for turn in takewhile(lambda turn: turn.role == "system", request.turns)]


def _name(text: str) -> str:
    # Postgres has no text with U+0000.
    return text.replace("\0", "")[:MAX_NAME_LENGTH]
