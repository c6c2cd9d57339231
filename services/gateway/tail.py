"""Chat templates that write messages one after the other: only the last messages are written, with the same letters.

A session sends its whole history with every call. Most templates are a loop over the messages whose step looks at its
own message, the ones beside it and the first one; what they wrote for earlier messages stays as it is while messages
are appended. Whether a template is one of these is read from its syntax tree; any other is written as a whole.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jinja2
from jinja2 import nodes

Message = Mapping[str, Any]

# Names and a mark that no template and no conversation holds.
_NONCE = secrets.token_hex(16)
_MESSAGES, _TAIL, _START = f"messages_{_NONCE}", f"tail_{_NONCE}", f"start_{_NONCE}"
_MARK = f"<mark {_NONCE}>"

UNRENDERABLE = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError
)  # fmt: skip
"""What a template raises that refuses a conversation, or was made for others."""
_PURE = (
    nodes.Output, nodes.TemplateData, nodes.Const, nodes.Name, nodes.Getattr, nodes.Getitem, nodes.Slice, nodes.Filter,
    nodes.Test, nodes.Call, nodes.Keyword, nodes.If, nodes.For, nodes.Assign, nodes.Scope, nodes.Continue, nodes.Break,
    nodes.Concat, nodes.CondExpr, nodes.BinExpr, nodes.UnaryExpr, nodes.Compare, nodes.Operand, nodes.List, nodes.Tuple,
    nodes.Dict, nodes.Pair,
)  # fmt: skip
"""What has no effect beyond its own step. Left out above all: `{% set ns.x = ... %}`, which later steps see."""
_LAZY = frozenset(
    {"batch", "items", "map", "reject", "rejectattr", "reverse", "select", "selectattr", "slice", "unique"}
)
"""Filters that give iterators: made before the loop, a step would see what earlier ones have left of them."""
_PURE_FUNCTIONS = frozenset({"raise_exception", "range", "dict", "namespace"})
_OWN_PLACES = {"index0": 0, "index": 1}
"""How far after a step's own message they point."""
_RESERVED = frozenset({"messages", "loop", "add_generation_prompt", "self", "caller", "varargs", "kwargs"})


class TailTemplate:
    """A template that can begin at any message."""

    def __init__(self, template: jinja2.Template) -> None:
        self._template = template

    @classmethod
    def of(cls, environment: jinja2.Environment, source: str) -> TailTemplate | None:
        """The template, changed so that it can begin at any message; None where it does more than go through them."""
        tree = environment.parse(source)
        loops = [node for node in tree.body if isinstance(node, nodes.For) and _is_name(node.iter, "messages")]
        if len(loops) != 1 or not _is_plain(loops[0]):
            return None
        loop, place = loops[0], tree.body.index(loops[0])
        before, step = _Rewriting(in_loop=False, of_messages=False), _Rewriting(in_loop=True, of_messages=True)
        try:
            begin = [before(node) for node in tree.body[:place]]
            steps = [step(node) for node in loop.body]
        except _Unsuitable:
            return None
        loop.iter = nodes.Name(_TAIL, "load")
        loop.body = [nodes.Output([nodes.TemplateData(_MARK)]), *steps]
        # What follows the loop is written anew each time, whatever it looks at.
        tree.body = [*begin, loop, *tree.body[place + 1 :]]
        tree.set_environment(environment)
        return cls(jinja2.Template.from_code(environment, environment.compile(tree), environment.make_globals(None)))

    def write(self, messages: Sequence[Message], start: int, variables: Mapping[str, Any]) -> list[str] | None:
        """The text from a message on: what stands before the first message, then a text for each one from `start` on.

        The last text ends with what follows the messages. None where the text of a message cannot be told from that of
        others, or the template gives up: written as a whole it says why.

        Args: variables: what else the template sees, `messages` included
        """
        inner = {_MESSAGES: _Beside(messages), _TAIL: messages[start:], _START: start}
        try:
            parts = self._template.render({**variables, **inner}).split(_MARK)
        # Whatever it is, written as a whole it comes again.
        except (_LooksBack, *UNRENDERABLE):
            return None
        # A step that ends the loop leaves out those after it.
        return parts if len(parts) == len(messages) - start + 1 else None


