"""SGLang's own request and response types, read from its wheel without installing it or importing torch.

`make setup` downloads the wheel into `.cache/sglang`; the modules taken from it need nothing but msgspec.
"""

from __future__ import annotations

import sys
import types
import zipfile
from functools import cache
from pathlib import Path

CACHE = Path(__file__).parents[2] / ".cache" / "sglang"


@cache
def sglang_module(path: str) -> types.ModuleType:
    """A module of SGLang by its path in the wheel, such as `sglang/api/v1/api_types.py`.

    Raises:  FileNotFoundError: the wheel is not there; the message says how to get it
    """
    wheels = sorted(CACHE.glob("sglang-*.whl"))
    if not wheels:
        raise FileNotFoundError(f"no SGLang wheel in {CACHE}: run `make setup`, which downloads it")
    name = "from_wheel." + path.removesuffix(".py").replace("/", ".")
    module = types.ModuleType(name)
    # msgspec resolves annotations through the module's entry here.
    sys.modules[name] = module
    with zipfile.ZipFile(wheels[-1]) as wheel:
        exec(compile(wheel.read(path), path, "exec"), module.__dict__)
    return module


def api_types() -> types.ModuleType:
    """`GenerateRequest`, `GenerateResponse` and the rest of SGLang's HTTP schema."""
    return sglang_module("sglang/api/v1/api_types.py")
