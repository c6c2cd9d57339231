"""The status of a tool call from the result that the agent sends back to the model, for tool calls without a span.

Only Anthropic's and Gemini's formats mark a failure (`is_error`). The rules for text are the forms of errors that
LangGraph, OpenAI's Agents SDK, Agno, AutoGen, CrewAI, Haystack, LlamaIndex, pydantic-ai, smolagents and Vercel's AI SDK
send. Each is anchored at the start, so that a result that speaks of errors does not count as one. So are exceptions by
their qualified names, statuses of HTTP and the commonest messages of exceptions.

Some frameworks send the bare message of a tool's exception, which looks like any text (in August 2026):

Agno        `FunctionCall.error`, `str(e)` (agno/tools/function.py; models/base.py, create_function_call_result)
AutoGen     `StaticWorkbench._format_errors`, `str(error)` (autogen_core/tools/_static_workbench.py)
Haystack    `ToolInvoker._handle_error`, `str(error)`: its own errors have a form, those of a tool's text none
            (haystack/components/tools/tool_invoker.py; tools/tool.py)
LlamaIndex  `call_tool`, "Encountered error: " and `str(e)` (core/tools/calling.py); workflows of one's own, `str(e)`
Vercel      `error-text`, the message (ai; @ai-sdk/openai-compatible, convert-to-openai-compatible-chat-messages.ts)

So a text is no success by itself. It is one with evidence: JSON or a number, which no message is, a status that says
so, smolagents' heading, or the run's own rules for the tool. Any other text has no status.
"""

from __future__ import annotations

import json
import re
from typing import Any

from leyden.libs.contracts.config import Air, FailureRule
from leyden.libs.contracts.config.patterns import matches
from leyden.libs.contracts.conversation import Json
from leyden.libs.contracts.states import SpanStatus
from leyden.services.credit.records import ToolResult

OBSERVATION = "Observation:\n"
"""Before the results that smolagents sends as the text of a user."""

_NOTHING = re.compile(r'(?i)\s*(none|null|undefined|nan|\[\s*\]|\{\s*\}|"")?\s*')
_FAILURE = re.compile(
    r"""\s*(?:
    (?i:error):
    | Error\ (?:executing|invoking|calling|running|in|while)\ [^\n]{0,300}:
    | Encountered\ error(?:\ in\ tool\ call)?:[ ]
    | Failed\ to\ (?:invoke|convert|merge)\ [Tt]ool[ ]
    | \[(?i:error)\]
    | Tool\ call\ limit\ reached
    | (?i:tool\ (?:call\ )?execution\ denied)
    # The beginning of a long object.
    | \{\s*"(?:error|exception)"\s*:\s*(?:"[^"]|\[\s*[^\s\]]|\{\s*[^\s\}]|true\b)
    | Traceback\ \(most\ recent\ call\ last\)
    | \d+\ validation\ errors?\ for[ ]
    | [\w.]*(?:Error|Exception)(?::|\(|\s*\Z)
    # psycopg2.errors.UndefinedTable: …
    | (?:\w+\.)+(?:errors|exceptions)\.\w+:
    | \[Errno\ -?\d+\]
    | (?i:(?:integer\ |float\ )?(?:division|modulo)\ by\ zero\b)
    | (?i:connection\ (?:refused|reset|aborted|timed\ out)\b)
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
_SUCCESS = re.compile(
    r"""\s*(?:
    # The beginning of a long object or list, of JSON or as Python prints it.
    [\[{]\s*(?:["'\d\[{]|-\d|true\b|false\b|null\b|True\b|False\b|None\b)
    | [-+]?(?:\d[\d,_]*(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?\s*%?\.?\s*\Z
    | (?i:true|false|ok|done|success)\W*\Z
    | Success(?:fully)?\b
    | HTTP(?:/\d(?:\.\d)?)?\ 2\d\d\b
    | (?i:(?:process\ |command\ )?exit(?:ed\ with)?\ (?:code|status):?\ 0\b)
    )""",
    re.VERBOSE,
)
_ADVICE = re.compile(r"\n ?(?:Please fix your mistakes|Fix the errors and try again)\.\s*$")


_OF_NOTHING = {"failure": SpanStatus.ERROR, "nothing": SpanStatus.UNSET, "success": SpanStatus.OK}


def status_of(result: ToolResult, air: Air, tool: str) -> SpanStatus:
    """The status that a result shows: by the tool's own rules, where the run has some, else by the forms of errors and
    of successes. Unset: the text shows none, or has no content that counts."""
    text = result.text.removeprefix(OBSERVATION)
    document = _document(text)
    if (rules := air.failures.get(tool)) is not None:
        has_failed = any(_holds(rule, text, document) for rule in rules)
    elif isinstance(document, dict):
        has_failed = _is_error(document)
    else:
        has_failed = bool(_FAILURE.match(text) or _ADVICE.search(text))
    if result.is_error or has_failed:
        return SpanStatus.ERROR
    if is_nothing(result):
        return _OF_NOTHING[air.null]
    # smolagents writes another heading over failures.
    is_marked = result.text.startswith(OBSERVATION)
    has_evidence = rules is not None or document is not None or is_marked or _SUCCESS.match(text)
    return SpanStatus.OK if has_evidence else SpanStatus.UNSET


def is_nothing(result: ToolResult) -> bool:
    """Whether a result has no content, such as `null`."""
    return _NOTHING.fullmatch(result.text.removeprefix(OBSERVATION)) is not None


def _holds(rule: FailureRule, text: str, document: Any) -> bool:
    if rule.pattern is not None:
        return matches(rule.pattern, text)
    for name in (rule.path or "").split("."):
        if isinstance(document, list) and name.isdecimal() and int(name) < len(document):
            document = document[int(name)]
        elif isinstance(document, dict) and name in document:
            document = document[name]
        else:
            return False
    # In Python True equals 1, and in JSON it does not.
    return any(value == document and isinstance(value, bool) == isinstance(document, bool) for value in rule.values)


def _document(text: str) -> Any:
    """A result that is a JSON object or list; None for any other."""
    try:
        return json.loads(text) if text.lstrip().startswith(("{", "[")) else None
    except (ValueError, RecursionError):
        return None


def _is_error(found: Json) -> bool:
    """Whether an object says that it reports a failure. A number under `error`, such as a deviation, does not."""
    error = found.get("error") or found.get("exception")
    names_error = error is True or (bool(error) and isinstance(error, str | list | dict))
    flags = [found.get(name) is True for name in ("isError", "is_error")]
    flags += [found.get(name) is False for name in ("success", "ok")]
    codes = [found.get(name) for name in ("status", "status_code", "statusCode")]
    return names_error or any(flags) or "error" in codes or any(isinstance(c, int) and 400 <= c <= 599 for c in codes)
