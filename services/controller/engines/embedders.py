"""Follows engines that embed: they get no weights, and gateways send them the texts of runs that name their pool."""

from __future__ import annotations

from collections.abc import Collection

from leyden.libs.contracts.states import EngineState
from leyden.libs.store.engines import EngineStatus
from leyden.services.controller.engines.members import FleetMember, Members
from leyden.services.controller.engines.targets import TargetVersion

NO_EMBEDDINGS = "its model samples text and makes no embeddings: start SGLang with --is-embedding and such a model"


class Embedders:
    """No run has these engines; one serves while it says that its model embeds."""

    def __init__(self, members: Members) -> None:
        self._members = members

    def set_target(self, target: TargetVersion) -> None:
        """Nothing: no run has the pool."""

    def retain_targets(self, run_ids: Collection[str]) -> None:
        """Nothing: no run has the pool."""

    async def reconcile(self, member: FleetMember) -> None:
        """Asks an engine whether its model embeds, and stores its status.

        Raises: httpx.HTTPError, ValueError: it does not answer as an engine
        """
        embeds = await member.client.embeds()
        member.away_since = None
        state, detail = (EngineState.SERVING, None) if embeds else (EngineState.UNREACHABLE, NO_EMBEDDINGS)
        await self._members.store(member, EngineStatus(member.client.url, state, detail=detail))