class _Unsuitable(Exception):
    """The template does something that may change what stands before."""


class _LooksBack(Exception):
    """A step has asked for a message by a place counted from the end, which another message takes later."""


class _Beside:
    """The messages as a step of the loop sees them."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages = messages

    def __getitem__(self, index: int) -> Message:
        if index < 0:
            raise _LooksBack
        return self._messages[index]


@dataclass(frozen=True, slots=True)
class _Rewriting:
    """Makes a part of a template count from `_START`.

    Args: in_loop: whether `loop` is the loop over the messages; of_messages: whether it is inside of it
    Raises: _Unsuitable: it may look at other messages than those beside its own, or leave something for later steps
    """

    in_loop: bool
    of_messages: bool

    def __call__(self, node: nodes.Node) -> nodes.Node:
        match node:
            case nodes.Getattr(node=nodes.Name(name="loop")):
                return self._place(node)
            case nodes.Getitem(node=nodes.Name(name="messages")) if self._is_beside(node.arg):
                return nodes.Getitem(nodes.Name(_MESSAGES, "load"), self(node.arg), "load", lineno=node.lineno)
            case nodes.Name() if node.name in _RESERVED:
                raise _Unsuitable(node.name)
            case nodes.Call(node=nodes.Name(name=name)) if name not in _PURE_FUNCTIONS:
                raise _Unsuitable(name)
            case nodes.Filter() if node.node is None or node.name == "random":
                raise _Unsuitable(node.name)
            case nodes.Filter() if node.name in _LAZY and not self.of_messages:
                raise _Unsuitable(node.name)
            case nodes.For() if node.recursive or node.test is not None or node.else_:
                raise _Unsuitable("for")
        return self._parts(node)

    def _parts(self, node: nodes.Node) -> nodes.Node:
        if not isinstance(node, _PURE):
            raise _Unsuitable(type(node).__name__)
        inner = replace(self, in_loop=False) if isinstance(node, nodes.For) else self
        for name, value in node.iter_fields():
            # A loop's sequence is made outside of it.
            rewrite = self if name == "iter" else inner
            if isinstance(value, list):
                setattr(node, name, [rewrite(part) if isinstance(part, nodes.Node) else part for part in value])
            elif isinstance(value, nodes.Node):
                setattr(node, name, rewrite(value))
        return node

    def _place(self, node: nodes.Getattr) -> nodes.Node:
        """What `loop.<attr>` is for all messages, where only the last are gone through."""
        if not self.in_loop:
            # Of a loop inside.
            return node
        match node.attr:
            case "last":
                return node
            case "index" | "index0":
                return nodes.Add(node, nodes.Name(_START, "load"), lineno=node.lineno)
            case "first":
                index = self._place(nodes.Getattr(node.node, "index0", "load", lineno=node.lineno))
                return nodes.Compare(index, [nodes.Operand("eq", nodes.Const(0))], lineno=node.lineno)
        raise _Unsuitable(f"loop.{node.attr}")

    def _is_beside(self, index: nodes.Node) -> bool:
        """Whether it names the first message, the step's own, or one of those beside it."""
        match index:
            case nodes.Const(value=int(value)):
                return value == 0
            case nodes.Getattr(node=nodes.Name(name="loop"), attr="index0" | "index" as attr):
                return self.in_loop and attr in _OWN_PLACES
            case nodes.Add(left=nodes.Getattr() as own, right=nodes.Const(value=int(added))):
                return self._is_beside(own) and abs(_OWN_PLACES[own.attr] + added) <= 1
            case nodes.Sub(left=nodes.Getattr() as own, right=nodes.Const(value=int(taken))):
                return self._is_beside(own) and abs(_OWN_PLACES[own.attr] - taken) <= 1
        return False


def _is_plain(loop: nodes.For) -> bool:
    """Whether it goes through all messages, one after the other."""
    is_own = isinstance(loop.target, nodes.Name) and loop.target.name not in _RESERVED
    return is_own and loop.test is None and not loop.else_ and not loop.recursive


def _is_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.name == name and node.ctx == "load"
