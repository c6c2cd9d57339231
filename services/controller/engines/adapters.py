"""Delivers LoRA adapters to engines that several runs share: each run's target is an adapter beside the base model.

A new version is a new adapter under a new name: nothing pauses, and calls in flight end on the version that they began
with.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from pathlib import Path

import httpx

from leyden.libs.contracts.ids import parse_weight_version, weight_version
from leyden.libs.contracts.states import EngineState
from leyden.libs.contracts.weights import ADAPTER_FOLDER
from leyden.libs.faults import fault_point
from leyden.libs.store.engines import Adapter, EngineStatus, serving_engines
from leyden.libs.telemetry import RateLimitedLogger, logger
from leyden.services.controller.engines.client import EngineClient, EngineRefused
from leyden.services.controller.engines.files import WeightsLost
from leyden.services.controller.engines.members import UPDATE_SECONDS, UPDATES, FleetMember, Members, served_by
from leyden.services.controller.engines.targets import TargetVersion

limited_log = RateLimitedLogger(logger())

_PARTLY_LOADED = "incomplete unload"
"""SGLang's words once a load or an unload failed on some of its ranks: it wants the adapter unloaded first."""


class Adapters:
    """Every run has a target. Engines are left alone before the first `retain_targets`, when targets are complete."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._is_assigned = False

    def set_target(self, target: TargetVersion) -> None:
        """The target's run is served beside the others."""
        self._members.targets = {**self._members.targets, target.run_id: target}
        self._members.wake()

    def retain_targets(self, run_ids: Collection[str]) -> None:
        """Forgets the targets of other runs, whose adapters the engines may free."""
        self._members.targets = {run_id: one for run_id, one in self._members.targets.items() if run_id in run_ids}
        if not self._is_assigned:
            self._is_assigned = True
            self._members.wake()

    async def reconcile(self, member: FleetMember) -> None:
        """Loads the adapters of targets that an engine lacks.

        Raises: httpx.HTTPError, ValueError: it does not answer as an engine
        """
        if member.recent is None:
            # Before this poll stores another status.
            member.recent = await self._served_by_base(member.client.url)
        await member.resume_once()
        if self._is_assigned:
            await self._share(member)

    async def _share(self, member: FleetMember) -> None:
        """Loads the adapters of the targets, stores which runs the engine serves, and frees the adapters of older ones.

        The version before a target stays: a gateway may send calls to it until it reads of the new one.
        """
        loaded, served, troubles = await member.client.adapters(), list[Adapter](), list[str]()
        member.away_since = None
        member.offers = {run_id: offer for run_id, offer in member.offers.items() if run_id in self._members.targets}
        last, recent = member.recent or {}, dict[str, tuple[str | None, ...]]()
        for run_id, target in list(self._members.targets.items()):
            name, before = _adapter_of(target), last.get(run_id) or _adapters_of(run_id, loaded)
            recent[run_id] = before
            is_loaded = name is None or name in loaded
            if is_loaded and member.has_compared(target):
                member.offers.pop(run_id, None)
            elif member.offer(target).is_due(name if is_loaded else None):
                await self._offer_adapter(member, target, name, is_loaded=is_loaded)
            if (offer := member.offers.get(run_id)) is not None:
                troubles.append(offer.trouble(0) or "")
                served += self._stillserved_by(member, target, before[:1], loaded)
                continue
            recent[run_id] = (name, *(one for one in before if one != name))[:2]
            served.append(Adapter(run_id, target.version, name))
        detail = "; ".join(troubles) or None
        status = EngineStatus(member.client.url, EngineState.SERVING, detail=detail, adapters=tuple(served))
        await self._members.store(member, status)
        member.recent = recent
        await self._free_adapters(member, loaded.difference(*recent.values()))

    async def _served_by_base(self, url: str) -> dict[str, tuple[str | None, ...]]:
        """Returns the runs that an earlier controller served with the engine's base model: no adapter names them."""
        async with self._members.database.read() as session:
            rows = await serving_engines(session)
        return {row.run_id: (None,) for row in rows if row.url == url and row.is_shared and row.adapter is None}

    def _stillserved_by(
        self, member: FleetMember, target: TargetVersion, last: Sequence[str | None], loaded: Collection[str]
    ) -> list[Adapter]:
        """Returns the version that an engine goes on serving that failed to load the target.

        None where another engine serves the target, whose run an old version would hold back; and none that is newer,
        as before an evaluation of an older version.

        Args: last: the adapter that the run was last served with; loaded: what the engine has
        """
        wanted = target.run_id, target.version
        if any(wanted in served_by(status) for status in self._members.serving(besides=member)):
            return []
        found = [(parse_weight_version(name)[1] if name else 0, name) for name in last if not name or name in loaded]
        return [Adapter(target.run_id, version, name) for version, name in found if version < target.version]

    async def _free_adapters(self, member: FleetMember, names: Collection[str]) -> None:
        """Unloads adapters; an engine that does not answer in time frees them once their calls have ended.

        It answers no other request of this kind meanwhile, so that a request that is repeated would only wait there.
        """
        now = time.monotonic()
        member.freeing = {name: at for name, at in member.freeing.items() if name in names and at > now}
        for name in sorted(set(names) - member.freeing.keys()):
            try:
                await member.client.unload_adapter(name)
            except (EngineRefused, httpx.HTTPError) as error:
                limited_log.warning(
                    "adapter not unloaded",
                    url=member.client.url,
                    adapter=name,
                    cause=str(error) or type(error).__name__,
                )
                if isinstance(error, httpx.TimeoutException):
                    member.freeing[name] = time.monotonic() + self._members.settings.engine_refusal_seconds
                    return

    async def _offer_adapter(
        self, member: FleetMember, target: TargetVersion, name: str | None, *, is_loaded: bool
    ) -> None:
        """Loads the target's adapter and compares the engine with the trainer, or notes in its offer why it failed.

        Args: name: None for the base model
        """
        offer = member.offer(target)
        left: str | None = None
        try:
            if name is not None and not is_loaded:
                member.compared.pop(target.run_id, None)
                await self._load_adapter(member.client, target, name)
            if (problem := await self._members.compare(member, target, name)) is not None:
                left = None if name is None else await _unload_wrong(member.client, name)
                raise EngineRefused(problem)
            del member.offers[target.run_id]
        except (WeightsLost, OSError) as error:
            offer.wait_for_files(f"{target.label}: {error}"[:500])
        except (EngineRefused, httpx.TimeoutException) as error:
            UPDATES.labels("refused" if isinstance(error, EngineRefused) else "failed").inc()
            # SGLang loads nothing while an adapter that it frees has calls in flight, and is asked again at once.
            is_freeing = isinstance(error, httpx.TimeoutException) and bool(member.freeing)
            pause_seconds = 0.0 if is_freeing else self._members.settings.engine_refusal_seconds
            offer.fail(f"{target.label}: {error or type(error).__name__}"[:500], pause_seconds, left)

    async def _load_adapter(self, client: EngineClient, target: TargetVersion, name: str) -> None:
        await self._members.weights.check(target)
        fetched = await client.fetched(target, adapter=True)
        try:
            with UPDATE_SECONDS.time():
                await client.load_adapter(name, str(Path(fetched.path) / ADAPTER_FOLDER))
        except EngineRefused as error:
            if _PARTLY_LOADED in str(error):
                await client.unload_adapter(name)
            raise
        fault_point("controller.adapter_loaded")
        if name not in await client.adapters():
            raise EngineRefused("it answered that it loaded the adapter, and does not list it")
        UPDATES.labels("done").inc()


def _adapter_of(target: TargetVersion) -> str | None:
    """The name of the target's adapter; None for version 0, unless it is the run's own: a copy of another run's."""
    return weight_version(target.run_id, target.version) if target.is_own else None


def _adapters_of(run_id: str, loaded: Collection[str]) -> tuple[str, ...]:
    """The run's loaded adapters, the newest first."""
    versions = [name.removeprefix(f"{run_id}:") for name in loaded if name.startswith(f"{run_id}:")]
    numbers = sorted((int(version) for version in versions if version.isdecimal()), reverse=True)
    return tuple(weight_version(run_id, number) for number in numbers)


async def _unload_wrong(client: EngineClient, name: str) -> str | None:
    """Unloads an adapter that computes something else. Returns its name if the engine keeps it."""
    try:
        await client.unload_adapter(name)
    except (EngineRefused, httpx.HTTPError):
        return name
    return None
