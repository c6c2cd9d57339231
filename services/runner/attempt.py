"""One attempt from lease to outcome: its specification, its execution by a backend, and whose failure a failure is."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from leyden.libs.attempts import (
    EndpointMonitor,
    Endpoints,
    attempt_key,
    attribute_failure,
    environment_block,
    secrets_block,
)
from leyden.libs.capability import KeyRing
from leyden.libs.contracts.placeholders import MissingField, with_task
from leyden.libs.contracts.states import OutcomeKind
from leyden.libs.queue.leases import Lease, Outcome
from leyden.services.runner.backends.base import AttemptSpec, Backend, BackendError
from leyden.services.runner.outcome import outcome_of
from leyden.services.runner.settings import Settings

MODEL_KEY = "OPENAI_API_KEY"
KEY_REFUSED = (
    "the gateway refuses the attempt's key: give runner, gateway and collector the same LEYDEN_CAPABILITY_KEYS_FILE"
)


@dataclass(frozen=True)
class RunnerContext:
    """Everything that the attempts of one runner share.

    Args: backends: by the `type` of a run's `runner`.
    """

    settings: Settings
    keys: KeyRing
    backends: Mapping[str, Backend]
    endpoints: EndpointMonitor


async def execute(lease: Lease, context: RunnerContext) -> Outcome:
    """Runs the agent of a lease to its end. Cancelling kills it and leaves nothing.

    `infra_error`: the task lacks a field that the agent's command names, the backend failed, an endpoint of the
    platform was down while the agent ran and failed, or may have been before this runner watched, or the gateway
    refuses the attempt's key.
    """
    started = time.monotonic() if lease.began_at is None else lease.began_at
    backend = context.backends.get(lease.runner.type)
    if backend is None:
        return Outcome(OutcomeKind.INFRA_ERROR, detail=_no_backend(lease.runner.type, context.backends))
    try:
        spec = attempt_spec(lease, context)
        ended = await backend.run(spec)
    except MissingField as error:
        return Outcome(OutcomeKind.INFRA_ERROR, detail=f"task {lease.task_number} of {lease.dataset_id}: {error}")
    except BackendError as error:
        return Outcome(OutcomeKind.INFRA_ERROR, detail=str(error))
    outcome = outcome_of(ended, stdout_reward=lease.runner.stdout_reward)
    # An agent whose calls got 401 may well print a reward of 0.
    if await context.endpoints.refuses_key(spec.environment["OPENAI_BASE_URL"] + "/models", spec.secrets[MODEL_KEY]):
        return replace(outcome, kind=OutcomeKind.INFRA_ERROR, reward=None, detail=KEY_REFUSED)
    return await attribute_failure(outcome, started, context.endpoints)


def _no_backend(asked: str, offered: Iterable[str]) -> str:
    return f"the run asks for runner.type {asked!r}, and this platform's runners execute {', '.join(offered)}"


def attempt_spec(lease: Lease, context: RunnerContext) -> AttemptSpec:
    """The attempt as a backend executes it.

    Raises: MissingField: the agent's command or environment names a field that the task lacks
    """
    settings = context.settings
    endpoints = Endpoints(
        settings.gateway_url,
        settings.collector_url,
        # A Job may wait for quota so long, and its pod for a node and its image.
        attempt_key(
            context.keys, lease, start_seconds=2 * settings.start_seconds, grace_seconds=settings.grace_seconds
        ),
        lease.runner.grant_reward,
        settings.collector_grpc_url,
    )
    return AttemptSpec(
        name=f"{lease.rollout_id}.{lease.attempt}",
        command=[with_task(word, lease.task) for word in lease.agent.command],
        environment=environment_block(lease, endpoints),
        secrets=secrets_block(lease, endpoints),
        task=lease.task,
        directory=lease.agent.directory,
        limits=lease.runner,
        labels={"run": lease.run_id, "rollout": lease.rollout_id, "attempt": str(lease.attempt)},
        adopted=lease.adopted,
        task_file=lease.agent.task_file,
        task_on_stdin=lease.agent.task == "stdin",
        artifacts=lease.agent.artifacts,
    )
