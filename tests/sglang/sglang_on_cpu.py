"""Lets SGLang's server run on a machine without a GPU, on wheels from PyPI.

`make` copies this module into the environment of `tests/sglang/requirements.txt`, together with a `.pth` file that
imports it when an interpreter starts: SGLang's scheduler and detokenizer are interpreters of their own. Each gap is
filled when the package concerned is imported, so that other programs of the environment lose no time.
"""

from __future__ import annotations

import functools
import sys
import types
from importlib.abc import MetaPathFinder
from importlib.metadata import version
from typing import Any

_PINNING = ("arange", "empty", "empty_like", "full", "ones", "rand", "randn", "tensor", "zeros", "zeros_like")
_alive: list[Any] = []


def _prepare_torchvision() -> None:
    """PyPI's torchvision needs CUDA for its operators; beside a CPU torch their schemas are missing."""
    if version("torchvision").endswith("+cpu"):
        return
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    # The schemas go with their library.
    _alive.append(library)


def _prepare_sglang() -> None:
    """SGLang pins memory for GPUs, and imports one function of vllm that it does not call on a CPU."""
    import torch

    for name in _PINNING:
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
    operators = types.ModuleType("vllm._custom_ops")
    operators.rotary_embedding = None  # type: ignore[attr-defined]
    package = types.ModuleType("vllm")
    package.__path__ = []
    package._custom_ops = operators  # type: ignore[attr-defined]
    sys.modules |= {"vllm": package, "vllm._custom_ops": operators}


def _without_pinning(function: Any) -> Any:
    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        options.pop("pin_memory", None)
        return function(*arguments, **options)

    return call


class _Finder(MetaPathFinder):
    """Finds nothing; prepares for a package when it is imported for the first time."""

    preparations = {"torchvision": _prepare_torchvision, "sglang": _prepare_sglang}  # noqa: RUF012

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        prepare = self.preparations.pop(fullname, None)
        if prepare is not None:
            prepare()


sys.meta_path.insert(0, _Finder())
