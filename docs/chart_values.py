"""The reference of the chart's values: names, defaults and comments of values.yaml, types of values.schema.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

CHART = Path(__file__).parents[1] / "helm" / "leyden"
Schema = dict[str, Any]


class Value(NamedTuple):
    """Args: path: with dots; default: as YAML in one line."""

    path: str
    kind: str
    default: str
    comment: str


def chart_values() -> dict[str, tuple[str, list[Value]]]:
    """Comment and values of each part of values.yaml; values without a part stand under an empty name."""
    text = (CHART / "values.yaml").read_text()
    lines = text.splitlines()
    schema = json.loads((CHART / "values.schema.json").read_text())
    parts: dict[str, tuple[str, list[Value]]] = {"": ("", [])}
    for key, node in _pairs(yaml.compose(text, Loader=yaml.SafeLoader)):
        described = _child(schema, key.value, schema)
        if _is_block(node):
            values = list(_leaves(key.value, node, described, schema, lines))
            parts[key.value] = (_comment(lines, key.start_mark.line), values)
        else:
            parts[""][1].append(_value(key.value, key, node, described, lines))
    return parts


def _leaves(path: str, node: yaml.Node, part: Schema, root: Schema, lines: list[str]) -> Iterator[Value]:
    for key, child in _pairs(node):
        described, name = _child(part, key.value, root), f"{path}.{key.value}"
        if _is_block(child):
            yield from _leaves(name, child, described, root, lines)
        else:
            yield _value(name, key, child, described, lines)


def _value(path: str, key: yaml.Node, node: yaml.Node, described: Schema, lines: list[str]) -> Value:
    default = json.dumps(yaml.safe_load(yaml.serialize(node)), ensure_ascii=False)
    return Value(path, _kind(described, node), default, _comment(lines, key.start_mark.line))


def _pairs(node: yaml.Node | None) -> list[tuple[Any, Any]]:
    assert isinstance(node, yaml.MappingNode)
    return list(node.value)


def _is_block(node: yaml.Node) -> bool:
    """Whether a mapping stands on lines of its own; one in braces is a value."""
    return isinstance(node, yaml.MappingNode) and not node.flow_style


def _comment(lines: list[str], line: int) -> str:
    """The comment directly above a line."""
    found: list[str] = []
    while line > 0 and lines[line - 1].strip().startswith("#"):
        line -= 1
        found.insert(0, lines[line].strip().removeprefix("#").strip())
    return " ".join(found)


def _child(part: Schema, name: str, root: Schema) -> Schema:
    described = part.get("properties", {}).get(name, {})
    while "$ref" in described:
        described = root["$defs"][described["$ref"].rpartition("/")[2]]
    return dict(described)


def _kind(described: Schema, node: yaml.Node) -> str:
    if "enum" in described:
        return " or ".join(str(one) for one in described["enum"])
    named = described.get("type") or node.tag.rpartition(":")[2].replace("map", "object").replace("seq", "array")
    return " or ".join(named) if isinstance(named, list) else str(named)
