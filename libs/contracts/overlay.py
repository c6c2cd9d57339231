"""Lays changes over a document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def overlay(document: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the document with objects merged and other values replaced.

    A change of an object's `type` replaces the object: the fields of one variant are unknown to another.

    >>> overlay({"a": 1, "loss": {"type": "x", "clip": 1}}, {"a": 2, "loss": {"clip": 3}})
    {'a': 2, 'loss': {'type': 'x', 'clip': 3}}
    >>> overlay({"loss": {"type": "x", "clip": 1}}, {"loss": {"type": "y"}})
    {'loss': {'type': 'y'}}
    """
    merged = dict(document)
    for name, value in changes.items():
        below = merged.get(name)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            same = value.get("type", below.get("type")) == below.get("type")
            merged[name] = overlay(below, value) if same else value
        else:
            merged[name] = value
    return merged
