"""Routes of rollouts: what each agent did, token by token, and rewards that people give."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel

from leyden.libs.contracts.api.body import Page
from leyden.libs.contracts.api.rollouts import (
    Call,
    ComponentGrade,
    Feedback,
    FeedbackRequest,
    Graded,
    GradeRequest,
    Regrade,
    Reward,
    RewardRequest,
    RolloutDetail,
    RolloutPage,
    Span,
    TrialRequest,
)
from leyden.libs.contracts.config import Reward as RewardConfig
from leyden.libs.contracts.ledger import Ledger, NewComponent
from leyden.libs.contracts.states import ShownRolloutState
from leyden.libs.grading.ledger import ledger
from leyden.libs.grading.pool import Pool
from leyden.libs.queue.notifications import Notifications, Topic
from leyden.libs.service import Problem
from leyden.libs.store.database import Database, Session
from leyden.libs.store.read import views
from leyden.libs.store.read.attempt_facts import attempt_facts, task_of_attempt
from leyden.libs.store.read.rollouts import RolloutFilter, RolloutSort, list_rollouts
from leyden.libs.store.records.artifacts import read_artifact
from leyden.libs.store.runs.feedback import add_feedback
from leyden.libs.store.runs.regrades import add_regrade
from leyden.libs.store.runs.trials import graded_by_trial
from leyden.services.api.auth import Caller, GuardedRoute, Reader, Writer
from leyden.services.api.creation import IdempotencyKey, create_once, create_request, recall_first
from leyden.services.api.models import check_patience, check_sources, refusal
from leyden.services.api.parameters import MAX_NUMBER, Cursor, Limit, Store

BEGIN_SECONDS = 15.0
"""The longest wait for a grader that begins a trial."""
TRIAL_SECONDS = 600.0
"""The longest wait for its answer."""

router = APIRouter(prefix="/v1/rollouts", tags=["rollouts"], route_class=GuardedRoute)

Attempt = Annotated[int | None, Query(ge=1, le=MAX_NUMBER, description="All attempts when left out.")]


@router.get("")
async def get_rollouts(
    store: Store,
    caller: Reader,
    run: str | None = None,
    group: str | None = None,
    evaluation: Annotated[str | None, Query(description="Id of one, or `none` for training rollouts alone.")] = None,
    state: ShownRolloutState | None = None,
    step: Annotated[
        int | None, Query(ge=1, le=MAX_NUMBER, description="The optimiser step that consumed them.")
    ] = None,
    version: Annotated[
        int | None, Query(ge=0, le=MAX_NUMBER, description="The policy version they were admitted at.")
    ] = None,
    task: Annotated[int | None, Query(ge=0, le=MAX_NUMBER, description="Number of the task in its dataset.")] = None,
    agent: Annotated[
        str | None, Query(max_length=100, description="The one of the run's `agents` that played them.")
    ] = None,
    failed: Annotated[
        bool | None, Query(description="Whether agent or platform failed: excluded, or finished without success.")
    ] = None,
    reward_min: Annotated[float | None, Query(allow_inf_nan=False, description="The least reward.")] = None,
    reward_max: Annotated[float | None, Query(allow_inf_nan=False, description="The largest reward.")] = None,
    text: Annotated[
        str | None,
        Query(min_length=1, max_length=200, description="Part of reason, output, task or answers; needs `run`."),
    ] = None,
    cause: Annotated[
        str | None,
        Query(
            max_length=2000, description="Why it was excluded, failed or taught nothing; needs `run`, whose `causes`."
        ),
    ] = None,
    role: Annotated[str | None, Query(max_length=200, description="A role of one of its calls; needs `run`.")] = None,
    tool: Annotated[
        str | None, Query(max_length=200, description="A tool that an answer calls, or that ran; needs `run`.")
    ] = None,
    component: Annotated[str | None, Query(max_length=100, description="A component that has a value.")] = None,
    component_min: Annotated[float | None, Query(allow_inf_nan=False, description="Its least value.")] = None,
    component_max: Annotated[float | None, Query(allow_inf_nan=False, description="Its largest value.")] = None,
    sort: Annotated[RolloutSort, Query(description="`highest` and `lowest` sort by reward.")] = "newest",
    count: Annotated[bool, Query(description="Whether the first page gives `total`.")] = False,
    cursor: Cursor = None,
    limit: Limit = 50,
) -> RolloutPage:
    """List rollouts, newest first."""
    for name, value in (("text", text), ("cause", cause), ("role", role), ("tool", tool)):
        if value is not None and run is None:
            raise Problem(422, f"{name}: name the run whose rollouts it is searched in, as `run`", cause="invalid")
    if component is None and (component_min is not None or component_max is not None):
        raise Problem(422, "component: name the one that component_min and component_max bound", cause="invalid")
    wanted = RolloutFilter(
        run_id=run,
        group_id=group,
        evaluation=evaluation,
        state=state,
        failed=failed,
        step=step,
        version=version,
        task_number=task,
        reward_min=reward_min,
        reward_max=reward_max,
        text=text,
        agent=agent,
        cause=cause,
        role=role,
        tool=tool,
        component=component,
        component_min=component_min,
        component_max=component_max,
    )
    async with store.read() as session:
        return await list_rollouts(session, wanted, sort=sort, count=count, cursor=cursor, limit=limit)


@router.get("/{rollout_id}")
async def get_rollout(store: Store, caller: Reader, rollout_id: str) -> RolloutDetail:
    """Show a rollout with its task, attempts, outcomes and rewards."""
    async with store.read() as session:
        return await views.get_rollout(session, rollout_id)


@router.get("/{rollout_id}/calls")
async def get_calls(
    store: Store,
    caller: Reader,
    rollout_id: str,
    attempt: Attempt = None,
    prompt: Annotated[bool, Query(description="Whether to give the prompt's token ids too.")] = False,
    conversation: Annotated[
        Literal["whole", "added"],
        Query(description="Whether a call repeats what it shares with its parent, an earlier call of the list."),
    ] = "whole",
    cursor: Cursor = None,
    limit: Limit = 100,
) -> Page[Call]:
    """List the model calls of a rollout with tokens, log-probabilities, policy versions and credit."""
    async with store.read() as session:
        await views.check_rollout(session, rollout_id)
        return await views.list_calls(
            session,
            rollout_id,
            attempt=attempt,
            prompt=prompt,
            whole=conversation == "whole",
            cursor=cursor,
            limit=limit,
        )


@router.get("/{rollout_id}/spans")
async def get_spans(
    store: Store,
    caller: Reader,
    rollout_id: str,
    attempt: Attempt = None,
    kind: Annotated[str | None, Query(description="llm, tool, agent, reward or other.")] = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> Page[Span]:
    """List the spans of a rollout by start."""
    async with store.read() as session:
        await views.check_rollout(session, rollout_id)
        return await views.list_spans(session, rollout_id, attempt=attempt, kind=kind, cursor=cursor, limit=limit)


@router.get("/{rollout_id}/artifacts/{path:path}", response_class=Response)
async def get_artifact(
    store: Store,
    caller: Reader,
    rollout_id: str,
    path: str,
    attempt: Annotated[int | None, Query(ge=1, le=MAX_NUMBER, description="The one that counts when left out.")] = None,
) -> Response:
    """Download a file that an agent left and that `agent.artifacts` names, as it was stored."""
    async with store.read() as session:
        found = await read_artifact(session, rollout_id, path, attempt)
    # An agent wrote it: no browser may show it as a page of this address.
    headers = {"content-disposition": "attachment", "x-content-type-options": "nosniff"}
    return Response(found.content, media_type="application/octet-stream", headers=headers)


@router.post("/{rollout_id}/grades")
async def grade_rollout(request: Request, asked: TrialRequest, caller: Writer, store: Store, rollout_id: str) -> Graded:
    """Grade a stored rollout with the components of a document, and store nothing.

    Judges and code of the operator's own may take minutes: the service grader asks and runs them. With `against`,
    judges compare it with another rollout of its task.
    """
    if asked.against is not None:
        await _check_duel(store, rollout_id, asked.against, asked.reward)
    return await _graded(request, store, rollout_id, asked.reward, asked.against)


@router.post("/{rollout_id}/regrades", response_model=Regrade, status_code=201)
async def create_regrade(
    request: Request,
    asked: GradeRequest,
    caller: Writer,
    store: Store,
    rollout_id: str,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Grade a rollout again with the components of a document, as its newest revision; the same again answers 200.

    Evaluations take the newest total; training rollouts keep the reward that credit had. Judges and code are asked as
    for grades. A grading that fails is refused with 409 and changes nothing, and so is a rollout of a pruned run.
    """
    create = create_request(request, caller, idempotency_key, asked)
    if (first := await recall_first(request, create)) is not None:
        return first
    graded = await _graded(request, store, rollout_id, asked.reward)
    components = tuple(NewComponent(**one.model_dump(mode="json")) for one in graded.components)
    found = Ledger(graded.total, graded.reason, components)

    async def work(session: Session) -> tuple[BaseModel, bool]:
        giver: Caller = request.state.caller
        return await add_regrade(session, rollout_id, graded.attempt, asked.reward, found, giver.name)

    return await create_once(request, create, work)


