"""Engines as the EndpointSlices of a headless Service list them."""

from __future__ import annotations

from leyden.libs.kubernetes.cluster import Cluster, Object, Refused
from leyden.services.controller.engines.discovery import FoundEngines


class KubernetesEngines:
    """An `EngineDiscovery`: the pods of one Service, ready or not; those that end are draining."""

    def __init__(self, cluster: Cluster, service: str) -> None:
        self._cluster = cluster
        self._service = service

    async def find(self) -> FoundEngines:
        try:
            slices = await self._cluster.endpoint_slices(self._service)
        except Refused as error:
            raise OSError(f"EndpointSlices of {self._service}: {error}") from error
        found, draining = (
            frozenset(url for one in slices for url in engine_urls(one, terminating=terminating))
            for terminating in (False, True)
        )
        return FoundEngines(found, draining - found)


def engine_urls(endpoints: Object, *, terminating: bool = False) -> list[str]:
    """Returns the URLs in an EndpointSlice of the pods that end, or of the others: its port `http`, or its only one."""
    ports = {port.get("name"): port["port"] for port in endpoints.get("ports") or []}
    port = ports.get("http") or next(iter(ports.values()), None)
    if port is None:
        return []
    addresses = [
        address
        for one in endpoints.get("endpoints") or []
        if bool(one.get("conditions", {}).get("terminating")) == terminating
        for address in one["addresses"]
    ]
    return [f"http://{f'[{one}]' if ':' in one else one}:{port}" for one in addresses]
