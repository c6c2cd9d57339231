"""SGLang's own request and response types, read from its wheel without installing it or importing torch.

`make setup` downloads the wheel into `.cache/sglang`; the modules taken from it need nothing but msgspec.
"""

from __future__ import annotations

import ast
import sys
import types
import typing
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import pydantic

CACHE = Path(__file__).parents[2] / ".cache" / "sglang"
EMBEDDING_TYPES = (
    "MultimodalEmbeddingInput",
    "PromptTokensDetails",
    "CompletionTokensDetails",
    "UsageInfo",
    "EmbeddingRequest",
    "EmbeddingObject",
    "EmbeddingResponse",
)


@cache
def sglang_module(path: str) -> types.ModuleType:
    """A module of SGLang by its path in the wheel, such as `sglang/api/v1/api_types.py`.

    Raises:  FileNotFoundError: the wheel is not there; the message says how to get it
    """
    name = "from_wheel." + path.removesuffix(".py").replace("/", ".")
    module = types.ModuleType(name)
    # msgspec resolves annotations through the module's entry here.
    sys.modules[name] = module
    exec(compile(source_of(path), path, "exec"), module.__dict__)
    return module


def source_of(path: str) -> bytes:
    """A file of SGLang's wheel.

    Raises:  FileNotFoundError: the wheel is not there; the message says how to get it
    """
    wheels = sorted(CACHE.glob("sglang-*.whl"))
    if not wheels:
        raise FileNotFoundError(f"no SGLang wheel in {CACHE}: run `make setup`, which downloads it")
    with zipfile.ZipFile(wheels[-1]) as wheel:
        return wheel.read(path)


def embedding_types() -> dict[str, Any]:
    """`EmbeddingRequest` and `EmbeddingResponse` of SGLang's `/v1/embeddings`, without what their module imports."""
    path = "sglang/srt/entrypoints/openai/protocol.py"
    names = {"DEFAULT_MODEL_NAME", "EmbeddingInput", *EMBEDDING_TYPES}
    parsed = ast.parse(source_of(path))
    found = [node for node in parsed.body if isinstance(node, ast.ClassDef | ast.Assign) and _name(node) in names]
    pydantic_names = {name: getattr(pydantic, name) for name in ("BaseModel", "model_serializer")}
    space: dict[str, Any] = {**pydantic_names, **vars(typing), "__name__": path}
    # Without this file's own `annotations`: SGLang's types read theirs at once.
    exec(compile(ast.Module(found, type_ignores=[]), path, "exec", dont_inherit=True), space)
    return {name: space[name] for name in EMBEDDING_TYPES}


def _name(node: ast.ClassDef | ast.Assign) -> str:
    return node.name if isinstance(node, ast.ClassDef) else ast.unparse(node.targets[0])


def api_types() -> types.ModuleType:
    """`GenerateRequest`, `GenerateResponse` and the rest of SGLang's HTTP schema."""
    return sglang_module("sglang/api/v1/api_types.py")