async def _check_duel(store: Database, rollout_id: str, against: str, reward: RewardConfig) -> None:
    """Raises: Problem: no judge compares, or the rollouts have different tasks; UnknownRollout; RunPruned"""
    if not reward.compares:
        raise refusal("against", "no component is a relative_model, which alone compares two rollouts: add one")
    async with store.read() as session:
        tasks = [await task_of_attempt(session, one) for one in (rollout_id, against)]
    if tasks[0] != tasks[1]:
        raise refusal("against", f"rollout {against} has another task than {rollout_id}: compare answers to one task")


async def _graded(
    request: Request, store: Database, rollout_id: str, reward: RewardConfig, against: str | None = None
) -> Graded:
    """Grades with built-in graders here, and with others by the service grader.

    Raises: Problem: this platform cannot run one, or it may take too long; UnknownRollout; RunPruned; NoGrader;
        TrialFailed
    """
    check_sources(reward, request.app.state.settings)
    check_patience(reward, TRIAL_SECONDS)
    async with store.read() as session:
        attempt, facts = await attempt_facts(session, rollout_id)
    if reward.needs_service:
        answer = await graded_by_trial(
            store, rollout_id, reward, begin_seconds=BEGIN_SECONDS, seconds=TRIAL_SECONDS, against=against
        )
        return Graded.model_validate(answer)
    graders: Pool = request.app.state.graders
    found = ledger(reward, await graders.grade(reward.components, facts))
    components = [ComponentGrade.model_validate(one._asdict()) for one in found.components]
    return Graded(attempt=attempt, total=found.total, reason=found.reason, components=components)


