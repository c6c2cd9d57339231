"""Errors that callers tell apart.

EngineError          base
├─ BadRequest        the client's request is wrong: HTTP 400 with the message
├─ WeightsRefused    weights could not be loaded; the engine serves the old ones on
└─ UnsupportedModel  the folder holds a model this engine cannot run
"""

from __future__ import annotations

from leyden.libs.service.errors import Misconfigured


class EngineError(Exception):
    """Base of the engine's errors."""


class BadRequest(EngineError):
    """A request that cannot be served as written; the message names the remedy."""


class WeightsRefused(EngineError, Misconfigured):
    """Weights that are missing, misshapen or not finite; nothing was changed."""


class UnsupportedModel(EngineError, Misconfigured):
    """A model that this engine cannot run: it runs dense Llama and Qwen2 style decoders."""
