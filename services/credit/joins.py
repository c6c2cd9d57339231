"""Joins tool spans and rewards to calls by dictionaries: linear in calls and spans, whatever an agent sends.

An attempt's agent writes its own spans, and one attempt may send very many. Every step here looks at a bounded number
of others.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from leyden.libs.contracts.states import SpanStatus
from leyden.services.credit.records import AskedTool, Call, ToolSpan

MAX_AT_ONCE = 32
"""Spans of one tool that run at once and are compared for reports of one use; of more, the latest."""
MAX_TOOLS_IN_TEXT = 256
"""Names of tools, in the order of their first span, that are looked for in the text of answers."""


class CallIndex:
    """Calls by the ids that others name them by; numbers are places in `calls`."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._of_call: dict[str, int] = {}
        self._of_tool: dict[str, int] = {}
        self._of_request: dict[str, list[int]] = defaultdict(list)
        for number, call in enumerate(calls):
            self._of_call.setdefault(call.id, number)
            self._of_request[call.request_id].append(number)
            for asked in call.asked:
                self._of_tool.setdefault(asked.tool_call_id, number)
        self._lengths = {len(request_id) for request_id in self._of_request}

    def of_call(self, call_id: str | None) -> int | None:
        """The call with this id."""
        return None if call_id is None else self._of_call.get(call_id)

    def of_tool(self, tool_call_id: str | None) -> int | None:
        """The first call with this tool call in its answer."""
        return None if tool_call_id is None else self._of_tool.get(tool_call_id)

    def of_response(self, response_id: str | None) -> list[int]:
        """The choices of the request whose answer has this id: its own with a prefix, such as `chatcmpl-`."""
        if response_id is None:
            return []
        ends = (response_id[-length:] for length in self._lengths)
        return next((found for end in ends if (found := self._of_request.get(end))), [])


@dataclass(slots=True, eq=False)
class Ask:
    """A tool call that waits for its span. `in_text`: an answer without tool calls names the tool."""

    call: Call
    asked: AskedTool
    in_text: bool
    is_open: bool = True


class OpenAsks:
    """The tool calls of an attempt that have no span yet. Spans come in the order of their beginnings.

    Args: tools: the names of the spans' tools, in order
    """

    def __init__(self, calls: Sequence[Call], tools: Iterable[str]) -> None:
        self._calls = calls
        self._index = CallIndex(calls)
        words = [(tool.lower(), tool, _word(tool)) for tool in islice(dict.fromkeys(tools), MAX_TOOLS_IN_TEXT)]
        self._of_call = [_asks(call, words) for call in calls]
        self._by_tool: list[dict[str, deque[Ask]]] = [_by_tool(asks) for asks in self._of_call]
        self._by_id: dict[tuple[int, str], deque[Ask]] = defaultdict(deque)
        for number, asks in enumerate(self._of_call):
            for ask in asks:
                self._by_id[number, ask.asked.tool_call_id].append(ask)
        self._earlier = deque(sorted(range(len(calls)), key=lambda number: calls[number].sequence))
        # The asks for each tool by the calls before the current span; the latest call is last.
        self._before: dict[str, list[deque[Ask]]] = defaultdict(list)

    def named(self, tool_call_id: str | None) -> tuple[bool, Ask | None]:
        """Whether the model sampled a tool call with this id, and its ask, if that is open."""
        number = self._index.of_tool(tool_call_id)
        if number is None or tool_call_id is None:
            return False, None
        return True, _first(self._by_id[number, tool_call_id])

    def answered(self, response_id: str | None, tool: str) -> tuple[bool, Ask | None]:
        """Whether an answer has this id, and its first open ask for the tool."""
        numbers = self._index.of_response(response_id)
        found = (_first(self._by_tool[number].get(tool)) for number in numbers)
        return bool(numbers), next(filter(None, found), None)

    def latest(self, start_ns: int, tool: str) -> Ask | None:
        """The first open ask for the tool of the latest completed call that came before a time, which never falls."""
        while self._earlier and self._calls[self._earlier[0]].sequence <= start_ns:
            number = self._earlier.popleft()
            if self._calls[number].completed:
                for name, asks in self._by_tool[number].items():
                    self._before[name].append(asks)
        stack = self._before[tool]
        while stack:
            if (ask := _first(stack[-1])) is not None:
                return ask
            stack.pop()
        return None

    def rest(self) -> Iterator[tuple[Call, AskedTool]]:
        """The tool calls without a span, in order."""
        for call, asks in zip(self._calls, self._of_call, strict=True):
            yield from ((call, ask.asked) for ask in asks if ask.is_open and not ask.in_text)


