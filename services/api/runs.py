"""Routes of runs: create and steer them, and what they made."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, TypedDict

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import BaseModel

from leyden.libs.contracts.agent_rules import AgentRules
from leyden.libs.contracts.alarms import ALARM_RULES
from leyden.libs.contracts.api.alarms import Alarm
from leyden.libs.contracts.api.body import Page
from leyden.libs.contracts.api.rollouts import Sample
from leyden.libs.contracts.api.runs import (
    Evaluation,
    EvaluationRequest,
    Metrics,
    PolicyVersion,
    PrunedRun,
    ResumeRequest,
    Run,
    RunAgent,
    RunPage,
    RunParent,
    RunSort,
    Step,
)
from leyden.libs.contracts.config import Computation, ContainerRunner, GroupAgent, KubernetesRunner, RunConfig
from leyden.libs.contracts.judgements import Judgement, Machine, judge
from leyden.libs.contracts.states import RunPhase
from leyden.libs.queue.external import EXTERNAL
from leyden.libs.service import JsonResponse, Problem
from leyden.libs.store.database import ReadSession, Session
from leyden.libs.store.datasets import find_dataset
from leyden.libs.store.engines import read_pools
from leyden.libs.store.policies import base_models
from leyden.libs.store.read import agents, policies, results, runs, views
from leyden.libs.store.read.best import best_version
from leyden.libs.store.runs import actions, retention
from leyden.libs.store.training import read_computation, weights_bytes
from leyden.services.api.attempts.context import context_of
from leyden.services.api.audit import changing
from leyden.services.api.auth import Admin, GuardedRoute, Reader, Writer
from leyden.services.api.continuation import amended, continued_policies
from leyden.services.api.creation import IdempotencyKey, create_once, create_request
from leyden.services.api.models import (
    check_base_models,
    check_conversations,
    check_demonstrations,
    check_directory,
    check_embeddings,
    check_frozen_policies,
    check_graders,
    check_judgements,
    check_model,
    check_policies,
    check_pool,
    check_providers,
    check_sources,
    check_task_fields,
    check_teacher,
    check_trainable,
)
from leyden.services.api.parameters import MAX_NUMBER, Cursor, Limit, PolicyName, Store
from leyden.services.api.settings import Settings

INSTEAD = {
    "process": "write the agent's image into runner.image, with a type that they execute",
    "container": "install podman or docker on the runner's machine and start the platform again, or use another type",
    "kubernetes": "on one machine write runner.type 'container', with the same image",
}
"""The remedy for a run whose `runner.type` this platform does not execute."""

router = APIRouter(prefix="/v1/runs", tags=["runs"], route_class=GuardedRoute)

Number = Annotated[int, Path(ge=1, le=MAX_NUMBER)]


@router.post("", response_model=Run, status_code=201)
async def create_run(
    request: Request, config: RunConfig, caller: Writer, store: Store, idempotency_key: IdempotencyKey = None
) -> Response:
    """Create a run from its document; it begins as soon as an engine is free."""
    _check_services(request, config)
    check_frozen_policies(config)
    check_judgements(config)

    async def work(session: Session) -> tuple[BaseModel, bool]:
        warnings = await _check_references(request, session, config)
        return _warned(await actions.create_run(session, config), warnings), True

    return await create_once(request, create_request(request, caller, idempotency_key, config), work)


def _check_services(request: Request, config: RunConfig) -> None:
    """Refuses a runner, an agent's pod, a grader or a provider that this platform lacks or its operator forbids."""
    check_sources(config.reward, request.app.state.settings)
    check_providers(config, request.app.state.settings)
    for one in config.group_agents:
        _check_runner(request, one)


