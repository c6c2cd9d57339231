"""The engines that exist. Settings list them today; a Kubernetes cluster can list them as EndpointSlices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class EngineDiscovery(Protocol):
    async def urls(self) -> frozenset[str]:
        """Returns the URL of every engine that exists now, ready or not; the fleet asks again at every poll.

        Raises: OSError: nobody can say now; the fleet keeps the engines that it has
        """


@dataclass(frozen=True)
class StaticEngines:
    """The engines that the settings name."""

    found: frozenset[str]

    async def urls(self) -> frozenset[str]:
        return self.found