def without_duplicates(spans: Sequence[ToolSpan]) -> list[ToolSpan]:
    """One span per use of a tool; where several libraries report the same use, an error outweighs an ok.

    Two spans report the same use if they have one tool call id; or if they name one tool, one lies inside the other in
    time, and the outer is the inner's parent or of another library (AutoGen and OpenInference both report, and
    OpenInference reports ok for failures).
    """
    uses = _Uses()
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns, span.span_id)):
        uses.add(span)
    return uses.unique


@dataclass(slots=True)
class _Uses:
    """The uses so far, in order, with the places of those that a later span may report again."""

    unique: list[ToolSpan] = field(default_factory=list)
    by_tool_call: dict[str, int] = field(default_factory=dict)
    by_span: dict[str, int] = field(default_factory=dict)
    running: dict[str, deque[int]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=MAX_AT_ONCE)))

    def add(self, span: ToolSpan) -> None:
        twin = self._twin(span)
        if twin is None:
            twin = len(self.unique)
            self.unique.append(span)
            self.by_span.setdefault(span.span_id, twin)
            self.running[span.tool].append(twin)
        else:
            self.unique[twin] = _merged(self.unique[twin], span)
        name = self.unique[twin].tool_call_id
        if name is not None:
            self.by_tool_call[name] = min(twin, self.by_tool_call.get(name, twin))

    def _twin(self, span: ToolSpan) -> int | None:
        found = [] if span.tool_call_id is None else [self.by_tool_call.get(span.tool_call_id)]
        found.append(self.by_span.get(span.parent_span_id) if span.parent_span_id is not None else None)
        found += self.running[span.tool]
        return min((i for i in found if i is not None and _same_use(self.unique[i], span)), default=None)


def _same_use(outer: ToolSpan, inner: ToolSpan) -> bool:
    if outer.tool_call_id is not None and inner.tool_call_id is not None:
        return outer.tool_call_id == inner.tool_call_id
    inside = outer.start_ns <= inner.start_ns and inner.end_ns <= outer.end_ns
    related = inner.parent_span_id == outer.span_id or inner.scope != outer.scope
    return outer.tool == inner.tool and inside and related


def _merged(first: ToolSpan, second: ToolSpan) -> ToolSpan:
    statuses = {first.status, second.status}
    status = next(s for s in (SpanStatus.ERROR, SpanStatus.OK, SpanStatus.UNSET) if s in statuses)
    return ToolSpan(
        span_id=first.span_id,
        parent_span_id=first.parent_span_id,
        scope=first.scope,
        tool=first.tool,
        status=status,
        tool_call_id=first.tool_call_id or second.tool_call_id,
        response_id=first.response_id or second.response_id,
        start_ns=first.start_ns,
        end_ns=max(first.end_ns, second.end_ns),
    )


def _asks(call: Call, words: Sequence[tuple[str, str, re.Pattern[str]]]) -> list[Ask]:
    if call.asked:
        return [Ask(call, asked, in_text=False) for asked in call.asked]
    text = call.text.lower()
    # A search for the text first: it is a hundred times as fast as the pattern.
    return [
        Ask(call, AskedTool(tool, ""), in_text=True)
        for lower, tool, word in words
        if lower in text and word.search(call.text)
    ]


def _word(tool: str) -> re.Pattern[str]:
    return re.compile(rf"(?i)(?<!\w){re.escape(tool)}(?!\w)")


def _by_tool(asks: Sequence[Ask]) -> dict[str, deque[Ask]]:
    found: dict[str, deque[Ask]] = defaultdict(deque)
    for ask in asks:
        found[ask.asked.tool].append(ask)
    return dict(found)


def _first(asks: deque[Ask] | None) -> Ask | None:
    """The first open ask; those before it leave the queue."""
    while asks and not asks[0].is_open:
        asks.popleft()
    return asks[0] if asks else None
