"""Measures folders and imports of each part, a service or a library: `python -m tests.checks.structure`.

A folder holds at most 20 files, the longest chain of imports inside a part has at most 10 modules, and no modules
import each other in a circle; imports below TYPE_CHECKING count. Only `__main__` modules import the CLI. Exit status 1
when something is found.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[2]
LIMITS = {"files": 20, "floors": 10, "circles": 0}
# The CPU engine stays as it is.
FROZEN = {"services/engine"}
CLI = "leyden.libs.cli"


@dataclass(frozen=True)
class Part:
    """A service or a library; `files` counts those of its fullest folder, `rooms` its modules and folders."""

    name: str
    rooms: int
    arrows: int
    files: int
    floors: int
    circles: int
    in_circles: tuple[str, ...]


def main() -> int:
    """Prints a line for each part, then every finding."""
    print(f"{'part':22}{'rooms':>7}{'arrows':>7}{'files':>7}{'floors':>7}{'circles':>8}")
    for part in parts():
        print(f"{part.name:22}{part.rooms:7}{part.arrows:7}{part.files:7}{part.floors:7}{part.circles:8}")
    found = findings()
    print("\n".join(found))
    return 1 if found else 0


def findings() -> list[str]:
    """Every broken limit, and every exception that is larger than necessary."""
    checked = [part for part in parts() if part.name not in FROZEN]
    return [line for part in checked for limit in LIMITS if (line := _compare(part, limit))] + _cli_importers()


def _compare(part: Part, limit: str) -> str:
    allowed, measured = LIMITS[limit], getattr(part, limit)
    if measured > allowed:
        names = f": {', '.join(part.in_circles)}" if limit == "circles" else ""
        return f"{part.name}: {measured} {limit}, at most {allowed} are allowed{names}"
    return ""


@cache
def _graph() -> grimp.ImportGraph:
    return grimp.build_graph("leyden", cache_dir=None)


@cache
def parts() -> list[Part]:
    """Services and libraries by name."""
    graph = _graph()
    packages = [name for layer in ("services", "libs") for name in sorted(graph.find_children(f"leyden.{layer}"))]
    return [_measure(package) for package in packages if (ROOT / _folder(package)).is_dir()]


def _folder(module: str) -> str:
    return module.removeprefix("leyden.").replace(".", "/")


def _measure(package: str) -> Part:
    graph = _graph()
    modules = {package, *graph.find_descendants(package)}
    imports = {module: graph.find_modules_directly_imported_by(module) & modules for module in modules}
    # Migrations are a line in time, checked by the conventions.
    files = Counter(path.parent for path in (ROOT / _folder(package)).rglob("*.py") if path.parent.name != "versions")
    circles = [group for group in _groups(imports) if len(group) > 1]
    return Part(
        name=_folder(package),
        rooms=len(graph.find_children(package)),
        arrows=sum(map(len, imports.values())),
        files=max(files.values()),
        floors=_floors(imports),
        circles=len(circles),
        in_circles=tuple(sorted(name for circle in circles for name in circle)),
    )


def _reached(imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """All that each module imports, directly or not."""
    reached = {module: set(targets) for module, targets in imports.items()}
    for middle in imports:
        for targets in reached.values():
            if middle in targets:
                targets |= reached[middle]
    return reached


def _groups(imports: dict[str, set[str]]) -> set[frozenset[str]]:
    """Modules that import each other in a circle; any other stands alone."""
    reached = _reached(imports)
    return {frozenset({m, *(other for other in reached[m] if m in reached[other])}) for m in imports}


def _floors(imports: dict[str, set[str]]) -> int:
    """Length of the longest path of imports; a circle is one floor."""
    group_of = {module: group for group in _groups(imports) for module in group}

    @cache
    def floors(group: frozenset[str]) -> int:
        below = {group_of[target] for module in group for target in imports[module]} - {group}
        return 1 + max(map(floors, below), default=0)

    return max(map(floors, set(group_of.values())))


def _cli_importers() -> list[str]:
    arrows = [arrow for to in (CLI, f"{CLI}.**") for arrow in _graph().find_matching_direct_imports(f"** -> {to}")]
    outside = {arrow["importer"] for arrow in arrows if not arrow["importer"].startswith(CLI)}
    return [f"{name}: only __main__ imports the CLI" for name in sorted(outside) if not name.endswith(".__main__")]


if __name__ == "__main__":
    sys.exit(main())
