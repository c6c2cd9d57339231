"""An image has the packages of its service's extra alone: they must be all that the service's modules import."""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

import grimp
import pytest
from packaging.requirements import Requirement

SERVICES = ("api", "collector", "controller", "credit", "engine", "gateway", "grader", "runner", "trainer")
GRAPH = grimp.build_graph("leyden", include_external_packages=True)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_with(extra: str) -> set[str]:
    """The distributions that `pip install leyden[extra]` brings, those that they require included."""
    found: set[tuple[str, str]] = set()
    todo = [("leyden", ""), ("leyden", extra)]
    while todo:
        name, wanted = todo.pop()
        if (name, wanted) in found:
            continue
        found.add((name, wanted))
        try:
            lines = requires(name) or []
        except PackageNotFoundError:
            continue
        for one in map(Requirement, lines):
            if one.marker is None or one.marker.evaluate({"extra": wanted}):
                todo += [(canonical(one.name), part) for part in ("", *one.extras)]
    return {name for name, _ in found}


@pytest.mark.parametrize("service", SERVICES)
def test_an_extra_holds_all_that_its_service_imports(service: str) -> None:
    root = f"leyden.services.{service}"
    modules = {root, *GRAPH.find_descendants(root)}
    reached = modules.union(*(GRAPH.find_upstream_modules(one) for one in modules))
    names = {one.partition(".")[0] for one in reached} - {"leyden"} - sys.stdlib_module_names
    distributions, extra = packages_distributions(), installed_with(service)
    missing = {name for name in names if not {canonical(one) for one in distributions.get(name, [name])} & extra}
    assert missing == set()
