"""Chat templates that need not write a conversation from its beginning: only the last messages, with the same letters.

A session sends its whole history with every call. A template is a loop over the messages whose step looks at its own
message and earlier ones, the next one, and values from before the loop. Where those values come out the same as they
did, what it wrote for earlier messages stays as it is while messages are appended. Where they do not (a new question
drops earlier thoughts, say), or where a step looks further ahead, the conversation is written as a whole.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jinja2

from leyden.services.gateway.passes import (
    AT,
    BEGIN,
    IS_QUESTION,
    PLACE,
    PREVIOUS,
    SEARCH,
    STEP,
    Key,
    Pass,
    Unsuitable,
    rewrite,
)

Message = Mapping[str, Any]

# Stands in no template and no conversation.
_MARK = f"<mark {secrets.token_hex(16)}>"

UNRENDERABLE = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError
)  # fmt: skip
"""What a template raises that refuses a conversation, or was made for others."""
_Scalar = str | int | float | None


@dataclass(frozen=True, slots=True)
class _Known:
    """What steps knew, and what those before a message have left; of a search, the place that it found, or -1."""

    read: bytes
    compared: tuple[object, ...] = ()
    kept: tuple[object, ...] = ()
    found: int | None = None


@dataclass(frozen=True, slots=True)
class Reached:
    """A template before it writes a message: later ones with the same beginning may be written from there.

    Args: before: digest of the text before the first message; known: of each pass that has come so far
    """

    start: int
    before: bytes
    known: dict[int, _Known]


@dataclass(frozen=True, slots=True)
class Tail:
    """The end of a conversation's text.

    Args: before: what stands before the first message; texts: of each message from the first one written, the last of
        them with what follows the messages. That of a message but the last stays as it is whatever is appended
    """

    before: str
    texts: list[str]
    _run: _Run

    def reached(self, message: int) -> Reached | None:
        """Where a later conversation that has the messages before this one begins; None where none can.

        Args: message: of those that are written, by its place in the conversation
        """
        return self._run.reached(message, _digest(self.before))


class TailTemplate:
    """A template that can begin at any message."""

    def __init__(self, template: jinja2.Template, passes: Sequence[Pass]) -> None:
        self._template = template
        self._passes = passes

    @classmethod
    def of(cls, environment: jinja2.Environment, source: str) -> TailTemplate | None:
        """The template, changed so that it can begin at any message; None where it does more than go through them."""
        try:
            tree, passes = rewrite(environment, source)
        except Unsuitable:
            return None
        code = environment.compile(tree)
        return cls(jinja2.Template.from_code(environment, code, environment.make_globals(None)), passes)

    def write(self, messages: Sequence[Message], variables: Mapping[str, Any], since: Reached | None) -> Tail | None:
        """The text from what was reached on, or all of it.

        None where it can no more be told that the messages before have the texts that they had, or where the template
        gives up: written as a whole it says why.

        Args: variables: what else the template sees, `messages` included
        """
        run = _Run(self._template.environment, self._passes, messages, variables, since)
        try:
            before, *texts = self._template.render({**variables, **run.functions}).split(_MARK)
        # Whatever it is, written as a whole it comes again.
        except (_Changes, *UNRENDERABLE):
            return None
        # A step that ends the loop leaves out those after it.
        begun = len(messages) - len(texts)
        if not texts or begun != run.begun or (since is not None and since.before != _digest(before)):
            return None
        return Tail(before, [""] * (begun - (since.start if since else 0)) + texts, run)


class _Changes(Exception):
    """A text depends on messages that will be others when the conversation goes on, or on what is not as it was."""


@dataclass(slots=True)
class _Going:
    """A pass that goes on.

    Args: first: which of all messages is its first, None where that is unclear and it is never resumed; begun, place:
        of its messages, the one it began at and the one of this step; left: before each step, what earlier ones left
    """

    of: Pass
    items: list[Message]
    names: Mapping[str, object]
    first: int | None
    known: _Known | None
    begun: int = 0
    place: int = -1
    left: list[tuple[object, ...]] = field(default_factory=list)

    def reached(self, message: int) -> _Known | None:
        """What is known before a message; None where a later pass cannot begin there."""
        if self.known is None or self.first is None or self.known.found is not None:
            return self.known
        step = max(0, message - self.first) - self.begun
        if not 0 <= step < len(self.left) or not all(isinstance(value, _Scalar) for value in self.left[step]):
            return None
        return replace(self.known, kept=self.left[step])


class _Run:
    """What a template calls while it writes."""

    def __init__(
        self,
        environment: jinja2.Environment,
        passes: Sequence[Pass],
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        since: Reached | None,
    ) -> None:
        self._environment = environment
        self._passes = passes
        self._messages = messages
        self._given = {id(value): name for name, value in variables.items() if name != "messages"}
        self._asks = variables.get("add_generation_prompt")
        self._since = since
        self._all: dict[int, _Going] = {}
        self.functions = {
            BEGIN: self._begin, SEARCH: self._search, STEP: self._step, PLACE: lambda: self._now.place,
            PREVIOUS: self._previous, AT: self._at, IS_QUESTION: self._is_question,
        }  # fmt: skip

    @property
    def begun(self) -> int | None:
        """The first message that is written; None where none is."""
        last = self._all.get(len(self._passes) - 1)
        return None if last is None or last.first is None else last.first + last.begun

    def reached(self, message: int, before: bytes) -> Reached | None:
        """See `Tail.reached`."""
        reached = {number: going.reached(message) for number, going in self._all.items()}
        known = {number: one for number, one in reached.items() if one is not None}
        return Reached(message, before, known) if len(self._passes) - 1 in known else None

    def _begin(self, number: int, items: list[Message], /, **names: Any) -> list[Message]:
        """The messages that a pass still has to go through."""
        now = self._start(number, items, names)
        was = None if self._since is None else self._since.known.get(number)
        if was is not None and self._is_unchanged(now, was):
            now.begun, now.place = self._next(now), self._next(now) - 1
            for (name, attribute), value in zip(now.of.kept, was.kept, strict=True):
                names[name][attribute] = value
        elif not now.of.is_silent and (self._since is not None or now.known is None):
            raise _Changes
        return items[now.begun :] if now.begun else items

    def _search(self, number: int, items: list[Message], space: Any, flag: str, /, **names: Any) -> Iterator[Message]:
        """The messages from the last one back to the one that turns the flag off."""
        if not isinstance(items, list):
            raise _Changes
        now = self._start(number, items, names)
        was = None if self._since is None else self._since.known.get(number)
        places: Iterable[int] = range(len(items) - 1, -1, -1)
        if was is not None and was.found is not None and was.found < self._next(now) and self._is_unchanged(now, was):
            # What lies between has been looked at.
            places = [*range(len(items) - 1, self._next(now) - 1, -1), *([was.found] if was.found >= 0 else [])]
        found, kept = -1, self._values(now, now.of.kept)
        for now.place in places:
            yield items[now.place]
            if any(one is not other for one, other in zip(kept, self._values(now, now.of.kept), strict=True)):
                raise _Changes
            if not self._environment.getattr(space, flag):
                found = now.place
                break
        now.known = None if now.known is None else replace(now.known, found=found)

    def _start(self, number: int, items: list[Message], names: Mapping[str, Any]) -> _Going:
        now = self._now = self._all[number] = _Going(self._passes[number], items, names, self._first(items), None)
        read = [self._frozen(value) for value in self._values(now, now.of.read)]
        compared = [
            value if type(value) is int else self._frozen(value) for value in self._values(now, now.of.compared)
        ]
        if now.first is not None and None not in read and None not in compared:
            now.known = _Known(_digest(repr([now.first, read])), tuple(compared))
        return now

    def _is_unchanged(self, now: _Going, was: _Known) -> bool:
        """Whether the steps before would do what they did."""
        if now.known is None or now.known.read != was.read:
            return False
        pairs = zip(was.compared, now.known.compared, strict=True)
        return all(one == other or self._is_beyond(now, one, other) for one, other in pairs)

    def _is_beyond(self, now: _Going, *numbers: object) -> bool:
        """Whether all of the numbers are greater than any place that an earlier step has compared with them."""
        return all(type(number) is int and number > self._next(now) for number in numbers)

    def _next(self, now: _Going) -> int:
        """The place of the first message of a pass that is not known."""
        return 0 if self._since is None or now.first is None else max(0, self._since.start - now.first)

    def _step(self) -> str:
        now = self._now
        now.place += 1
        now.left.append(self._values(now, now.of.kept))
        return "" if now.of.is_silent else _MARK

    def _previous(self) -> object:
        now = self._now
        return now.items[now.place - 1] if now.place else self._environment.undefined("there is no previous item")

    def _is_question(self) -> object:
        """`add_generation_prompt`, which only the last message's text may depend on."""
        if self._now.place + 1 < len(self._now.items):
            raise _Changes
        return self._asks

    def _at(self, items: object, key: object) -> object:
        """An element of a list from before the loop, as long as it is no later message than the next one."""
        now = self._now
        first = now.first if items is now.items else self._first(items)
        if now.first is not None:
            if first is None or type(key) is not int or not 0 <= key <= now.first + now.place + 1 - first:
                raise _Changes
        elif key is None:
            raise _Changes
        return self._environment.getitem(items, key)

    def _first(self, items: object) -> int | None:
        """Which message a list of the last messages begins with; None for anything else."""
        if items is self._messages:
            return 0
        first = len(self._messages) - len(items) if isinstance(items, list) else -1
        return first if first >= 0 and items == self._messages[first:] else None

    def _values(self, now: _Going, keys: Sequence[Key]) -> tuple[object, ...]:
        return tuple(
            now.names[name] if attribute is None else self._environment.getattr(now.names[name], attribute)
            for name, attribute in keys
        )

    def _frozen(self, value: object) -> str | None:
        """A value told apart from any other by its text; None where it is none that stays what it is."""
        if isinstance(value, _Scalar) or (isinstance(value, list) and all(isinstance(part, _Scalar) for part in value)):
            return repr(value)
        if isinstance(value, jinja2.Undefined):
            return "undefined"
        name = self._given.get(id(value))
        return None if name is None else f"given {name}"


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
