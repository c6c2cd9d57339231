"""The check of folders and imports counts floors and finds circles."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.checks import structure

PART = structure.Part("libs/one", rooms=1, arrows=1, files=1, floors=1, circles=0, in_circles=())


def test_a_circle_is_one_floor() -> None:
    imports = {"app": {"a"}, "a": {"b"}, "b": {"a", "leaf"}, "leaf": set[str]()}
    assert structure._floors(imports) == 3
    assert [sorted(group) for group in structure._groups(imports) if len(group) > 1] == [["a", "b"]]


@pytest.mark.parametrize(
    ("part", "found"),
    [
        (PART, []),
        (replace(PART, files=21), ["libs/one: 21 files, at most 20 are allowed"]),
        (replace(PART, floors=11), ["libs/one: 11 floors, at most 10 are allowed"]),
        (replace(PART, circles=1, in_circles=("a", "b")), ["libs/one: 1 circles, at most 0 are allowed: a, b"]),
    ],
)
def test_limits(part: structure.Part, found: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structure, "parts", lambda: [part])
    assert structure.findings() == found


def test_imports_for_types_count() -> None:
    sandbox = "leyden.libs.sandbox"
    # This import stands below TYPE_CHECKING alone.
    assert structure._graph().direct_import_exists(importer=f"{sandbox}.supervisors", imported=f"{sandbox}.supervisor")
