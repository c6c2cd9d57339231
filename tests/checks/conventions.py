"""Conventions that no other linter knows: `python -m tests.checks.conventions`, part of `make lint`.

No sentence of a docstring may begin with a relative pronoun. Migrations are a line in the order of their files, which
are named after them. Exit status 1 when something is found.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.checks import structure

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("services", "libs", "leyden")
REVISIONS = ("revision", "down_revision")

PRONOUNS = re.compile(r"(?:^|[.!?:]\s+|\n\n\s*)(What|Who|Whose|Whom|Of|Where|Which)\b")


def main() -> int:
    """Prints every finding as `file:line: message`, and those of the structure."""
    found = [*findings(), *structure.findings()]
    print("\n".join(found))
    return 1 if found else 0


def findings() -> list[str]:
    """Every finding once."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    migrations = sorted((ROOT / "libs/store/migrations/versions").glob("*.py"))
    return [*dict.fromkeys(line for path in paths for line in _check(path)), *_breaks(migrations)]


def _breaks(migrations: Sequence[Path]) -> Iterator[str]:
    """Two branches that each add a migration merge without a conflict, and no database starts with the result."""
    before: str | None = None
    for path in migrations:
        own, parent = (re.search(rf'^{name} = "?(\w+)"?$', path.read_text(), re.M) for name in REVISIONS)
        assert own and parent, f"{path}: a migration has {' and '.join(REVISIONS)}"
        if not path.name.startswith(own[1] + "_"):
            yield f"{path.relative_to(ROOT)}: its revision is {own[1]}: name the file after it"
        if before is not None and parent[1] != before:
            found = f"it follows {parent[1]}, and the file before it is {before}"
            yield f"{path.relative_to(ROOT)}: {found}: number it anew"
        before = own[1]


def _check(path: Path) -> Iterator[str]:
    # The links below leyden/ lead to folders that are checked by their own names.
    if path.resolve() != path:
        return
    for node in ast.walk(ast.parse(path.read_text())):
        where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
        for begin in PRONOUNS.findall(_docstring(node)):
            yield f"{where}: a sentence begins with {begin!r}: begin with the thing that acts"


def _docstring(node: ast.AST) -> str:
    """A string on a line of its own: the docstring of a module, a class, a function, or of the field above it."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return node.value.value
    return ""


if __name__ == "__main__":
    sys.exit(main())