def _check_runner(request: Request, one: GroupAgent) -> None:
    executed = request.app.state.settings.runner_types
    if one.runner.type == EXTERNAL:
        context_of(request)
    elif executed is not None and one.runner.type not in executed:
        detail = (
            f"{one.runner_path}.type: this platform's runners execute {', '.join(sorted(executed))} and not"
            f" {one.runner.type}: {INSTEAD[one.runner.type]}"
        )
        raise Problem(422, detail, cause="runner_type")
    rules: AgentRules = request.app.state.settings.agent_rules
    if isinstance(one.runner, ContainerRunner | KubernetesRunner) and (refused := rules.refusals(one.runner)):
        raise Problem(422, "; ".join(refused), cause="agent_rules")


def _warned(run: Run, found: Sequence[Judgement]) -> Run:
    """A new run with the alarms about its settings, before the controller judges it for the first time."""
    rule = ALARM_RULES["setting"]
    alarms = [
        Alarm(
            run_id=run.id,
            number=number,
            name=rule.name,
            subject=one.path,
            severity=rule.severity,
            since=run.created_at,
            reason=one.reason,
            evidence={"field": one.path},
            remedy=one.remedy,
        )
        for number, one in enumerate(found, 1)
    ]
    return run.model_copy(update={"alarms": alarms})


async def _check_references(request: Request, session: Session, config: RunConfig) -> list[Judgement]:
    """Refuses pools, models and tasks that do not exist or do not fit; returns the warnings about the document, its
    memory and its folders."""
    settings: Settings = request.app.state.settings
    machine: Machine = settings.machine
    pools = await read_pools(session)
    check_pool(config, pools)
    check_policies(config, pools)
    warnings = [one for one in judge(config, config.computation(machine.device)) if one.severity == "warns"]
    warnings += await check_embeddings(session, config, pools)
    warnings += await asyncio.to_thread(check_directory, config, settings)
    documents = {f"policies.{name}.": config.policy_document(name) for name in config.served_policies}
    for path, one in {"": config, **documents}.items():
        here = settings.one_machine
        warnings += await check_teacher(session, one, pools, path, one_machine=here)
        warnings += await asyncio.to_thread(check_model, one.model, f"{path}model", one_machine=here)
        if (critic := one.algorithm.critic) is not None:
            place = f"{path}algorithm.critic.model"
            warnings += await asyncio.to_thread(check_model, critic.model, place, one_machine=here)
        warnings += await check_trainable(session, one, pools, machine)
    await check_task_fields(session, config)
    await check_conversations(session, config)
    await check_graders(session, config)
    await check_demonstrations(session, config)
    return warnings


@router.get("")
async def get_runs(
    store: Store,
    caller: Reader,
    name: str | None = None,
    phase: RunPhase | None = None,
    dataset: Annotated[
        str | None, Query(description="Id or name of a dataset: runs that train on it, or evaluate a version on it.")
    ] = None,
    sort: Annotated[RunSort, Query(description="`highest` and `lowest` sort by the last step's reward.")] = "newest",
    count: Annotated[bool, Query(description="Whether the first page gives `total`.")] = False,
    cursor: Cursor = None,
    limit: Limit = 50,
) -> RunPage:
    """List runs, newest first; `phase` sorts from pending to cancelled."""
    async with store.read() as session:
        dataset_id = None if dataset is None else (await find_dataset(session, dataset)).id
        return await runs.list_runs(
            session, name=name, phase=phase, dataset_id=dataset_id, sort=sort, count=count, cursor=cursor, limit=limit
        )


class _OfTrainer(TypedDict):
    best_version: int | None
    best_version_reason: str | None
    weights_bytes: int | None
    computation: Computation | None


@router.get("/{run_id}")
async def get_run(store: Store, caller: Reader, run_id: str) -> Run:
    """Show a run: what is wanted, where it is, how far it has come."""
    async with store.read() as session:
        found = await runs.get_run(session, run_id)
        own = await _of_trainer(session, run_id)
        further = dict(found.policies)
        for name, policy in further.items():
            further[name] = policy.model_copy(update=await _of_trainer(session, policy.id))
    return found.model_copy(update={**own, "policies": further})


