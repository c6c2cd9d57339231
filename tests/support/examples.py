"""Modules of examples, imported the way their agents do: from their own folder."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest


def example_modules(monkeypatch: pytest.MonkeyPatch, folder: Path, *names: str) -> list[ModuleType]:
    """Imports modules of an example for one test: those of another example may have the same names."""
    monkeypatch.syspath_prepend(str(folder))
    for path in folder.glob("*.py"):
        # Set before it goes, so that the test's end restores the state of before.
        monkeypatch.setitem(sys.modules, path.stem, sys)
        del sys.modules[path.stem]
    return [importlib.import_module(name) for name in names]
