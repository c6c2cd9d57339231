"""Delivers weights to engines that runs use in turn: one run's weights are the engine's.

A version changes in three calls: pause (requests in flight return to the engine's queue, new ones wait), load and
continue. Agents never see it: the gateway waits. `/model_info` says which version an engine serves, and its answer to
the version's canary whether it is so.
"""

from __future__ import annotations

import time
from collections.abc import Collection

import httpx

from leyden.libs.contracts.ids import parse_weight_version
from leyden.libs.contracts.states import EngineState
from leyden.libs.faults import fault_point
from leyden.libs.store.engines import EngineStatus, record_swap
from leyden.libs.telemetry import logger
from leyden.services.controller.engines.client import EngineRefused, IncomingWeights
from leyden.services.controller.engines.files import WeightsLost
from leyden.services.controller.engines.members import UPDATE_SECONDS, UPDATES, FleetMember, Members
from leyden.services.controller.engines.network import requested_transfer
from leyden.services.controller.engines.targets import TargetVersion

log = logger()


class Turns:
    """The only target is that of the run whose turn it is; weights come by disk or over the network."""

    def __init__(self, members: Members) -> None:
        self._members = members

    def set_target(self, target: TargetVersion) -> None:
        """The target's run has the engines now."""
        self._members.targets = {target.run_id: target}
        self._members.wake()

    def retain_targets(self, run_ids: Collection[str]) -> None:
        """Nothing: an engine's weights stay until others come."""

    async def reconcile(self, member: FleetMember) -> None:
        """Brings an engine to the target where it serves another version, and compares it with the trainer.

        Raises: httpx.HTTPError, ValueError: it does not answer as an engine
        """
        target = next(iter(self._members.targets.values()), None)
        await member.resume_once()
        label = await member.client.weight_version()
        member.away_since = None
        # A controller that was killed may have left a version that nobody compared.
        given = target or _given(label)
        if given is None or (label == given.label and member.has_compared(given)):
            member.offers.clear()
            await self._members.store(member, _status_of(member.client.url, label))
        elif member.offer(given).is_due(label):
            await self._offer(member, given, label, delivers=target is not None)

    async def _offer(self, member: FleetMember, target: TargetVersion, label: str, *, delivers: bool) -> None:
        """Brings an engine to the target and stores its status: that it serves it, or why it does not.

        Args: label: the weights that it serves; delivers: False only compares it
        """
        offer = member.offer(target)
        try:
            # With the label that it had after a failure it has the weights of then, too.
            if delivers and (label != target.label or label == offer.label):
                fault_point("controller.version_noticed")
                await self._members.weights.check(target)
                label = await self._update(member, target)
            if (problem := await self._members.compare(member, target)) is not None:
                label = await member.client.disown(label)
                raise EngineRefused(f"it was given version {target.version}: {problem}")
            member.offers.clear()
            status = _status_of(member.client.url, label)
        except (WeightsLost, OSError) as error:
            offer.wait_for_files(str(error)[:500])
            status = EngineStatus(member.client.url, EngineState.UNREACHABLE, detail=offer.cause)
        except (EngineRefused, httpx.HTTPError, ValueError, AttributeError) as error:
            UPDATES.labels("refused" if isinstance(error, EngineRefused) else "failed").inc()
            # A failed update may have left it paused.
            member.resumed = False
            offer.fail(str(error)[:500] or type(error).__name__, self._members.settings.engine_refusal_seconds, label)
            detail = offer.trouble(0)
            log.warning("version not loaded", url=member.client.url, version=target.version, cause=detail)
            status = EngineStatus(member.client.url, EngineState.UNREACHABLE, detail=detail)
        await self._members.store(member, status)

    async def _update(self, member: FleetMember, target: TargetVersion) -> str:
        """Loads the target; returns its label, which the engine then serves.

        Raises: EngineRefused: the weights could not be loaded, or the engine said that they were and serves others
        """
        member.compared.clear()
        if self._members.settings.weights == "disk":
            seconds = await self._load(member, await member.client.fetched(target))
        else:
            async with requested_transfer(
                self._members.database, self._members.notifications, member.client, target
            ) as incoming:
                seconds = await self._load(member, target, incoming)
        label = await member.client.weight_version()
        if label != target.label:
            raise EngineRefused(f"it answered that it loaded version {target.version}, and still serves {label!r}")
        UPDATES.labels("done").inc()
        async with self._members.database.session() as session:
            await record_swap(session, target.run_id, target.version, member.client.url, seconds)
        return label

    async def _load(self, member: FleetMember, target: TargetVersion, incoming: IncomingWeights | None = None) -> float:
        """Returns the seconds from pause to continue."""
        # From here on gateways send no new calls to it.
        updating = EngineStatus(member.client.url, EngineState.UPDATING, detail=f"loading {target.version}")
        await self._members.store(member, updating)
        began = time.perf_counter()
        with UPDATE_SECONDS.time():
            await member.client.update(target, incoming)
        return time.perf_counter() - began


def _given(label: str) -> TargetVersion | None:
    """The version that a label names, without its files; None where no run gave it."""
    try:
        return TargetVersion(*parse_weight_version(label), "", "")
    except ValueError:
        return None


def _status_of(url: str, label: str) -> EngineStatus:
    try:
        run_id, version = parse_weight_version(label)
    except ValueError:
        return EngineStatus(url, EngineState.UPDATING, detail=f"serves {label!r}, which no run gave it")
    return EngineStatus(url, EngineState.SERVING, run_id, version)
