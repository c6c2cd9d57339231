"""Jinja's immutable sandbox for chat templates, with a limit on CPU time.

Templates have the filters and functions that transformers gives them (`tojson` without HTML escapes, `raise_exception`,
`strftime_now`, `generation` blocks), so that both render the same text. Every round of a loop and every call asks for
the time, so a template that never ends ends with an error.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

CALLS_PER_LOOK = 16
"""Calls between two looks at the clock, which costs as much as a call."""
MAX_PRODUCT = 2**26
"""Largest length of a repeated text or list, and bits of a power: one operation cannot be interrupted."""


class RenderingSlow(Exception):
    """The template used more CPU time than `cpu_limit` allows."""


class _Limit(threading.local):
    seconds: float | None = None
    ends_at: float = 0.0
    calls: int = 0


_limit = _Limit()


@contextmanager
def cpu_limit(seconds: float, *, of: float | None = None) -> Iterator[None]:
    """Templates that this thread renders inside may use so much of its CPU time; the time others use does not count.

    Args: of: the whole of which `seconds` are the rest, for the error's message
    """
    before = _limit.seconds, _limit.ends_at
    _limit.seconds, _limit.ends_at = seconds if of is None else of, time.thread_time() + seconds
    try:
        yield
    finally:
        _limit.seconds, _limit.ends_at = before


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment of all chat templates."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, loopcontrols],
            undefined=jinja2.Undefined,
        )
        self.filters["tojson"] = to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def check_time(self) -> None:
        """Raises RenderingSlow after the end of `cpu_limit`."""
        _limit.calls += 1
        if _limit.calls % CALLS_PER_LOOK or _limit.seconds is None:
            return
        if time.thread_time() > _limit.ends_at:
            raise RenderingSlow(f"it used more than {_limit.seconds:g} s of CPU time")

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Every call of a template."""
        self.check_time()
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Multiplies and exponentiates, within MAX_PRODUCT."""
        if _size(operator, left, right) > MAX_PRODUCT:
            raise jinja2.TemplateRuntimeError(f"the operands of {operator} are too large")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parses a template and puts `check_time` at the beginning of every loop's body."""
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            check = nodes.Call(nodes.EnvironmentAttribute("check_time"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(check, lineno=loop.lineno))
        tree.set_environment(self)
        return tree


class _GenerationBlock(Extension):
    """`{% generation %}` marks an assistant's text for training masks; here it only passes the text through."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _size(operator: str, left: Any, right: Any) -> int:
    """The length of the product of a text or list and a number; the bits of a power; 0 for others."""
    if operator == "**":
        return left.bit_length() * right if isinstance(left, int) and isinstance(right, int) else 0
    texts, numbers = (left, right) if isinstance(right, int) else (right, left)
    return len(texts) * numbers if isinstance(numbers, int) and isinstance(texts, str | list | tuple) else 0


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`, as transformers has it."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
