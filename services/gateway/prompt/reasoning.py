"""Splits the reasoning of sampled text from its content while the text arrives, in the form of each model family.

The chat template's text chooses the form. A prompt may end inside the reasoning: then the sampled text begins there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, get_args

ReasoningParserName = Literal["gpt_oss", "gemma4", "mistral", "think", "none"]
MESSAGE = "<|message|>"
"""Ends the header of a message of gpt-oss."""
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_BODY_END = re.compile("|".join(map(re.escape, (*_ENDS, "<|start|>", "<|channel|>"))))
_HEADERS = ("<|start|>assistant", "<|channel|>", " to=", "to=", MESSAGE)


class Piece(NamedTuple):
    """Text that was split, of an answer or of a part of it."""

    reasoning: str
    content: str


class Splitter(Protocol):
    """The state of one answer. `has_reasoned`: whether reasoning began, with text or without."""

    has_reasoned: bool

    def feed(self, text: str, *, is_last: bool = False) -> Piece:
        """Returns the reasoning and the content that are complete; the rest waits for more text."""


@dataclass(frozen=True, slots=True)
class ReasoningParser:
    """The reasoning of a model family.

    Args: models: examples, for the documentation; signs: texts of chat templates of this family; opening, closing: the
        marks around the reasoning
    """

    name: ReasoningParserName
    models: str
    signs: tuple[str, ...] = ()
    opening: str = ""
    closing: str = ""

    def splitter(self, prompt_end: str) -> Splitter:
        """Returns a splitter of the text that follows a prompt. Args: prompt_end: the last characters of the prompt."""
        if self.name == "none":
            return _NoSplitter()
        if self.name == "gpt_oss":
            return _ChannelSplitter(prompt_end)
        is_open = prompt_end.rstrip().endswith(self.opening)
        return _TagSplitter(self.opening, self.closing, is_open=is_open)

    def split(self, text: str, prompt_end: str = "") -> tuple[str | None, str]:
        """Returns the reasoning of a complete text, None without any, and its content."""
        splitter = self.splitter(prompt_end)
        piece = splitter.feed(text, is_last=True)
        return (piece.reasoning if splitter.has_reasoned else None), piece.content

    def spell(self, reasoning: str, content: str) -> str:
        """Returns reasoning and content as one text, for templates that read no reasoning of its own."""
        return f"{self.opening}\n{reasoning}\n{self.closing}\n\n{content}"

    def shows(self, reasoning: str | None, text: str) -> tuple[bool, str]:
        """Returns whether a rendered answer begins with this reasoning, and the text after it."""
        if reasoning is None:
            return True, text
        thought, closing, rest = text.partition(self.closing)
        return bool(closing) and reasoning.strip() in thought, rest


class _NoSplitter:
    has_reasoned = False

    def feed(self, text: str, *, is_last: bool = False) -> Piece:
        return Piece("", text)


class _TagSplitter:
    """Reasoning between two marks at the beginning of an answer; white space around it is left out."""

    def __init__(self, opening: str, closing: str, *, is_open: bool) -> None:
        self._opening, self._closing = opening, closing
        self._pending = ""
        self._place: Literal["start", "reasoning", "gap", "content"] = "start"
        self._has_text = False
        self.has_reasoned = is_open

    def feed(self, text: str, *, is_last: bool = False) -> Piece:
        self._pending += text
        reasoning = ""
        if self._place == "start":
            body = self._pending.lstrip()
            is_opened = body.startswith(self._opening)
            if not (is_opened or is_last) and self._opening.startswith(body):
                return Piece("", "")
            # Some models write the mark that the prompt has already.
            self.has_reasoned |= is_opened
            self._place = "reasoning" if self.has_reasoned else "content"
            self._pending = body.removeprefix(self._opening) if self.has_reasoned else self._pending
        if self._place == "reasoning":
            reasoning = self._reasoning(is_last=is_last)
        if self._place == "gap":
            self._pending = self._pending.lstrip()
            self._place = "content" if self._pending else "gap"
        if self._place != "content":
            return Piece(reasoning, "")
        content, self._pending = self._pending, ""
        return Piece(reasoning, content)

    def _reasoning(self, *, is_last: bool) -> str:
        if not self._has_text:
            self._pending = self._pending.lstrip()
        inside, closing, rest = self._pending.partition(self._closing)
        ends = len(inside) if closing or is_last else mark_position(inside, self._closing)
        shown = inside[:ends].rstrip()
        self._has_text |= bool(shown)
        self._pending = rest if closing else inside[len(shown) :]
        self._place = "gap" if closing else self._place
        return shown


class _ChannelSplitter:
    """Messages of gpt-oss: `analysis` is reasoning, a message to a tool stays as sampled, all others are content."""

    def __init__(self, prompt_end: str) -> None:
        header = prompt_end.rpartition("<|start|>")[2] if prompt_end.endswith(MESSAGE) else None
        self._pending = ""
        self._kind = None if header is None else _kind(header)
        self._has_content = False
        self._separator = ""
        self.has_reasoned = self._kind == "reasoning"

    def feed(self, text: str, *, is_last: bool = False) -> Piece:
        self._pending += text
        pieces: list[tuple[str, str]] = []
        while self._pending and (self._kind is not None or self._read_header(pieces, is_last=is_last)):
            if not self._read_body(pieces, is_last=is_last):
                break
        return Piece(
            "".join(shown for kind, shown in pieces if kind == "reasoning"),
            "".join(shown for kind, shown in pieces if kind != "reasoning"),
        )

    def _read_header(self, pieces: list[tuple[str, str]], *, is_last: bool) -> bool:
        """Returns whether a message began."""
        begins = any(self._pending.startswith(mark) or mark.startswith(self._pending) for mark in _HEADERS)
        header, mark, rest = self._pending.partition(MESSAGE)
        if not mark and begins and not is_last:
            return False
        if not mark or not begins:
            # No header: the model writes as others do, or its answer was cut.
            length = 1 if not begins else len(self._pending)
            pieces.append(("content", self._pending[:length]))
            self._pending = self._pending[length:]
            self._kind = "content"
            return bool(self._pending)
        self._kind, self._pending = _kind(header), rest
        has_text = {"reasoning": self.has_reasoned, "content": self._has_content, "call": False}[self._kind]
        self._separator = "\n" if has_text else ""
        self.has_reasoned |= self._kind == "reasoning"
        if self._kind == "call":
            pieces.append(("call", header + mark))
        return True

    def _read_body(self, pieces: list[tuple[str, str]], *, is_last: bool) -> bool:
        """Returns whether the message ended."""
        found = _BODY_END.search(self._pending)
        ends = min(mark_position(self._pending, mark) for mark in (*_ENDS, "<|start|>", "<|channel|>"))
        shown = self._pending[: len(self._pending) if is_last and not found else ends]
        self._pending = self._pending[len(shown) :]
        assert self._kind is not None
        if shown:
            pieces.append((self._kind, self._separator + shown))
            self._separator = ""
            self._has_content |= self._kind == "content"
        if found is None:
            return False
        end = next((mark for mark in _ENDS if self._pending.startswith(mark)), "")
        self._pending = self._pending[len(end) :]
        if self._kind == "call":
            pieces.append(("call", end))
        self._kind = None
        return True


def is_analysis(message: str) -> bool:
    """Whether a message of gpt-oss, with its header, is reasoning."""
    return _kind(message.partition(MESSAGE)[0]) == "reasoning"


def _kind(header: str) -> Literal["reasoning", "content", "call"]:
    if "to=" in header:
        return "call"
    return "reasoning" if "<|channel|>analysis" in header else "content"


def mark_position(text: str, mark: str) -> int:
    """Returns where a mark begins in the text, or where it may begin at the text's end; else the text's length."""
    position = text.find(mark)
    if position >= 0:
        return position
    partial = next((k for k in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:k])), 0)
    return len(text) - partial


THINK = ReasoningParser(
    "think", "Qwen3, DeepSeek, GLM, SmolLM3, Nemotron", ("</think>", "<think>"), "<think>", "</think>"
)
REASONING_PARSERS: dict[ReasoningParserName, ReasoningParser] = {
    parser.name: parser
    for parser in (
        ReasoningParser("gpt_oss", "gpt-oss", ("<|channel|>analysis",), closing="<|end|>"),
        ReasoningParser("gemma4", "Gemma 4", ("<|channel>thought",), "<|channel>thought", "<channel|>"),
        ReasoningParser("mistral", "Magistral, Ministral", ("[THINK]",), "[THINK]", "[/THINK]"),
        THINK,
        ReasoningParser("none", "models without reasoning; their answers are content"),
    )
}
"""The parsers by name. A template gets the first of whose signs it has one, else `none`."""
assert set(REASONING_PARSERS) == set(get_args(ReasoningParserName))


def reasoning_parser_of(template: str) -> ReasoningParser:
    """Returns the parser for a chat template."""
    found = (parser for parser in REASONING_PARSERS.values() if any(sign in template for sign in parser.signs))
    return next(found, REASONING_PARSERS["none"])
