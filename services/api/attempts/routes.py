"""Routes by which clients run the agents of a run themselves."""

from __future__ import annotations

import secrets
import time

from fastapi import APIRouter, Request, Response

from leyden.libs.contracts.api.attempts import EndedAttempt, EndRequest, Heartbeat, LeasedAttempt, LeaseRequest
from leyden.libs.faults import fault_point
from leyden.libs.queue import external
from leyden.libs.queue.external import EXTERNAL, AttemptStatus, Demand
from leyden.libs.queue.leases import Lease
from leyden.libs.queue.notifications import Topic
from leyden.libs.service import JsonResponse, Problem
from leyden.libs.store.attempts import AttemptKey
from leyden.services.api.attempts import service
from leyden.services.api.attempts.context import AttemptContext, context_of
from leyden.services.api.audit import Change, changing
from leyden.services.api.auth import AgentClient, GuardedRoute
from leyden.services.api.parameters import Store

router = APIRouter(prefix="/v1/runs/{run_id}/attempts", tags=["attempts"], route_class=GuardedRoute)


@router.post("", response_model=LeasedAttempt, responses={204: {"description": "No task is due: ask again."}})
async def lease_attempt(
    request: Request, caller: AgentClient, store: Store, run_id: str, asked: LeaseRequest | None = None
) -> Response:
    """Lease the next due task of a run with `runner.type: external`; 204 when none is due within `wait_seconds`.

    The answer has the task, and the address and the key of the model for it. 409 where the run has ended or its agents
    are the platform's to start.
    """
    asked = asked or LeaseRequest()
    owner = f"{asked.worker}/{asked.key or secrets.token_hex(8)}"
    deadline = time.monotonic() + asked.wait_seconds
    async with store.read() as session:
        found = await external.read_demand(session, run_id, owner, asked.agent)
    while True:
        demand = _checked(found, run_id, asked.agent)
        context = context_of(request)
        if demand.is_due or demand.is_held:
            async with changing(request) as change:
                leased = await _lease(change, run_id, owner, asked.agent, context)
            fault_point("api.leased")
            if leased is not None:
                lease, answer = leased
                if lease.attempt > 1:
                    await context.notifications.publish_ended([AttemptKey(lease.rollout_id, lease.attempt - 1)])
                return JsonResponse(answer.model_dump(mode="json"))
        if time.monotonic() >= deadline or await request.is_disconnected():
            return Response(status_code=204)
        found = await context.looks.next(run_id, asked.agent)


@router.post("/{attempt_id}/heartbeat")
async def renew_attempt(request: Request, caller: AgentClient, run_id: str, attempt_id: str) -> Heartbeat:
    """Renew the lease of an attempt; the answer says whether to stop its agent, and why."""
    async with changing(request) as change:
        # A heartbeat is no change that a person looks for.
        change.is_new = False
        status = _known(await external.lock_attempt(change.session, run_id, attempt_id))
        context = context_of(request)
        beat = await service.renew(change.session, status, context)
    if beat.stop is not None:
        await _publish_end(context, status)
    return beat


@router.post("/{attempt_id}/end")
async def end_attempt(
    request: Request, asked: EndRequest, caller: AgentClient, run_id: str, attempt_id: str
) -> EndedAttempt:
    """End an attempt with its outcome; the same request again changes nothing.

    409 where the lease ran out before (its task runs again, and this end counts for nothing), and where the attempt has
    ended in another way.
    """
    context = context_of(request)
    async with changing(request) as change:
        status = _known(await external.lock_attempt(change.session, run_id, attempt_id))
        ended, change.is_new = await service.end(change.session, status, asked, context)
        change.detail |= {"rollout_id": ended.rollout_id, "attempt": ended.number, "kind": ended.kind}
        fault_point("api.ended")
    await _publish_end(context, status)
    return ended


async def _lease(
    change: Change, run_id: str, owner: str, agent: str | None, context: AttemptContext
) -> tuple[Lease, LeasedAttempt] | None:
    seconds = service.FIRST_LEASE_SECONDS
    lease, change.is_new = await external.lease_next(change.session, run_id, owner, seconds, agent)
    if lease is None:
        return None
    answer = await service.start_attempt(change.session, lease, context)
    change.detail |= {"rollout_id": lease.rollout_id, "attempt": lease.attempt}
    return None if answer is None else (lease, answer)


def _checked(demand: Demand | None, run_id: str, agent: str | None) -> Demand:
    if demand is None:
        raise Problem(404, f"no run has the id {run_id!r}: list runs to find it", cause="unknown")
    _check_agent(demand, run_id, agent)
    if demand.runner_type != EXTERNAL:
        whose = "its agents are" if agent is None else f"its agent {agent!r} is"
        detail = f"run {run_id!r} has runner.type {demand.runner_type!r}: {whose} the platform's to start"
        raise Problem(409, detail, cause="runner_type")
    if demand.has_ended and not demand.is_held:
        raise Problem(409, f"run {run_id!r} has ended: no task is left", cause="run_ended")
    return demand


def _check_agent(demand: Demand, run_id: str, agent: str | None) -> None:
    names = ", ".join(demand.agents)
    if agent is None and names:
        raise Problem(
            422, f"run {run_id!r} has the agents {names}: write the one that the client plays into agent", cause="agent"
        )
    if agent is not None and not names:
        raise Problem(422, f"run {run_id!r} has one agent without a name: leave agent out", cause="agent")
    if agent is not None and agent not in demand.agents:
        raise Problem(422, f"run {run_id!r} has no agent {agent!r}: write one of {names}", cause="agent")


def _known(status: AttemptStatus | None) -> AttemptStatus:
    if status is None:
        raise Problem(
            404, "the run has no attempt with this id: lease one, and use the id of the answer", cause="unknown"
        )
    return status


async def _publish_end(context: AttemptContext, status: AttemptStatus) -> None:
    await context.notifications.notify(Topic.OUTCOMES)
    await context.notifications.publish_ended([AttemptKey(status.lease.rollout_id, status.lease.attempt)])
