"""Turns sampled tokens into an answer: reasoning, content, tool calls, and the text that a stream may already send."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from leyden.libs.contracts.conversation import ToolCall, Turn
from leyden.services.gateway.calls.context import Answer, ModelRequest, Prompt, SampledTokens, TokenLogprob
from leyden.services.gateway.prompt.reasoning import (
    REASONING_PARSERS,
    THINK,
    Piece,
    Splitter,
    is_analysis,
    mark_position,
)
from leyden.services.gateway.prompt.template import ChatModel
from leyden.services.gateway.prompt.tools.parsers import TOOL_PARSERS, ToolParser

PROMPT_END_TOKENS = 16
"""Tokens at a prompt's end that tell whether the answer begins inside the reasoning."""


def finish_answer(model: ChatModel, request: ModelRequest, prompt: Prompt, sampled: SampledTokens) -> Answer:
    """Returns the answer of a finished choice.

    The text ends before the first stop string and before the token that ended the turn. Tool calls get the ids
    `call_<call id>_<k>`. A call that is no valid JSON has its arguments as sampled and is marked as malformed.
    """
    text, stop = text_and_stop(model, request, sampled)
    splitter = reasoning_splitter(model, request, prompt)
    reasoning, content = splitter.feed(text, is_last=True)
    finish: str = "stop" if stop is not None else (sampled.finish or "stop")
    parser = tool_parser(model, request)
    content, found = parser.parse(content, request.tools) if parser else (content, ())
    may_be_several = request.parallel_tool_calls and model.renders_parallel_calls
    calls = tuple(
        ToolCall(f"call_{sampled.call_id}_{number}", call.name, call.arguments, call.is_malformed)
        for number, call in enumerate(found if may_be_several else found[:1])
    )
    finish = "tool_calls" if calls and finish == "stop" else finish
    turn = Turn("assistant", content, tool_calls=calls, reasoning=reasoning if splitter.has_reasoned else None)
    logprobs = token_logprobs(model, request, sampled)
    return Answer(sampled.index, turn, finish, logprobs, stop, reasoning_tokens(model, turn, sampled.ids))


def reasoning_tokens(model: ChatModel, turn: Turn, sampled_ids: Sequence[int]) -> int | None:
    """Returns how many sampled tokens of an answer are its reasoning and the marks around it.

    None where other text follows and the mark between them is no token of its own.
    """
    if turn.reasoning is None:
        return 0
    ids = model.tokenizer.visible(sampled_ids)
    if model.reasoning_parser.name == "gpt_oss":
        return _analysis_tokens(model, ids)
    closing = model.tokenizer.id_of(model.reasoning_marks.closing)
    if closing in ids:
        return ids.index(closing) + 1
    return None if turn.content or turn.tool_calls else len(ids)


def _analysis_tokens(model: ChatModel, ids: Sequence[int]) -> int:
    """Counts the tokens of gpt-oss' messages of reasoning; each message but the first begins with `<|start|>`."""
    start, messages = model.tokenizer.id_of("<|start|>"), list[list[int]]([[]])
    for token in ids:
        if token == start:
            messages.append([])
        messages[-1].append(token)
    return sum(len(message) for message in messages if is_analysis(model.tokenizer.decode(message)))


def tool_parser(model: ChatModel, request: ModelRequest) -> ToolParser | None:
    """Returns the parser of the answer's tool calls; None if no tools may be called."""
    if not request.parses_tool_calls:
        return None
    # The constraint of the engine's decoding writes calls in Hermes' form.
    is_constrained = bool(request.required_tools) or request.answer_schema is not None
    return TOOL_PARSERS["hermes"] if is_constrained else model.tool_parser


def reasoning_splitter(model: ChatModel, request: ModelRequest, prompt: Prompt) -> Splitter:
    """Returns the splitter of the answer's reasoning; a grammar begins with the answer, which then has none."""
    parser = model.reasoning_parser
    if request.is_constrained or request.raw_prompt is not None:
        parser = REASONING_PARSERS["none"]
    elif parser.name == "none" and request.asks_for_reasoning:
        parser = THINK
    return parser.splitter(model.tokenizer.decode(prompt.ids[-PROMPT_END_TOKENS:].tolist()))


def text_and_stop(model: ChatModel, request: ModelRequest, sampled: SampledTokens) -> tuple[str, str | None]:
    """Returns the sampled text before the first stop string, and that stop string."""
    return cut_at_stop(model.tokenizer.decode(model.tokenizer.visible(sampled.ids)), request.sampling.stop)


