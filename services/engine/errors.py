"""Errors that callers distinguish.

EngineError          base
├─ BadRequest        the client's request is wrong: HTTP 400 with the message
├─ WeightsRefused    weights could not be loaded; the engine continues with the old ones
└─ UnsupportedModel  the engine cannot run the model in the folder
"""

from __future__ import annotations

from leyden.libs.service.errors import Misconfigured


class EngineError(Exception):
    """Base of the engine's errors."""


class BadRequest(EngineError):
    """The request is invalid or unsupported; the message names the remedy."""


class WeightsRefused(EngineError, Misconfigured):
    """The weights are missing, misshapen or not finite; the engine continues with the old ones."""


class UnsupportedModel(EngineError, Misconfigured):
    """The engine cannot run the model: it supports dense Llama and Qwen2 style decoders."""
