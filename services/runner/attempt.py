"""One attempt from lease to verdict: a fresh folder, an environment, an agent, how it ended."""

from __future__ import annotations

import asyncio
import os
import pwd
import time
from dataclasses import dataclass, replace

from libs.capability import KeyRing, sign
from libs.contracts.capability import Capability, Scope
from libs.contracts.states import OutcomeKind
from libs.queue.leases import Lease, Outcome
from services.runner.doors import DoorWatch
from services.runner.environment import Doors, Identity, environment_block
from services.runner.folder import AttemptFolder, Folders
from services.runner.process import Command, KeeperLost, Processes
from services.runner.settings import Settings
from services.runner.verdict import judge


@dataclass(frozen=True)
class Workplace:
    """What every attempt of this runner shares."""

    settings: Settings
    keys: KeyRing
    folders: Folders
    processes: Processes
    doors: DoorWatch
    user: tuple[int, int] | None


def user_ids(name: str | None) -> tuple[int, int] | None:
    """User and group id of the user that agents become; None when they stay the runner's.

    Raises: ValueError: there is no such user, or the runner may not become it.
    """
    if name is None:
        return None
    try:
        entry = pwd.getpwnam(name)
    except KeyError as error:
        raise ValueError(f"RUNNER_AGENT_USER names {name!r}, a user that this machine does not have") from error
    if os.geteuid() != 0:
        raise ValueError("RUNNER_AGENT_USER needs a runner that runs as root: leave it unset to run agents as yourself")
    return entry.pw_uid, entry.pw_gid


async def execute(lease: Lease, place: Workplace) -> Outcome:
    """Runs the agent of a lease to its end. Cancelling kills it and leaves nothing.

    What our own side breaks is `infra_error`: a folder that cannot be made, a keeper that is lost, a door that did not
    answer while the agent ran and failed.
    """
    began = time.monotonic()
    try:
        folder = await asyncio.to_thread(place.folders.make, lease.rollout_id, lease.task, lease.agent.directory)
    except OSError as error:
        return Outcome(OutcomeKind.INFRA_ERROR, detail=f"the working folder could not be made: {error}")
    try:
        ended = await place.processes.run(_command(lease, place, folder))
        return await _blame(judge(ended), began, place.doors)
    except (KeeperLost, OSError) as error:
        return Outcome(OutcomeKind.INFRA_ERROR, detail=str(error))
    finally:
        await asyncio.shield(asyncio.to_thread(place.folders.remove, folder))


async def _blame(outcome: Outcome, began: float, doors: DoorWatch) -> Outcome:
    """The outcome, or `infra_error` when an agent failed while one of its doors was shut."""
    if outcome.kind not in {OutcomeKind.AGENT_ERROR, OutcomeKind.TIMEOUT}:
        return outcome
    await doors.look()
    shut = doors.shut_since(began)
    if shut is None:
        return outcome
    detail = f"{shut} did not answer while the agent ran ({outcome.kind}: {outcome.detail})"
    return replace(outcome, kind=OutcomeKind.INFRA_ERROR, detail=detail)


def _command(lease: Lease, place: Workplace, folder: AttemptFolder) -> Command:
    settings, limits = place.settings, lease.runner
    first, *rest = lease.agent.command
    return Command(
        argv=[settings.python if first == "{python}" else first, *rest],
        environment=_environment(lease, place, folder),
        folder=folder.work,
        timeout_seconds=limits.timeout_seconds,
        grace_seconds=settings.grace_seconds,
        output_bytes=limits.output_bytes,
        memory_bytes=limits.memory_bytes,
        cpu_seconds=limits.cpu_seconds,
        open_files=settings.max_open_files,
        processes=settings.max_processes,
        user=place.user,
    )


def _environment(lease: Lease, place: Workplace, folder: AttemptFolder) -> dict[str, str]:
    settings = place.settings
    return environment_block(
        Identity(lease.run_id, lease.rollout_id, lease.attempt, lease.trace_parent),
        Doors(settings.gateway_url, settings.collector_url, _key(lease, place), lease.runner.grant_reward),
        lease.task,
        folder=folder.work,
        task_file=folder.task_file,
        scratch=folder.scratch,
        path=settings.agent_path,
        extra=lease.agent.environment,
    )


def _key(lease: Lease, place: Workplace) -> str:
    scopes = {Scope.MODEL, Scope.TELEMETRY} | ({Scope.REWARD} if lease.runner.grant_reward else set())
    lifetime = lease.runner.timeout_seconds + place.settings.grace_seconds + place.settings.key_seconds
    capability = Capability(
        run_id=lease.run_id,
        rollout_id=lease.rollout_id,
        attempt=lease.attempt,
        scopes=frozenset(scopes),
        expires_at=int(time.time() + lifetime),
    )
    return sign(place.keys, capability)
