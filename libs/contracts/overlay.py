"""Lays changes over a document, and finds the changes between documents."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def overlay(document: Mapping[str, Any], changes: Mapping[str, Any], parsed: object = None) -> dict[str, Any]:
    """Returns the document with objects merged and other values replaced.

    A change of an object's `type` replaces the object: the fields of one variant are unknown to another. Null drops a
    key of a map, as in a JSON merge patch (RFC 7396); of an object with fields it is the field's value.

    Args: parsed: the document as its model, whose dicts are the maps; None: it has no maps

    >>> overlay({"a": 1, "loss": {"type": "x", "clip": 1}}, {"a": 2, "loss": {"clip": 3}})
    {'a': 2, 'loss': {'type': 'x', 'clip': 3}}
    >>> overlay({"loss": {"type": "x", "clip": 1}}, {"loss": {"type": "y"}})
    {'loss': {'type': 'y'}}
    """
    merged = dict(document)
    for name, value in changes.items():
        below = merged.get(name)
        if value is None and isinstance(parsed, Mapping):
            merged.pop(name, None)
        elif isinstance(below, Mapping) and isinstance(value, Mapping):
            part = parsed.get(name) if isinstance(parsed, Mapping) else getattr(parsed, name, None)
            same = value.get("type", below.get("type")) == below.get("type")
            merged[name] = overlay(below if same else {}, value, part)
        else:
            merged[name] = value
    return merged


def document_differences(documents: Sequence[Mapping[str, Any]]) -> dict[str, list[str | None]]:
    """The values of each path that is not the same in all documents, as JSON; None where a document has no such path.

    >>> document_differences([{"a": 1, "b": {"c": [1, 2]}}, {"a": 1, "b": {"c": [1]}, "d": None}])
    {'b.c.1': ['2', None], 'd': [None, 'null']}
    """
    found = [dict(_leaves("", document)) for document in documents]
    paths = dict.fromkeys(path for leaves in found for path in leaves)
    values = {path: [leaves.get(path) for leaves in found] for path in paths}
    return {path: values[path] for path in sorted(values) if len(set(values[path])) > 1}


def _leaves(path: str, value: object) -> Iterator[tuple[str, str]]:
    below: dict[str, object] = {}
    if isinstance(value, Mapping):
        below = {str(name): part for name, part in value.items()}
    elif isinstance(value, list):
        below = {str(number): part for number, part in enumerate(value)}
    for name, part in below.items():
        yield from _leaves(f"{path}.{name}" if path else name, part)
    if not below:
        yield path, json.dumps(value, ensure_ascii=False)
