"""Calls a Python function of the operator's own, inside the sandbox: `python -c SOURCE grade.py:score`.

The source of this file is the program, so it imports the standard library alone, and need not be readable there. The
verdict goes to `reward.json`, whatever the function prints.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main() -> None:
    """Reads the document from stdin and writes the verdict."""
    # Now: the function may change the working folder.
    verdict = Path("reward.json").absolute()
    document = json.load(sys.stdin)
    sys.path.insert(0, str(verdict.parent))
    found = function_of(sys.argv[1])(document["task"], document["rollout"])
    verdict.write_text(json.dumps(written(found)))


def function_of(name: str) -> Callable[[Any, Any], object]:
    """Loads `grade.py:score` or `package.module:score`."""
    place, _, function = name.rpartition(":")
    if not place.endswith(".py"):
        return getattr(importlib.import_module(place), function)  # type: ignore[no-any-return]
    path = Path(place).absolute()
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return getattr(module, function)  # type: ignore[no-any-return]


def written(found: object) -> object:
    """The verdict as JSON has it: numbers of libraries and booleans become floats.

    Raises: TypeError: it is neither a number, nor None, nor a dictionary
    """
    if isinstance(found, dict):
        return {**found, "reward": written(found["reward"])} if found.get("reward") is not None else found
    return found if found is None else float(found)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
