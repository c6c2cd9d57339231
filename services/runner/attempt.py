"""One attempt from lease to verdict: a fresh folder, an environment, an agent, how it ended."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace

from leyden.libs.capability import KeyRing, sign
from leyden.libs.contracts.capability import Capability, Scope
from leyden.libs.contracts.states import OutcomeKind
from leyden.libs.queue.leases import Lease, Outcome
from leyden.libs.service.errors import Misconfigured
from leyden.services.runner.cell import REMEDIES, Cells, Tenant
from leyden.services.runner.doors import DoorWatch
from leyden.services.runner.environment import Doors, Identity, environment_block
from leyden.services.runner.folder import AttemptFolder, Folders
from leyden.services.runner.process import Command, Ended, KeeperLost, Processes
from leyden.services.runner.settings import Settings
from leyden.services.runner.verdict import judge

PROOF_SECONDS = 60.0


@dataclass(frozen=True)
class Workplace:
    """What every attempt of this runner shares."""

    settings: Settings
    keys: KeyRing
    folders: Folders
    processes: Processes
    doors: DoorWatch
    cells: Cells


async def execute(lease: Lease, place: Workplace) -> Outcome:
    """Runs the agent of a lease to its end. Cancelling kills it and leaves nothing.

    What our own side breaks is `infra_error`: a folder that cannot be made, a keeper that is lost, a door that did not
    answer while the agent ran and failed.
    """
    began = time.monotonic()
    try:
        with place.cells.lend() as tenant:
            ended = await _run(lease, place, tenant)
        return await _blame(judge(ended), began, place.doors)
    except (KeeperLost, OSError) as error:
        return Outcome(OutcomeKind.INFRA_ERROR, detail=str(error))


async def _run(lease: Lease, place: Workplace, tenant: Tenant) -> Ended:
    try:
        folder = await asyncio.to_thread(_make_folder, lease, place, tenant)
    except OSError as error:
        raise OSError(f"the working folder could not be made: {error}") from error
    try:
        return await place.processes.run(await asyncio.to_thread(_command, lease, place, folder, tenant))
    finally:
        await asyncio.shield(asyncio.to_thread(place.folders.remove, folder))


def _make_folder(lease: Lease, place: Workplace, tenant: Tenant) -> AttemptFolder:
    place.cells.check_directory(lease.agent.directory)
    return place.folders.make(lease.rollout_id, lease.task, lease.agent.directory, tenant.user)


async def prove(place: Workplace) -> None:
    """Starts what `{python}` stands for once, as agents are started.

    Raises: Misconfigured: it does not; the message says what to do
    """
    argv = [place.settings.python, "-I", "-S", "-c", ""]
    try:
        with place.cells.lend() as tenant:
            folder = await asyncio.to_thread(place.folders.make, "first", {}, None, tenant.user)
            walls = await asyncio.to_thread(place.cells.walls, argv, folder, tenant)
            ended = await place.processes.run(
                Command(argv, {}, folder.work, PROOF_SECONDS, 1.0, 1000, walls=walls, lock=tenant.lock)
            )
            await asyncio.to_thread(place.folders.remove, folder)
    except (KeeperLost, OSError) as error:
        raise Misconfigured(f"no agent can start here: {error}") from error
    if ended.exit_code != 0:
        why = ended.start_error or ended.stderr.decode(errors="replace") or "it did not end in time"
        raise Misconfigured(
            f"agents cannot start RUNNER_PYTHON, {argv[0]} ({why}): {REMEDIES}; or name another interpreter there"
        )


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


def _command(lease: Lease, place: Workplace, folder: AttemptFolder, tenant: Tenant) -> Command:
    settings, limits = place.settings, lease.runner
    first, *rest = lease.agent.command
    argv = [settings.python if first == "{python}" else first, *rest]
    return Command(
        argv=argv,
        environment=_environment(lease, place, folder, tenant),
        folder=folder.work,
        timeout_seconds=limits.timeout_seconds,
        grace_seconds=settings.grace_seconds,
        output_bytes=limits.output_bytes,
        memory_bytes=limits.memory_bytes,
        cpu_seconds=limits.cpu_seconds,
        open_files=settings.max_open_files,
        processes=settings.max_processes if tenant.user is not None else None,
        file_bytes=settings.max_file_bytes,
        walls=place.cells.walls(argv, folder, tenant),
        lock=tenant.lock,
    )


def _user_names(tenant: Tenant) -> dict[str, str]:
    """For programs that ask for their user's name, which a user of an attempt's own has not."""
    return {"USER": "agent", "LOGNAME": "agent"} if tenant.lock is not None else {}


def _environment(lease: Lease, place: Workplace, folder: AttemptFolder, tenant: Tenant) -> dict[str, str]:
    settings = place.settings
    return environment_block(
        Identity(lease.run_id, lease.rollout_id, lease.attempt, lease.trace_parent),
        Doors(settings.gateway_url, settings.collector_url, _key(lease, place), lease.runner.grant_reward),
        lease.task,
        folder=folder.work,
        task_file=folder.task_file,
        scratch=folder.scratch,
        path=settings.agent_path,
        extra=_user_names(tenant) | lease.agent.environment,
    )


def _key(lease: Lease, place: Workplace) -> str:
    scopes = {Scope.MODEL, Scope.TELEMETRY} | ({Scope.REWARD} if lease.runner.grant_reward else set())
    lifetime = lease.runner.timeout_seconds + place.settings.grace_seconds + place.settings.key_seconds
    capability = Capability(
        run_id=lease.run_id,
        rollout_id=lease.rollout_id,
        attempt=lease.attempt,
        scopes=frozenset(scopes),
        # By the database's clock, as the lease itself: a runner's own may be wrong.
        expires_at=int(lease.expires_at.timestamp() + lifetime),
    )
    return sign(place.keys, capability)
