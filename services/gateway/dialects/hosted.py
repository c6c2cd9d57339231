"""Hosted tools: those that a vendor's server runs, such as a web search. The model is not offered them, and the record
of the call names them (`request.hosted_tools`), and so the items of their calls, which it is not shown
(`request.hosted_items`). OpenAI's tools for a shell and for patches count among them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from leyden.libs.contracts.conversation import Json
from leyden.services.gateway.errors import BadRequest

RUN_BY_AGENTS = ("bash", "computer", "memory", "text_editor")
"""Tools that the agent runs, and whose fields only the vendor's models know: an agent cannot work without them."""


def without_hosted(tools: Sequence[Json], served: Collection[str | None]) -> tuple[list[Json], Json]:
    """Returns the tools that the model is offered, and the part of the record that names the others.

    Args:   served: the types of tools that the dialect serves
    Raises: BadRequest: a tool that the agent runs has no schema here
    """
    hosted: list[str] = []
    for index, tool in enumerate(tools):
        if (kind := tool.get("type")) in served:
            continue
        if str(kind).startswith(RUN_BY_AGENTS):
            place = f"tools.{index}.type"
            message = f"{place}: the tool '{kind}' is the vendor's own: give the agent one with a name and a schema."
            raise BadRequest(message, param=place, code="unsupported_tool")
        hosted.append(str(kind)[:100])
    return [tool for tool in tools if tool.get("type") in served], {"hosted_tools": hosted} if hosted else {}


def refuse_hosted(parameters: Json) -> None:
    """Raises: BadRequest: the request offers hosted tools, or has items of their calls"""
    if names := parameters.get("hosted_tools", []) + parameters.get("hosted_items", []):
        message = f"the run refuses hosted tools ({', '.join(names)}): give the agent tools that it runs itself."
        raise BadRequest(f"tools: {message}", param="tools", code="unsupported_tool")
