"""Clients in Go, Rust and Java, and those of Azure, Ollama and Google in Python, as data: `clients/NAME.json` has the
requests and the parser.

The files were written from measurements of the real packages: headers in order, fields, how an answer comes back in the
next turn, marks of retries. A turn lists the messages that it adds; `$text`, `$id0`, `$name0`, `$arguments0` and the
like stand for parts of the answer before it, `$contents` for its chunks as contents. `sse` has the limits of the
client's reader of streams, `at_root` says that its address has no version, `needs` the fields without which it refuses
an answer. `tree` says how each call continues an earlier one, `untrainable` why none trains.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

Json = dict[str, Any]
FOLDER = Path(__file__).with_name("clients")
CLIENTS: dict[str, Json] = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
SECONDS = 60


class Refused(Exception):
    """The client's parser refuses an answer."""


@dataclass
class ToolCall:
    """One call, with the identifiers of the dialect; `item` is that of a Responses output item."""

    id: str
    name: str
    arguments: str
    item: str = ""


@dataclass
class Answer:
    """The client's reading of one answer."""

    text: str
    calls: list[ToolCall]
    message: str = ""
    contents: list[Json] = field(default_factory=list)
    """Gemini's: one of each chunk."""


@dataclass
class Client:
    """One client on a connection of its own. Its methods block."""

    recorded: Json
    base_url: str
    key: str
    streams: bool
    connection: http.client.HTTPConnection | None = None

    def send(self, items: Sequence[Json], *, mark: str | None = None) -> http.client.HTTPResponse:
        """Sends a request with these messages and returns the response with its body unread."""
        recorded = self.recorded
        mode = recorded["streamed"] if self.streams else recorded["not_streamed"]
        body = json.dumps(
            {**recorded["body"], recorded["items"]: items, **mode}, ensure_ascii=False, separators=(",", ":")
        )
        data = (_html_escaped(body) if recorded["escapes_html"] else body).encode()
        url = urlsplit(self.base_url)
        assert url.hostname is not None
        self.connection = self.connection or http.client.HTTPConnection(url.hostname, url.port, timeout=SECONDS)
        base = url.path.removesuffix("/v1") if recorded.get("at_root") else url.path
        path = recorded.get("streamed_path", recorded["path"]) if self.streams else recorded["path"]
        self.connection.putrequest("POST", base + path, skip_accept_encoding=True)
        for name, value in recorded["headers"]:
            self.connection.putheader(name, value.replace("$key", self.key))
        if mark is not None:
            self.connection.putheader(recorded["retries"]["header"], mark)
        self.connection.putheader("Content-Length", str(len(data)))
        self.connection.endheaders(data)
        return self.connection.getresponse()

    def ask(self, items: Sequence[Json], *, mark: str | None = None) -> Answer:
        """Sends a request and reads the answer as the client's parser does. Raises: Refused, http.client errors."""
        response = self.send(items, mark=mark)
        data = response.read()
        if response.status != http.client.OK:
            raise Refused(f"{response.status}: {data.decode()}")
        if not self.streams:
            document = json.loads(data)
            self._check(document)
            return READERS[self.recorded["dialect"]](document)
        if self.recorded["dialect"] == "ollama_chat":
            return _ollama_lines([json.loads(line) for line in data.splitlines()])
        return STREAM_READERS[self.recorded["dialect"]](self._events(data))

    def close(self) -> None:
        """Closes the connection, in the middle of an answer too."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def _check(self, document: Json) -> None:
        missing = [name for name in self.recorded["needs"] if document.get(name) is None]
        if missing:
            raise Refused(f"{missing} missing: {document}")

    def _events(self, data: bytes) -> list[Json]:
        """The events, within the limits of the client's reader."""
        limits, dialect = self.recorded["sse"], self.recorded["dialect"]
        events, name, lines, others = list[Json](), "", list[bytes](), 0
        for line in data.splitlines(keepends=True):
            if limits["longest_line_bytes"] and len(line) > limits["longest_line_bytes"]:
                raise Refused(f"a line of {len(line)} bytes")
            others = 0 if line.startswith(b"data:") else others + 1
            if limits["most_comments"] and others > limits["most_comments"]:
                raise Refused("too many lines without data")
            if line.startswith(b"event:"):
                name = line.removeprefix(b"event:").strip().decode()
            elif line.startswith(b"data:"):
                lines.append(line.removeprefix(b"data:").strip())
            elif not line.strip():
                if lines == [b"[DONE]"]:
                    break
                if lines:
                    document = json.loads(b"".join(lines))
                    if dialect == "chat_completions":
                        self._check(document)
                    elif dialect != "gemini" and name != document["type"]:
                        raise Refused(f"the event {document['type']} is named {name!r}")
                    events.append(document)
                elif limits["blank_line_is_an_event"]:
                    raise Refused("unexpected end of JSON input")
                name, lines = "", []
        return events


