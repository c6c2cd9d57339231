"""Sampling at the engines: which engine answers a call, SGLang's `/generate`, and its answers as checked tokens.

`EnginePool` knows the engines, `EngineClient` asks one of them, `HoldTimeout` bounds how long a call may wait.
"""

from leyden.services.gateway.engine.client import EngineClient
from leyden.services.gateway.engine.pool import Endpoint, EnginePool, HoldTimeout
from leyden.services.gateway.engine.sglang import EngineLost, EngineRequest, SampleBuilder

__all__ = ["Endpoint", "EngineClient", "EngineLost", "EnginePool", "EngineRequest", "HoldTimeout", "SampleBuilder"]
