"""Paths into JSON, a part of RFC 9535: `$`, `.name`, `['name']`, `[0]`, `[-1]`, `.*`, `[*]`, and one `..` at most.

Without filters, unions and a second `..` a path reaches each value once, so that a search takes linear time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_SEGMENT = re.compile(
    r"""(?P<dots>\.\.?)(?P<name>\*|[^\W\d]\w*)"""
    r"""|(?P<deep>\.\.)?\[(?:(?P<all>\*)|(?P<index>-?\d{1,9})|'(?P<single>[^'\\]*)'|"(?P<double>[^"\\]*)")\]"""
)


@dataclass(frozen=True)
class Segment:
    """One place of a path. Args: key: a name, a position of a list, or None for all; descends: at any depth"""

    key: str | int | None
    descends: bool = False


def segments_of(path: str) -> list[Segment]:
    """Reads a path.

    >>> segments_of("$.trips[-1]..city")
    [Segment(key='trips', descends=False), Segment(key=-1, descends=False), Segment(key='city', descends=True)]

    Raises: ValueError
    """
    if not path.startswith("$"):
        raise ValueError(f"the path {path!r} does not begin with $: write $.name")
    found: list[Segment] = []
    place = 1
    while place < len(path):
        match = _SEGMENT.match(path, place)
        if match is None:
            raise ValueError(
                f"the path {path!r} cannot be read from {path[place:]!r} on: write .name, ['name'], [0], [-1], [*] or"
                " ..name; there are no filters, slices and unions"
            )
        found.append(_segment(match))
        place = match.end()
    if sum(one.descends for one in found) > 1:
        raise ValueError(f"the path {path!r} has several ..: write one at most")
    return found


def values_at(segments: list[Segment], document: Any) -> list[Any]:
    """Returns the values that a path reaches, in the order of the document.

    >>> values_at(segments_of("$..city"), {"city": "Rome", "trips": [{"city": "Paris"}]})
    ['Rome', 'Paris']
    """
    found = [document]
    for segment in segments:
        bases = (below for one in found for below in (_all_below(one) if segment.descends else (one,)))
        found = [value for base in bases for value in _children(base, segment.key)]
    return found


def _segment(match: re.Match[str]) -> Segment:
    descends = ".." in (match["dots"], match["deep"])
    if match["index"] is not None:
        return Segment(int(match["index"]), descends)
    name = next((match[one] for one in ("name", "single", "double") if match[one] is not None), None)
    return Segment(None if match["name"] == "*" else name, descends)


def _children(value: Any, key: str | int | None) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values()) if key is None else [value[key]] if key in value else []
    if isinstance(value, list) and not isinstance(key, str):
        return value if key is None else [value[key]] if -len(value) <= key < len(value) else []
    return []


def _all_below(value: Any) -> Iterator[Any]:
    """The value and all below it, parents before their children."""
    todo = [value]
    while todo:
        one = todo.pop()
        yield one
        todo += reversed(_children(one, None))