def filled(value: Any, answer: Answer) -> Any:
    """The messages of a turn, with the parts of the answer before it in their places."""
    if isinstance(value, dict):
        return {name: filled(part, answer) for name, part in value.items()}
    if isinstance(value, list):
        parts = (answer.contents if part == "$contents" else [filled(part, answer)] for part in value)
        return [part for several in parts for part in several]
    if not (isinstance(value, str) and value.startswith("$")):
        return value
    if value in ("$text", "$message"):
        return answer.text if value == "$text" else answer.message
    call = answer.calls[int(value[-1])]
    parts = {
        "id": call.id,
        "item": call.item,
        "name": call.name,
        "arguments": call.arguments,
    }
    kind = value[1:-1]
    if kind in parts:
        return parts[kind]
    arguments = json.loads(call.arguments)
    compact = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
    return {
        "input": arguments,
        "plain": next(iter(arguments.values())),
        "compact": compact,
        "go_json": _html_escaped(compact),
    }[kind]


def _html_escaped(text: str) -> str:
    # Go's encoding/json.
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _chat(document: Json) -> Answer:
    (choice,) = document["choices"]
    if choice["finish_reason"] != ("tool_calls" if choice["message"].get("tool_calls") else "stop"):
        raise Refused(f"finish_reason {choice['finish_reason']}")
    message = choice["message"]
    calls = [
        ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or []
    ]
    return Answer(message["content"] or "", calls)


def _chat_stream(events: list[Json]) -> Answer:
    text, calls, finish = "", dict[int, ToolCall](), None
    for document in events:
        if document["object"] != "chat.completion.chunk":
            raise Refused(f"an event of the type {document['object']}")
        for choice in document["choices"]:
            text += choice["delta"].get("content") or ""
            for part in choice["delta"].get("tool_calls") or []:
                call = calls.setdefault(part["index"], ToolCall("", "", ""))
                call.id += part.get("id") or ""
                call.name += part["function"].get("name") or ""
                call.arguments += part["function"].get("arguments") or ""
            finish = choice["finish_reason"] or finish
    if finish != ("tool_calls" if calls else "stop"):
        raise Refused(f"finish_reason {finish}")
    return Answer(text, [calls[index] for index in sorted(calls)])


def _response(document: Json) -> Answer:
    if document["status"] != "completed":
        raise Refused(f"status {document['status']}")
    answer = Answer("", [])
    for item in document["output"]:
        if item["type"] == "function_call":
            answer.calls.append(ToolCall(item["call_id"], item["name"], item["arguments"], item["id"]))
        else:
            answer.message = item["id"]
            answer.text += "".join(part["text"] for part in item["content"])
    return answer


