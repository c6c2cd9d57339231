from typing import Any

import pytest
from pydantic import ValidationError

from leyden.libs.contracts.config import Air
from leyden.libs.contracts.states import SpanStatus
from leyden.services.credit.records import ToolResult
from leyden.services.credit.results import status_of


def status(text: str, *, tool: str = "x", **air: Any) -> SpanStatus:
    return status_of(ToolResult("call_1", text), Air.model_validate(air), tool)


@pytest.mark.parametrize(
    "text",
    [
        "Error: ValueError('city not found: Atlantis')\n Please fix your mistakes.",
        "city not found: Atlantis\n\nFix the errors and try again.",
        "Error invoking tool 'get_weather' with kwargs {'town': 'x'} with error: 1 validation error",
        "Error: no_such_tool is not a valid tool, try one of [get_weather].",
        "no_such_tool is not a valid tool, try one of [get_weather].",
        "An error occurred while running the tool. Please try again. Error: city not found",
        "1 validation error for get_weatherargs\ncity\n  Field required",
        "Error executing tool: city not found: Atlantis",
        "Execution error in get_weather: city not found",
        "get_weather() got an unexpected keyword argument 'town'",
        "Tool x not found. Please select one of ['get_weather']",
        "Tool not found",
        '{"error":"Error: city not found: Atlantis"}',
        '{"error":[{"type":"missing","loc":["city"]}]}',
        '{"city": "Paris", "isError": true}',
        '{"success": false, "reason": "none"}',
        "Invalid input for tool get_weather: type validation failed",
        "Model tried to call unavailable tool 'x'.",
        "<tool_use_error>Error: No such tool available: x</tool_use_error>",
        "Error:\nError executing tool 'get_weather' with arguments {'city': 'Atlantis'}: ValueError: city not found",
        "Observation:\nTraceback (most recent call last):\n  File",
        "requests.exceptions.ConnectionError: refused",
        "HTTP 503 Service Unavailable",
        "Command exited with code 2",
        "The tool call timed out after 30 s",
        "Timed out.",
        "Timeout",
        '{"error": "a long text that is cut',
        "time-out while waiting for the page",
        '{"exception": {"type": "KeyError"}}',
        "sqlite3.OperationalError: no such table: flights",
        "psycopg2.errors.UndefinedTable: relation does not exist",
        "asyncio.TimeoutError",
        '{"status": 500}',
        '{"status_code": 404, "body": ""}',
        '{"ok": false}',
        "division by zero",
        "connection refused",
        "[Errno 111] Connection refused",
        "error: no such file",
        # Haystack, LlamaIndex, Agno, and Vercel's AI SDK, in their own words.
        "Failed to invoke Tool `weather` with parameters {}. Error: get_weather_report() missing 1 required positional",
        "Failed to convert tool result from tool weather using 'str'. Error: x",
        "Tool 'x' not found. Available tools: weather",
        "Encountered error: city not found: Atlantis",
        "Encountered error in tool call: boom",
        "Tool x not found. Please select a tool that is available.",
        "Error while decoding function arguments: Expecting value",
        "Error: The requested tool does not exist or is not available.",
        "Tool call execution denied.",
    ],
)
def test_errors_in_the_forms_of_frameworks_are_failures(text: str) -> None:
    assert status(text) == SpanStatus.ERROR


@pytest.mark.parametrize("text", ["", "None", "null", "undefined", " [] ", "{}", '""', "Observation:\nNone"])
def test_a_result_without_content_is_what_the_run_says(text: str) -> None:
    assert status(text) == SpanStatus.ERROR
    assert status(text, null="nothing") == SpanStatus.UNSET
    assert status(text, null="success") == SpanStatus.OK