def end_at_stop(model: ChatModel, request: ModelRequest, sampled: SampledTokens) -> None:
    """Drops the tokens after the one that completes a stop string: the answer ends there, and only it trains.

    An engine may sample more. It accepts several tokens at once with speculative decoding, and it does not know the
    beginning of a stop string in an answer that it continues for another engine.
    """
    stops, decode = request.sampling.stop, model.tokenizer.decode
    if not stops or text_and_stop(model, request, sampled)[1] is None:
        return

    def has_stop(count: int) -> bool:
        return cut_at_stop(decode(sampled.ids[:count]), stops)[1] is not None

    count = bisect_left(range(len(sampled.ids)), True, key=has_stop)
    if count < len(sampled.ids):
        for column in (sampled.ids, sampled.logprobs, sampled.policy_versions, sampled.top_logprobs):
            del column[count:]
        sampled.finish = "stop"


def token_logprobs(
    model: ChatModel, request: ModelRequest, sampled: SampledTokens, start: int = 0
) -> tuple[TokenLogprob, ...] | None:
    """Returns temperature-scaled log-probabilities of the tokens from `start` on; None if the request wants none."""
    if not request.logprobs:
        return None
    decode = model.tokenizer.decode
    return tuple(
        TokenLogprob(
            decode([sampled.ids[place]]),
            sampled.logprobs[place],
            tuple(
                TokenLogprob(decode([token]), logprob)
                for logprob, token in (sampled.top_logprobs[place] if place < len(sampled.top_logprobs) else ())
            ),
        )
        for place in range(start, len(sampled.ids))
    )


class AnswerStream:
    """One streamed choice: returns the text and the log-probabilities that may be sent and were not sent yet."""

    def __init__(self, model: ChatModel, request: ModelRequest, prompt: Prompt, sampled: SampledTokens) -> None:
        self._model = model
        self._request = request
        self._sampled = sampled
        self._stream = model.tokenizer.stream()
        self._splitter = reasoning_splitter(model, request, prompt)
        self._calls = tool_parser(model, request)
        self._decoded = 0
        self._before_stop = ""
        self._hidden = ""
        self._shown_reasoning = self._shown_content = 0
        self._shown_logprobs = 0
        self.index = sampled.index

    def next_text(self) -> Piece:
        """Returns reasoning and content to send since the last call, without stop strings and tool calls."""
        new = self._model.tokenizer.visible(self._sampled.ids[self._decoded :])
        if not new:
            return Piece("", "")
        self._decoded += len(new)
        text = self._before_stop + self._stream.feed(new)
        length = visible_length(text, self._request.sampling.stop)
        self._before_stop = text[length:]
        reasoning, content = self._splitter.feed(text[:length])
        content = self._hidden + content
        length = visible_length(content, (), self._calls, is_start=not self._shown_content)
        self._hidden = content[length:]
        self._shown_reasoning += len(reasoning)
        self._shown_content += length
        return Piece(reasoning, content[:length])

    def next_logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """Returns the log-probabilities of the tokens since the last call."""
        found = token_logprobs(self._model, self._request, self._sampled, self._shown_logprobs)
        self._shown_logprobs = len(self._sampled.ids)
        return found

    def rest(self, answer: Answer) -> Piece:
        """Returns the finished answer's text that `next_text` has not returned."""
        turn = answer.turn
        return Piece((turn.reasoning or "")[self._shown_reasoning :], turn.content[self._shown_content :])


def visible_length(text: str, stops: Sequence[str], calls: ToolParser | None = None, *, is_start: bool = True) -> int:
    r"""Returns how many characters of an unfinished answer a stream may send.

    A stop string hides itself and all text after it; text at the end that may become a stop string is hidden, too. If
    tools may be called, the same holds for the marks of a tool call with the white space before it.

    Args: calls: the format of tool calls, if tools may be called; is_start: whether the text begins the answer
    >>> visible_length("The end", ["\n\nObservation"])
    7
    >>> visible_length("The end\n", ["\n\nObservation"])
    7
    """
    marks = [*stops, *calls.marks] if calls else stops
    length = min((mark_position(text, mark) for mark in marks), default=len(text))
    if calls and is_start:
        body = text.lstrip()
        if any(body.startswith(opening) or opening.startswith(body) for opening in calls.openings):
            return 0
    return len(text[:length].rstrip()) if calls else length


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Returns the text before the first stop string, and that stop string; without one the full text and None."""
    found = [(position, stop) for stop in stops if (position := text.find(stop)) >= 0]
    if not found:
        return text, None
    position, stop = min(found)
    return text[:position], stop
