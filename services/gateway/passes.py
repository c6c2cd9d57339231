"""Passes: the loops of a chat template over its messages, found and rewritten so that each can begin at any message.

A pass can be resumed where its steps read the same from before the loop, and what earlier steps left in namespaces is
put back. What a template does beside its passes is done anew each time and needs no rule. Which values those are is
read from the syntax tree here; `tail.py` looks at them while the template runs.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import jinja2
from jinja2 import nodes

# Names that no template and no option has.
_NONCE = secrets.token_hex(16)
BEGIN, SEARCH, STEP, PLACE, PREVIOUS, AT, IS_QUESTION = (
    f"{name}_{_NONCE}" for name in ("begin", "search", "step", "place", "previous", "at", "is_question")
)
Key = tuple[str, str | None]
"""A variable, or an attribute of one."""

_PURE = (
    nodes.Output, nodes.TemplateData, nodes.Const, nodes.Name, nodes.Getattr, nodes.Getitem, nodes.Slice, nodes.Filter,
    nodes.Test, nodes.Call, nodes.Keyword, nodes.If, nodes.For, nodes.Assign, nodes.AssignBlock, nodes.Scope,
    nodes.Continue, nodes.Break, nodes.Concat, nodes.CondExpr, nodes.BinExpr, nodes.UnaryExpr, nodes.Compare,
    nodes.Operand, nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair, nodes.Macro,
)  # fmt: skip
"""What has no effect beyond its own step; `{% set ns.x = ... %}`, which has, is looked at by itself."""
_PURE_FUNCTIONS = frozenset({"raise_exception", "range", "dict", "namespace", PLACE})
_RESERVED = frozenset({"messages", "loop", "add_generation_prompt", "self", "caller", "varargs", "kwargs"})
_ELSEWHERE = (nodes.Extends, nodes.Block, nodes.Include, nodes.Import, nodes.FromImport)
_ORDER = frozenset({"gt", "gteq", "lt", "lteq"})


@dataclass(frozen=True, slots=True)
class Pass:
    """What the steps of a pass know beside their own messages.

    Args: read: from before the loop, as it is; compared: only with a step's own place; kept: what steps leave for
        later ones; is_silent: whether they write nothing
    """

    read: tuple[Key, ...]
    compared: tuple[Key, ...]
    kept: tuple[Key, ...]
    is_silent: bool


class Unsuitable(Exception):
    """A loop may look at later messages, or leave something for later steps that cannot be put back."""


def rewrite(environment: jinja2.Environment, source: str) -> tuple[nodes.Template, list[Pass]]:
    """A template changed to run its passes, and these in order; the last one writes the messages.

    Each calls `BEGIN` with its number, its messages and what its steps know, and `STEP` in each step. A search from the
    end calls `SEARCH` for its messages: it ends with what it looks for, and what was looked at before is left out.

    Raises: Unsuitable: no pass writes the messages
    """
    whole: set[int] = set()
    while True:
        tree = environment.parse(source)
        loops = list(_loops(tree.body, set(), {"messages"}))
        if not loops or next(tree.find_all(_ELSEWHERE), None) is not None:
            raise Unsuitable("no loop over the messages")
        macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
        passes: list[Pass] = []
        for number, (loop, before) in enumerate(loops):
            steps, is_last = _Steps(before, macros), number == len(loops) - 1
            try:
                if number not in whole:
                    is_search = not is_last and _is_backward(loop)
                    passes.append((steps.of_search if is_search else steps.of_pass)(loop, len(passes), not is_last))
            except Unsuitable:
                if is_last:
                    raise
                # Rewritten in part by now. It writes no message, and may go through all of them each time.
                whole.add(number)
                break
        else:
            tree.set_environment(environment)
            return tree, passes


def _loops(body: list[nodes.Node], before: set[str], of_messages: set[str]) -> Iterator[tuple[nodes.For, set[str]]]:
    """Loops over messages outside of others, in order, with the variables that are set before each.

    Args: before, of_messages: variables set so far, and those of them that may be messages; both grow
    """
    for node in body:
        if isinstance(node, nodes.For):
            source = node.iter.node if isinstance(node.iter, nodes.Getitem) else node.iter
            if isinstance(source, nodes.Name) and source.name in of_messages:
                yield node, set(before)
        elif isinstance(node, nodes.If):
            after = set(before)
            for branch in _branches(node):
                own = set(before)
                yield from _loops(branch, own, of_messages)
                after |= own
            before |= after
        elif isinstance(node, nodes.Assign | nodes.AssignBlock):
            targets = (node.target, *node.target.find_all(nodes.Name))
            names = {target.name for target in targets if isinstance(target, nodes.Name)}
            before |= names
            if any(name.name in of_messages for name in node.find_all(nodes.Name)):
                of_messages |= names


@dataclass(slots=True)
class _Steps:
    """Rewrites the steps of a loop to count from its first message, and sees what they know.

    Args: before: variables set before the loop
    """

    before: set[str]
    macros: dict[str, nodes.Macro]
    read: set[Key] = field(default_factory=set)
    compared: set[Key] = field(default_factory=set)
    kept: set[Key] = field(default_factory=set)
    _macros_seen: set[str] = field(default_factory=set)
    _only_looks: bool = False

    def of_pass(self, loop: nodes.For, number: int, is_silent: bool) -> Pass:
        """Raises: Unsuitable"""
        if not isinstance(loop.target, nodes.Name) or loop.target.name in _RESERVED or _is_backward(loop):
            raise Unsuitable("not one message after the other")
        if loop.test is not None or loop.else_ or loop.recursive or (is_silent and not _is_silent(loop.body)):
            raise Unsuitable("not only steps")
        loop.body = [nodes.Output([_call(STEP)]), *(self._node(node, is_own=True) for node in loop.body)]
        self.read |= self.kept
        loop.iter = self._begin(BEGIN, nodes.Const(number), loop.iter)
        return self._seen(tuple(self.kept), is_silent=is_silent)

    def of_search(self, loop: nodes.For, number: int, is_silent: bool) -> Pass:
        """A loop from the end whose steps do nothing once `ns.flag` is off, and until then nothing but turn it off.

        With the flag they may set other attributes of `ns`.

        Raises: Unsuitable: it is another loop, or its steps look at more than their own message
        """
        match loop:
            case nodes.For(
                iter=nodes.Getitem(node=nodes.Name() as listed), body=[*first, nodes.If(elif_=[], else_=[]) as found]
            ) if loop.test is None and not loop.recursive:
                flag = _first_condition(found.test)
            case _:
                raise Unsuitable("not a search")
        local = all(isinstance(node, nodes.Assign) and isinstance(node.target, nodes.Name) for node in first)
        if not isinstance(flag, nodes.Getattr) or not isinstance(flag.node, nodes.Name) or not local:
            raise Unsuitable("not a search")
        _count_from_start(loop, listed.name)
        names = {name.name for part in loop.body for name in part.find_all(nodes.Name)}
        if names & {"loop", "messages", listed.name} or not _only_ends(found.body, flag):
            raise Unsuitable("more than a search")
        self._only_looks = True
        for part in loop.body:
            self._node(part, is_own=False)
        of_macros = tuple(key for key in self.kept if key[0] != flag.node.name)
        loop.iter = self._begin(SEARCH, nodes.Const(number), listed, flag.node, nodes.Const(flag.attr))
        return self._seen(of_macros, is_silent=is_silent)

    def _seen(self, kept: tuple[Key, ...], *, is_silent: bool) -> Pass:
        # Who reads all of a value reads its attributes, and its methods tell of nothing else.
        read = {(name, attr) for name, attr in self.read if attr is None or (name, None) not in self.read}
        return Pass(tuple(read), tuple(self.compared - self.read), kept, is_silent)

    def _begin(self, function: str, *arguments: nodes.Node) -> nodes.Call:
        names = sorted({name for name, _ in self.read | self.compared | self.kept})
        return _call(function, *arguments, **{name: nodes.Name(name, "load") for name in names})

    def _node(self, node: nodes.Node, *, is_own: bool) -> nodes.Node:
        """Args: is_own: whether `loop` is the pass, not a loop inside it"""
        match node:
            case nodes.Getattr(node=nodes.Name(name="loop")):
                return _place(node) if is_own else node
            case nodes.Getitem(node=nodes.Name(name=name), arg=key) if self._is_listed(name):
                # Which messages a part of the list has is not looked into.
                at = nodes.Const(None) if isinstance(key, nodes.Slice) else self._node(key, is_own=is_own)
                return _call(AT, node.node, at)
            case nodes.Compare(expr=left, ops=[nodes.Operand(op=op, expr=right)]) if is_own and op in _ORDER:
                if self._is_compared(left, right) or self._is_compared(right, left):
                    node.expr, node.ops[0].expr = _place(left), _place(right)
                    return node
            case nodes.Getattr(node=nodes.Name(name=name), attr=attr) if name in self.before:
                self.read.add((name, attr))
                return node
            case nodes.Assign(target=nodes.NSRef(name=name, attr=attr)):
                if name in self.before:
                    self.kept.add((name, attr))
                node.node = self._node(node.node, is_own=is_own)
                return node
            case nodes.Name(name="add_generation_prompt" as name) if self._is_given(name):
                return _call(IS_QUESTION)
            case nodes.Name(name=name) if name in _RESERVED:
                raise Unsuitable(name)
            case nodes.Name(name=name, ctx="load") if name in self.before:
                self.read.add((name, None))
            case nodes.Call():
                self._look_at_call(node)
            case nodes.Filter() if node.node is None or node.name == "random":
                raise Unsuitable(node.name)
            case nodes.For() if node.recursive or node.else_:
                raise Unsuitable("for")
        return self._parts(node, is_own=is_own)

    def _parts(self, node: nodes.Node, *, is_own: bool) -> nodes.Node:
        if not isinstance(node, _PURE):
            raise Unsuitable(type(node).__name__)
        for name, value in node.iter_fields():
            # A loop's sequence is made outside of it.
            own = is_own and (name == "iter" or not isinstance(node, nodes.For | nodes.Macro))
            if isinstance(value, list):
                parts = [self._node(part, is_own=own) if isinstance(part, nodes.Node) else part for part in value]
                setattr(node, name, parts)
            elif isinstance(value, nodes.Node):
                setattr(node, name, self._node(value, is_own=own))
        return node

    def _look_at_call(self, call: nodes.Call) -> None:
        match call.node:
            case nodes.Name(name=name) if name in self.macros and name not in self.before:
                if name not in self._macros_seen:
                    self._macros_seen.add(name)
                    only_looks, self._only_looks = self._only_looks, True
                    self._parts(self.macros[name], is_own=False)
                    self._only_looks = only_looks
            case nodes.Name(name=name) if name not in _PURE_FUNCTIONS:
                raise Unsuitable(name)
            case nodes.Getattr(node=nodes.Name(name=name)) if name in self.before:
                # What its methods give depends on all of it.
                self.read.add((name, None))

    def _is_listed(self, name: str) -> bool:
        return not self._only_looks and (name == "messages" or name in self.before)

    def _is_given(self, name: str) -> bool:
        return not self._only_looks and name not in self.before

    def _is_compared(self, own: nodes.Node, other: nodes.Node) -> bool:
        """Whether a step's place is compared with a value from before the loop, which is then noted."""
        match own, other:
            case nodes.Getattr(node=nodes.Name(name="loop"), attr="index" | "index0"), nodes.Name(name=name):
                key: Key = (name, None)
            case (
                nodes.Getattr(node=nodes.Name(name="loop"), attr="index" | "index0"),
                nodes.Getattr(node=nodes.Name(name=name), attr=attr),
            ):
                key = (name, attr)
            case _:
                return False
        if name not in self.before:
            return False
        self.compared.add(key)
        return True


