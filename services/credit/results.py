"""The status of a tool call from the result that the agent sends back to the model, for tool calls without a span.

Only Anthropic's format marks a failure (`is_error`). The rules for text are the forms of errors that LangGraph,
OpenAI's Agents SDK, AutoGen, CrewAI, LlamaIndex, pydantic-ai, smolagents and Vercel's AI SDK send. Each is anchored at
the start, so that a result that speaks of errors does not count as one. The bare message of an exception counts as a
success.
"""

from __future__ import annotations

import json
import re

from leyden.libs.contracts.conversation import Json
from leyden.libs.contracts.states import SpanStatus
from leyden.services.credit.records import ToolResult

OBSERVATION = "Observation:\n"
"""Before the results that smolagents sends as the text of a user."""

_NOTHING = re.compile(r'(?i)\s*(none|null|undefined|nan|\[\s*\]|\{\s*\}|"")?\s*')
_FAILURE = re.compile(
    r"""\s*(?:
    (?i:error):
    | Error\ (?:executing|invoking|calling|running|in)\ [^\n]{0,300}:
    # The beginning of a long object.
    | \{\s*"(?:error|exception)"\s*:\s*(?:"[^"]|\[\s*[^\s\]]|\{\s*[^\s\}]|true\b)
    | Traceback\ \(most\ recent\ call\ last\)
    | \d+\ validation\ errors?\ for[ ]
    | [A-Za-z_.]*(?:Error|Exception)(?::|\()
    | An\ error\ occurred\ while\ running\ the\ tool
    | Execution\ error\ in[ ]
    | Invalid\ input\ for\ tool[ ]
    | Unknown\ tool[ ]
    | Tool\ (?:'?\S+'?\ )?not\ found
    | Model\ tried\ to\ call\ unavailable\ tool
    | \w+\(\)\ (?:got\ an\ unexpected|missing\ \d+)[ ]
    | <tool_use_error>
    | [^\n]{0,200}\ is\ not\ a\ valid\ tool,\ try\ one\ of
    | (?i:(?:process\ |command\ )?exit(?:ed\ with)?\ (?:code|status):?\ [1-9])
    | HTTP(?:/\d(?:\.\d)?)?\ (?:error\ )?[45]\d\d\b
    | (?i:(?:the\ )?(?:tool|command|request|call|operation|execution)?(?:\ call)?\ ?
        (?:timed[ -]?out\b|time-?out(?:\ (?:after|while|waiting|exceeded|reached|error)\b|\.?\s*\Z)))
    )""",
    re.VERBOSE,
)
_ADVICE = re.compile(r"\n ?(?:Please fix your mistakes|Fix the errors and try again)\.\s*$")


def status_of(result: ToolResult) -> SpanStatus:
    """The status that a result shows: `unset` for one without content, such as `null`, which may be right or wrong."""
    text = result.text.removeprefix(OBSERVATION)
    document = _object(text)
    has_failed = _is_error(document) if document is not None else bool(_FAILURE.match(text) or _ADVICE.search(text))
    if result.is_error or has_failed:
        return SpanStatus.ERROR
    return SpanStatus.UNSET if _NOTHING.fullmatch(text) else SpanStatus.OK


def _object(text: str) -> Json | None:
    """A result that is a JSON object."""
    try:
        found = json.loads(text) if text.lstrip().startswith("{") else None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _is_error(found: Json) -> bool:
    """Whether an object says that it reports a failure. A number under `error`, such as a deviation, does not."""
    error = found.get("error") or found.get("exception")
    names_error = error is True or (bool(error) and isinstance(error, str | list | dict))
    flags = [found.get(name) is True for name in ("isError", "is_error")]
    return names_error or any(flags) or found.get("status") == "error" or found.get("success") is False
