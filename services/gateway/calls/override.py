"""Sampling parameters of a call after its run has decided, and those that its agent asked for instead."""

from __future__ import annotations

from dataclasses import asdict, replace

from leyden.libs.contracts.config.override import Override
from leyden.libs.contracts.conversation import Json
from leyden.services.gateway.calls.context import Sampling

PLAIN = asdict(Sampling())
"""Parameters of a request that sets none."""


def overridden(asked: Sampling, override: Override) -> tuple[Sampling, Json | None]:
    """Returns the parameters to sample with, and the asked values that they replace; None where nothing changes.

    >>> overridden(Sampling(temperature=0.0, top_p=0.9), Override(temperature=1.0))[1]
    {'top_p': 0.9, 'temperature': 0.0}
    """
    decided = {name: PLAIN[name] for name in override.dropped}
    if override.temperature is not None:
        decided["temperature"] = override.temperature
    values = asdict(asked)
    replaced = {name: values[name] for name, value in decided.items() if values[name] not in (value, PLAIN[name])}
    return replace(asked, **decided), replaced or None