def test_a_tools_own_rules_replace_the_forms_of_errors() -> None:
    rules = [{"pattern": "(?i)no rows"}, {"path": "result.0.code", "values": [7, "bad"]}, {"path": "ok", "values": [0]}]
    failures = {"sql": rules, "calm": []}
    for text in ("No rows found", '{"result": [{"code": 7}]}', '{"result": [{"code": "bad"}]}'):
        assert status(text, tool="sql", failures=failures) == SpanStatus.ERROR
    # In JSON, false is not 0.
    for text in ('{"result": []}', '{"result": [{"code": 8}]}', '{"ok": false}', "Error: x"):
        assert status(text, tool="sql", failures=failures) == SpanStatus.OK
    assert status("Error: x", tool="calm", failures=failures) == SpanStatus.OK
    assert status("Error: x", tool="other", failures=failures) == SpanStatus.ERROR


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({}, "either pattern, or path and values"),
        ({"pattern": "a", "path": "b", "values": [1]}, "either pattern, or path and values"),
        ({"path": "b"}, "either pattern, or path and values"),
        ({"pattern": "(?=a)"}, "linear time: look-around"),
        ({"pattern": "("}, "linear time: unclosed group"),
    ],
)
def test_rules_that_ask_for_nothing_are_refused(rule: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Air.model_validate({"failures": {"sql": [rule]}})


def test_no_text_stops_a_pattern() -> None:
    assert status("a" * 100_000, tool="x", failures={"x": [{"pattern": "^(a+)+$"}]}) == SpanStatus.ERROR
    assert status("a" * 100_000 + "b", tool="x", failures={"x": [{"pattern": "^(a+)+$"}]}) == SpanStatus.OK


@pytest.mark.parametrize(
    "text",
    [
        "Sunny, 21 degrees",
        "An article: Error: how exceptions work. Traceback (most recent call last) explained.",
        '{"error": null, "city": "Paris"}',
        '{"error": "", "items": []}',
        '{"status": "failed", "flight": "AZ 610"}',
        "Errors in medicine, a survey",
        "0",
        "No timeouts were found",
        "timeout: 30\nretries: 5",
        "Time out of mind",
        '{"error": 0, "temperature": 21}',
        '{"temperature": 21, "error": 0.05}',
        "HTTP 200 OK",
        "exit code 0",
        "Observation:\nSunny",
        "{broken",
    ],
)
def test_results_that_speak_of_errors_are_none(text: str) -> None:
    assert status(text) != SpanStatus.ERROR


@pytest.mark.parametrize(
    "text",
    [
        '{"flight": "AZ 610"}',
        '{"rows": [1, 2], "text": "a long one that is cut',
        "{'flight': 'AZ 610'}",
        "[1, 2]",
        '[{"a": 1}]',
        "42",
        " -1,234.5 %",
        "1e-7",
        "64.",
        "True",
        "OK.",
        "Successfully wrote 3 files",
        "HTTP 200 OK",
        "exit code 0",
        "Observation:\nSunny, 21 degrees",
    ],
)
def test_a_success_needs_evidence(text: str) -> None:
    assert status(text) == SpanStatus.OK


@pytest.mark.parametrize(
    "text",
    [
        "city not found: Atlantis",
        "[Atlantis] is no city",
        "{broken",
        "Sunny, 21 degrees",
        "3 hits",
        "done with it: no",
        "exit code unknown",
        "relation does not exist",
    ],
)
def test_a_bare_text_may_be_the_message_of_an_exception(text: str) -> None:
    """Agno, AutoGen, Haystack and Vercel's AI SDK send `str(exception)` as the result."""
    assert status(text) == SpanStatus.UNSET
    # The run knows its tool.
    assert status(text, failures={"x": []}) == SpanStatus.OK
    assert status(text, failures={"x": [{"pattern": "Atlantis"}]}) == (
        SpanStatus.ERROR if "Atlantis" in text else SpanStatus.OK
    )


def test_the_mark_of_anthropics_format_decides() -> None:
    assert status_of(ToolResult("toolu_1", "Sunny", is_error=True), Air(), "x") == SpanStatus.ERROR