@router.post("/{rollout_id}/rewards", response_model=Reward, status_code=201)
async def create_reward(
    request: Request,
    asked: RewardRequest,
    caller: Writer,
    store: Store,
    rollout_id: str,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Give a reward to a rollout or one of its calls; the same `key` again answers 200 and changes nothing.

    A reward that comes after the rollout's group was credited is refused with 409.
    """

    async def work(session: Session) -> tuple[BaseModel, bool]:
        giver: Caller = request.state.caller
        return await views.add_external_reward(session, rollout_id, asked, giver.name)

    return await create_once(request, create_request(request, caller, idempotency_key, asked), work)


@router.post("/{rollout_id}/feedback", response_model=Feedback, status_code=201)
async def create_feedback(
    request: Request,
    asked: FeedbackRequest,
    caller: Writer,
    store: Store,
    rollout_id: str,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Give a value to a component of a rollout's reward; the same `key` again answers 200 and changes nothing.

    An accepted value (201) counts if the present attempt is graded; once that has happened, 409 says so.
    """

    async def work(session: Session) -> tuple[BaseModel, bool]:
        giver: Caller = request.state.caller
        return await add_feedback(session, rollout_id, asked, giver.name)

    answer = await create_once(request, create_request(request, caller, idempotency_key, asked), work)
    notifications: Notifications = request.app.state.notifications
    await notifications.notify(Topic.GRADINGS)
    return answer
