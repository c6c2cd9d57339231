"""The engines that exist: those that the settings name, or those that a Kubernetes cluster lists as EndpointSlices."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class FoundEngines(NamedTuple):
    """Engines by URL, ready or not; `draining` ones end, and only answer the requests that they have."""

    urls: frozenset[str]
    draining: frozenset[str] = frozenset()


class EngineDiscovery(Protocol):
    async def find(self) -> FoundEngines:
        """Returns the engines that exist now; the fleet asks again at every poll.

        Raises: OSError: nobody can say now; the fleet keeps the engines that it has
        """


class StaticEngines(NamedTuple):
    """The engines that the settings name."""

    urls: frozenset[str]

    async def find(self) -> FoundEngines:
        return FoundEngines(self.urls)