def _place(node: nodes.Node) -> nodes.Expr:
    """What `loop.<attr>` is for all messages, where only the last are gone through; other nodes as they are.

    Raises: Unsuitable: it depends on how many messages there are
    """
    match node:
        case nodes.Getattr(node=nodes.Name(name="loop"), attr=attr):
            pass
        case _:
            assert isinstance(node, nodes.Expr)
            return node
    match attr:
        case "last" | "nextitem":
            return node
        case "index0":
            return _call(PLACE)
        case "index":
            return nodes.Add(_call(PLACE), nodes.Const(1))
        case "first":
            return nodes.Compare(_call(PLACE), [nodes.Operand("eq", nodes.Const(0))])
        case "previtem":
            return _call(PREVIOUS)
    raise Unsuitable(f"loop.{attr}")


def _call(function: str, *arguments: nodes.Node, **named: nodes.Expr) -> nodes.Call:
    keywords = [nodes.Keyword(name, value) for name, value in named.items()]
    return nodes.Call(nodes.Name(function, "load"), list(arguments), keywords, None, None)


def _branches(node: nodes.If) -> list[list[nodes.Node]]:
    return [node.body, *(part.body for part in node.elif_), node.else_]


def _is_backward(loop: nodes.For) -> bool:
    match loop.iter:
        case nodes.Getitem(arg=nodes.Slice(start=None, stop=None, step=nodes.Neg(node=nodes.Const(value=1)))):
            return True
        case nodes.Getitem(arg=nodes.Slice(step=None)) | nodes.Name():
            return False
    raise Unsuitable("only some of the messages")