async def _of_trainer(session: ReadSession, policy_id: str) -> _OfTrainer:
    """The facts of a policy's trainer and versions, for the answer about one run."""
    best = await best_version(session, policy_id)
    return {
        "best_version": best.version,
        "best_version_reason": best.reason,
        "weights_bytes": await weights_bytes(session, policy_id),
        "computation": await read_computation(session, policy_id),
    }


@router.post("/{run_id}/pause")
async def pause_run(request: Request, caller: Writer, run_id: str) -> Run:
    """Pause a run: rollouts under way end, no new ones begin. 409 where that cannot be asked; a repeat is harmless."""
    async with changing(request) as change:
        run, change.is_new = await actions.change_intent(change.session, run_id, "pause")
    return run


@router.post("/{run_id}/resume", response_model=Run, responses={201: {"model": Run}})
async def resume_run(
    request: Request,
    caller: Writer,
    store: Store,
    run_id: str,
    asked: ResumeRequest | None = None,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Resume a paused run (no body), or continue an ended one as a new run with an amended document (201).

    The further policies of a run continue with it, as policies of the new run.
    409 where that cannot be asked. A repeat without a body is harmless; with one, the Idempotency-Key makes it so.
    """
    if asked is None:
        async with changing(request) as change:
            resumed, change.is_new = await actions.change_intent(change.session, run_id, "resume")
        return JsonResponse(resumed.model_dump(mode="json"), 200)

    async def work(session: Session) -> tuple[BaseModel, bool]:
        ended, version = await actions.resumable_version(session, run_id, asked.from_version)
        turns = await actions.turns_taken(session, run_id, version)
        bases = await base_models(session, [run_id, *(one.id for one in ended.policies.values())])
        config = amended(ended, version, asked, await read_pools(session), turns, bases)
        _check_services(request, config)
        check_judgements(config, "changes.")
        warnings = await _check_references(request, session, config)
        continued = continued_policies(ended, config, asked)
        check_frozen_policies(config, continued)
        parents = await actions.policy_parents(session, ended, version, continued)
        made = await actions.create_run(session, config, RunParent(run_id=run_id, version=version), parents)
        return _warned(made, warnings), True

    return await create_once(request, create_request(request, caller, idempotency_key, asked), work)


@router.post("/{run_id}/cancel")
async def cancel_run(request: Request, caller: Writer, run_id: str) -> Run:
    """Cancel a run for good. 409 where it has ended; a repeat is harmless."""
    async with changing(request) as change:
        run, change.is_new = await actions.change_intent(change.session, run_id, "cancel")
    return run


@router.post("/{run_id}/prune")
async def prune_run(request: Request, store: Store, caller: Admin, run_id: str) -> PrunedRun:
    """Drop calls, spans, credits, samples, agents' outputs and files of a run that has ended, for good. A repeat frees
    nothing more."""
    # Partitions are dropped in transactions of their own, once the entry stands.
    async with changing(request) as change:
        await runs.check_run(change.session, run_id)
    return PrunedRun(run_id=run_id, freed_bytes=await retention.prune_run(store, run_id))


@router.delete("/{run_id}", status_code=202)
async def delete_run(request: Request, caller: Admin, run_id: str) -> Run:
    """Delete a run that has ended, for good: records, history, weights and checkpoints.

    The controller does it; until then the run's intent is `deleted`, afterwards the run is unknown (404). 409 where the
    run has not ended; a repeat is harmless.
    """
    async with changing(request) as change:
        run, change.is_new = await actions.mark_deleted(change.session, run_id)
    return run


@router.get("/{run_id}/evaluations")
async def get_evaluations(
    store: Store, caller: Reader, run_id: str, cursor: Cursor = None, limit: Limit = 50
) -> Page[Evaluation]:
    """List evaluations of a run with their results as they are now."""
    async with store.read() as session:
        await runs.check_run(session, run_id)
        return await results.list_evaluations(session, run_id, cursor=cursor, limit=limit)


@router.get("/{run_id}/evaluations/{number}")
async def get_evaluation(store: Store, caller: Reader, run_id: str, number: Number) -> Evaluation:
    """Show one evaluation: reward and facts with counts and 95 % intervals."""
    async with store.read() as session:
        found = await results.get_evaluation(session, f"{run_id}.e{number}")
    if found is None:
        raise Problem(404, f"run {run_id!r} has no evaluation {number}: list its evaluations", cause="unknown")
    return found


@router.get("/{run_id}/steps")
async def get_steps(
    store: Store, caller: Reader, run_id: str, policy: PolicyName = None, cursor: Cursor = None, limit: Limit = 100
) -> Page[Step]:
    """List optimiser steps with the trainer's metrics and what their rollouts earned."""
    async with store.read() as session:
        policy_id = await runs.policy_id(session, run_id, policy)
        return await results.list_steps(session, policy_id, cursor=cursor, limit=limit)


@router.get("/{run_id}/metrics")
async def get_metrics(
    store: Store,
    caller: Reader,
    run_id: str,
    policy: PolicyName = None,
    names: Annotated[list[str] | None, Query(description="Series wanted; all when left out.")] = None,
) -> Metrics:
    """Time series over the steps of a run, for plots."""
    async with store.read() as session:
        found = await results.get_metrics(session, await runs.policy_id(session, run_id, policy), names or [])
    return found.model_copy(update={"run_id": run_id, "policy": policy})


@router.get("/{run_id}/agents")
async def get_agents(
    store: Store, caller: Reader, run_id: str, cursor: Cursor = None, limit: Limit = 100
) -> Page[RunAgent]:
    """List the agents that called the model in a run, in the order of their first call."""
    async with store.read() as session:
        await runs.check_run(session, run_id)
        return await agents.list_agents(session, run_id, cursor=cursor, limit=limit)


@router.get("/{run_id}/policies")
async def get_policies(
    store: Store,
    caller: Reader,
    run_id: str,
    policy: PolicyName = None,
    kept: Annotated[
        bool | None, Query(description="Versions alone whose files are there (true), or were removed (false).")
    ] = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> Page[PolicyVersion]:
    """List policy versions from 0, the base model."""
    async with store.read() as session:
        policy_id = await runs.policy_id(session, run_id, policy)
        return await policies.list_policy_versions(session, run_id, policy_id, kept=kept, cursor=cursor, limit=limit)


@router.get("/{run_id}/samples")
async def get_samples(
    store: Store,
    caller: Reader,
    run_id: str,
    policy: PolicyName = None,
    rollout: str | None = None,
    step: Annotated[int | None, Query(ge=1, le=MAX_NUMBER, description="The optimiser step that trained them.")] = None,
    tokens: bool = False,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> Page[Sample]:
    """List the token sequences made for the loss, with the step that trained each."""
    async with store.read() as session:
        policy_id = await runs.policy_id(session, run_id, policy)
        return await views.list_samples(
            session, policy_id, rollout_id=rollout, step=step, tokens=tokens, cursor=cursor, limit=limit
        )


@router.post("/{run_id}/evaluations", response_model=Evaluation, status_code=201)
async def create_evaluation(
    request: Request,
    asked: EvaluationRequest,
    caller: Writer,
    store: Store,
    run_id: str,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Measure one policy version on a dataset; what is left out comes from the run's own `evaluation`."""

    async def work(session: Session) -> tuple[BaseModel, bool]:
        await check_base_models(session, await runs.get_run(session, run_id))
        evaluation_id = await actions.create_evaluation(session, run_id, asked)
        made = await results.get_evaluation(session, evaluation_id)
        assert made is not None
        return made, True

    return await create_once(request, create_request(request, caller, idempotency_key, asked), work)