def _response_stream(events: list[Json]) -> Answer:
    numbers = [event["sequence_number"] for event in events]
    if numbers != sorted(set(numbers)) or events[0]["type"] != "response.created":
        raise Refused(f"order: {[event['type'] for event in events]}")
    if events[-1]["type"] != "response.completed":
        raise Refused(f"the last event is {events[-1]['type']}")
    answer = _response(events[-1]["response"])
    streamed = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    if streamed != answer.text:
        raise Refused(f"the deltas are {streamed!r}, the text is {answer.text!r}")
    return answer


def _message(document: Json) -> Answer:
    calls = [
        ToolCall(block["id"], block["name"], json.dumps(block["input"]))
        for block in document["content"]
        if block["type"] == "tool_use"
    ]
    if document["stop_reason"] != ("tool_use" if calls else "end_turn"):
        raise Refused(f"stop_reason {document['stop_reason']}")
    return Answer("".join(block["text"] for block in document["content"] if block["type"] == "text"), calls)


def _message_stream(events: list[Json]) -> Answer:
    if (events[0]["type"], events[-1]["type"]) != ("message_start", "message_stop"):
        raise Refused(f"order: {[event['type'] for event in events]}")
    document: Json = {**events[0]["message"], "content": []}
    if document["usage"]["input_tokens"] < 1:
        raise Refused("no usage")
    partial = ""
    for event in events:
        if event["type"] == "content_block_start":
            document["content"].append(event["content_block"])
            partial = ""
        elif event["type"] == "content_block_delta":
            document["content"][event["index"]]["text"] = document["content"][event["index"]].get("text", "") + event[
                "delta"
            ].get("text", "")
            partial += event["delta"].get("partial_json", "")
        elif event["type"] == "content_block_stop" and document["content"][-1]["type"] == "tool_use":
            document["content"][-1]["input"] = json.loads(partial)
        elif event["type"] == "message_delta":
            document |= event["delta"]
    return _message(document)


def _ollama(document: Json) -> Answer:
    if (document["done"], document["done_reason"]) != (True, "stop"):
        raise Refused(f"the end is {document}")
    if not document["prompt_eval_count"] or not document["eval_count"]:
        raise Refused("no numbers of tokens")
    message = document["message"]
    calls = [
        ToolCall(call["id"], call["function"]["name"], json.dumps(call["function"]["arguments"]))
        for call in message.get("tool_calls") or []
    ]
    return Answer(message.get("content") or "", calls)


def _ollama_lines(lines: list[Json]) -> Answer:
    if [line["done"] for line in lines[:-1]] != [False] * (len(lines) - 1):
        raise Refused("an end before the last line")
    text = "".join(line["message"].get("content") or "" for line in lines)
    calls = [call for line in lines for call in line["message"].get("tool_calls") or []]
    return _ollama({**lines[-1], "message": {"content": text, "tool_calls": calls}})


def _gemini(document: Json) -> Answer:
    return _gemini_stream([document])


def _gemini_stream(events: list[Json]) -> Answer:
    candidates = [event["candidates"][0] for event in events]
    reasons = [candidate.get("finishReason") for candidate in candidates]
    if reasons != [*[None] * (len(reasons) - 1), "STOP"] or not events[-1]["usageMetadata"]["totalTokenCount"]:
        raise Refused(f"the end is {events[-1]}")
    contents = [candidate["content"] for candidate in candidates]
    # Its chats forget a turn with a content that has no parts.
    if not all(content["parts"] for content in contents):
        raise Refused("a content without parts")
    parts = [part for content in contents for part in content["parts"]]
    found = [part["functionCall"] for part in parts if "functionCall" in part]
    calls = [ToolCall(call["id"], call["name"], json.dumps(call["args"])) for call in found]
    return Answer("".join(part.get("text", "") for part in parts), calls, contents=contents)


READERS = {
    "chat_completions": _chat,
    "responses": _response,
    "messages": _message,
    "ollama_chat": _ollama,
    "gemini": _gemini,
}
STREAM_READERS = {
    "chat_completions": _chat_stream,
    "responses": _response_stream,
    "messages": _message_stream,
    "gemini": _gemini_stream,
}