def _is_silent(body: Sequence[nodes.Node]) -> bool:
    """Whether it writes nothing: it may refuse the conversation."""
    written = [
        part
        for node in body
        for output in (node, *node.find_all(nodes.Output))
        if isinstance(output, nodes.Output)
        for part in output.nodes
    ]
    return all(
        isinstance(part, nodes.Call) and isinstance(part.node, nodes.Name) and part.node.name == "raise_exception"
        for part in written
    )


def _first_condition(test: nodes.Node) -> nodes.Node:
    return _first_condition(test.left) if isinstance(test, nodes.And) else test


def _only_ends(body: Sequence[nodes.Node], flag: nodes.Getattr) -> bool:
    """Whether namespaces are only changed where the flag is turned off, which alone has to be told from the search."""
    off = changed = False
    for node in body:
        match node:
            case nodes.Assign(target=nodes.NSRef(name=name, attr=attr)):
                if not isinstance(flag.node, nodes.Name) or name != flag.node.name:
                    return False
                changed = True
                off = off or (attr == flag.attr and isinstance(node.node, nodes.Const) and node.node.value is False)
            case nodes.If():
                if not all(_only_ends(branch, flag) for branch in _branches(node)):
                    return False
            case nodes.Assign(target=nodes.Name()):
                pass
            case _:
                return False
    return off or not changed


def _count_from_start(node: nodes.Node, listed: str) -> None:
    """Puts a step's place where a template reckons it: `messages | length - 1 - loop.index0`."""
    for name, value in node.iter_fields():
        match value:
            case nodes.Sub(
                left=nodes.Sub(
                    left=nodes.Filter(name="length", node=nodes.Name(name=counted)), right=nodes.Const(value=1)
                ),
                right=nodes.Getattr(node=nodes.Name(name="loop"), attr="index0"),
            ) if counted == listed:
                setattr(node, name, _call(PLACE))
            case nodes.Node():
                _count_from_start(value, listed)
            case list():
                for part in value:
                    if isinstance(part, nodes.Node):
                        _count_from_start(part, listed)
