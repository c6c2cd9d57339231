"""The dashboards obey Grafana's published schema, as its foundation SDK has it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from docs.dashboards import dashboards

DOCUMENTS = {name: json.loads(text) for name, text in sorted(dashboards().items())}
LATER = ("templating.list[].definition", *(
    f"annotations.list[].target.{name}" for name in ("editorMode", "format", "rawQuery", "rawSql", "refId")
))  # fmt: skip
"""Fields that the schema lacks: the text of a variable's query, which Grafana writes, and a source's own query."""


def absent(ours: Any, theirs: Any, path: str = "") -> Iterator[str]:
    """Paths of what the schema's classes do not give back as they read it."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name, value in ours.items():
            yield from absent(value, theirs.get(name, absent), f"{path}.{name}".lstrip("."))
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for one, other in zip(ours, theirs, strict=True):
            yield from absent(one, other, f"{path}[]")
    elif ours != theirs:
        yield path


@pytest.mark.parametrize("name", list(DOCUMENTS))
def test_a_dashboard_is_one_of_grafanas_schema(name: str) -> None:
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason="make setup installs it")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins

    register_default_plugins()
    read = json.loads(JSONEncoder().encode(models.Dashboard.from_json(DOCUMENTS[name])))
    assert set(absent(DOCUMENTS[name], read)) <= set(LATER)


@pytest.mark.parametrize("name", list(DOCUMENTS))
def test_a_dashboard_names_its_sources_by_variables_alone(name: str) -> None:
    document = DOCUMENTS[name]
    variables = {one["name"]: one for one in document["templating"]["list"]}
    sources = {
        f"${{{one}}}": variable["query"] for one, variable in variables.items() if variable["type"] == "datasource"
    }
    parts = [*document["panels"], *document["annotations"]["list"], *variables.values()]
    parts += [target for panel in document["panels"] for target in panel["targets"]]
    used = [part["datasource"] for part in parts if "datasource" in part]
    assert used
    assert all(sources.get(one["uid"]) == one["type"] for one in used)
    assert set(re.findall(r"\$\{?(run|namespace|release)\b", json.dumps(document["panels"]))) <= variables.keys()


def test_dashboards_are_told_apart_by_their_uid_and_panels_by_their_id() -> None:
    assert [one["uid"] for one in DOCUMENTS.values()] == [f"leyden-{name.removesuffix('.json')}" for name in DOCUMENTS]
    for document in DOCUMENTS.values():
        numbers = [panel["id"] for panel in document["panels"]]
        assert numbers == sorted(set(numbers))
