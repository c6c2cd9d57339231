"""Rollouts, model calls, spans, samples, versions and engines as the API shows them."""

from __future__ import annotations

import struct
from collections.abc import Container, Sequence
from typing import Any, NamedTuple, cast

from sqlalchemy import ColumnElement, Select, func, literal_column, select, text, tuple_

from leyden.libs.contracts.api.body import Page
from leyden.libs.contracts.api.platform import Engine, Pool
from leyden.libs.contracts.api.rollouts import (
    Artifact,
    Attempt,
    Call,
    CallCredit,
    Feedback,
    Outcome,
    Regrade,
    Reward,
    RewardComponent,
    RewardRequest,
    RolloutDetail,
    Sample,
    Span,
)
from leyden.libs.contracts.config import BrokenDocument, stored_object
from leyden.libs.contracts.conversation import Json, Turn, parse_turn, parse_turns
from leyden.libs.contracts.ids import run_of
from leyden.libs.contracts.states import EngineState, GroupState, RolloutState, RunIntent
from leyden.libs.store import tables
from leyden.libs.store.attempts import ROLLOUT_STATE
from leyden.libs.store.database import ReadSession, Session
from leyden.libs.store.policies import PolicyKey, policies_by_id
from leyden.libs.store.read.paging import decode_cursor, page
from leyden.libs.store.read.rollouts import select_rollouts, shown_rollout
from leyden.libs.store.records.artifacts import ArtifactSize, artifact_sizes
from leyden.libs.store.records.chains import FullCall, MissingParent, full_call, full_calls


class UnknownRollout(LookupError):
    """No rollout has this id."""

    def __init__(self, rollout_id: str) -> None:
        super().__init__(f"no rollout has the id {rollout_id!r}: list the run's rollouts to find it")


class UnknownCall(LookupError):
    """The rollout has no such model call."""


class RewardConflict(ValueError):
    """The key was used for another reward, or the reward came after its group was credited."""


async def get_rollout(session: ReadSession, rollout_id: str) -> RolloutDetail:
    """A rollout with its task, attempts, outcomes and rewards.

    Raises: UnknownRollout
    """
    row = (await session.execute(select_rollouts().where(tables.Rollout.id == rollout_id))).one_or_none()
    if row is None:
        raise UnknownRollout(rollout_id)
    rollout = shown_rollout(row)
    task = await session.get(tables.Task, (rollout.dataset_id, rollout.task_number))
    components, earlier = await _components(session, rollout_id)
    return RolloutDetail(
        **rollout.model_dump(),
        task=task.payload if task else {},
        attempts=await _attempts(session, rollout_id),
        rewards=await list_rewards(session, rollout_id),
        components=components,
        earlier_components=earlier,
        feedback=await _feedback(session, rollout_id),
        regrades=await _regrades(session, rollout_id),
    )


async def _components(session: ReadSession, rollout_id: str) -> tuple[list[RewardComponent], list[RewardComponent]]:
    """Those of the newest revision of each attempt, and the others."""
    table = tables.RolloutReward
    query = select(table).where(table.rollout_id == rollout_id).order_by(table.attempt, table.revision, table.position)
    found = [RewardComponent.model_validate(row, from_attributes=True) for row in await session.scalars(query)]
    # In their order, so that the last one stays.
    newest = {one.attempt: one.revision for one in found}
    return (
        [one for one in found if one.revision == newest[one.attempt]],
        [one for one in found if one.revision != newest[one.attempt]],
    )


async def _regrades(session: ReadSession, rollout_id: str) -> list[Regrade]:
    table = tables.Regrade
    query = select(table).where(table.rollout_id == rollout_id).order_by(table.attempt, table.revision)
    return [shown_regrade(row) for row in await session.scalars(query)]


def shown_regrade(row: tables.Regrade) -> Regrade:
    """The row as the API shows it."""
    return Regrade(
        attempt=row.attempt,
        revision=row.revision,
        total=row.total,
        given_by=row.token_name,
        reward=row.reward,
        created_at=row.created_at,
    )


async def _feedback(session: ReadSession, rollout_id: str) -> list[Feedback]:
    table = tables.Feedback
    query = select(table).where(table.rollout_id == rollout_id).order_by(table.created_at, table.key)
    return [shown_feedback(row) for row in await session.scalars(query)]


def shown_feedback(row: tables.Feedback) -> Feedback:
    """The row as the API shows it."""
    return Feedback(
        key=row.key,
        attempt=row.attempt,
        component=row.component,
        value=row.value,
        comment=row.comment,
        given_by=row.token_name,
        created_at=row.created_at,
    )


async def check_rollout(session: ReadSession, rollout_id: str) -> None:
    """Returns when the rollout exists.

    Raises: UnknownRollout
    """
    if await session.get(tables.Rollout, rollout_id) is None:
        raise UnknownRollout(rollout_id)


async def _attempts(session: ReadSession, rollout_id: str) -> list[Attempt]:
    attempt, outcome = tables.Attempt, tables.Outcome
    same = (outcome.rollout_id == attempt.rollout_id) & (outcome.attempt == attempt.number)
    query = select(attempt, outcome).outerjoin(outcome, same).where(attempt.rollout_id == rollout_id)
    rows = (await session.execute(query.order_by(attempt.number))).all()
    files = await artifact_sizes(session, rollout_id)
    return [_attempt(execution, ended, files.get(execution.number, [])) for execution, ended in rows]


def _attempt(execution: tables.Attempt, ended: tables.Outcome | None, files: Sequence[ArtifactSize]) -> Attempt:
    outcome = None if ended is None else Outcome.model_validate(ended, from_attributes=True)
    if outcome is not None:
        shown = [Artifact(**one._asdict()) for one in files]
        outcome = outcome.model_copy(update={"artifacts": shown})
    return Attempt(
        number=execution.number,
        state=execution.state,
        owner=execution.owner,
        lease_expires_at=execution.lease_expires_at,
        created_at=execution.created_at,
        started_at=execution.started_at,
        finished_at=execution.finished_at,
        outcome=outcome,
    )


async def list_rewards(session: ReadSession, rollout_id: str) -> list[Reward]:
    """Rewards of agents, telemetry and people, in the order they arrived."""
    table = tables.Reward
    given = await session.scalars(select(table).where(table.rollout_id == rollout_id))
    rewards = [Reward.model_validate(row, from_attributes=True) for row in given]
    rewards += [_external(row) for row in await session.scalars(_external_rewards(rollout_id))]
    return sorted(rewards, key=lambda reward: (reward.created_at, reward.key))


def _external_rewards(rollout_id: str) -> Select[tables.ExternalReward]:
    return select(tables.ExternalReward).where(tables.ExternalReward.rollout_id == rollout_id)


def _external(row: tables.ExternalReward) -> Reward:
    return Reward(
        key=row.key,
        attempt=row.attempt,
        source="external",
        name=row.name,
        value=row.value,
        call_id=row.call_id,
        comment=row.comment,
        given_by=row.token_name,
        created_at=row.created_at,
    )


_ABANDONED = (RunIntent.CANCELLED, RunIntent.DELETED)


async def add_external_reward(
    session: Session, rollout_id: str, request: RewardRequest, token_name: str | None = None
) -> tuple[Reward, bool]:
    """The reward and whether it is new. The repeat key is rollout and `key`; a repeat changes nothing.

    Raises: UnknownRollout; UnknownCall; RewardConflict
    """
    # The row lock orders two senders of one key.
    found = await session.scalar(select(tables.Rollout).where(tables.Rollout.id == rollout_id).with_for_update())
    if found is None:
        raise UnknownRollout(rollout_id)
    existing = await session.get(tables.ExternalReward, (rollout_id, request.key))
    if existing is not None:
        if RewardRequest.model_validate(existing, from_attributes=True) != request:
            raise RewardConflict(f"key {request.key!r} was used for another reward of this rollout: send a new key")
        return _external(existing), False
    _check_takes_rewards(await session.get_one(tables.Run, found.run_id))
    attempt = None if request.call_id is None else await _attempt_of(session, found, request.call_id)
    # Credit locks the group while it computes: this waits for it, and credit passes over a group that is locked here.
    group = select(tables.Group.state).where(tables.Group.id == found.group_id)
    group_state = await session.scalar(group.with_for_update(read=True))
    if found.state in (RolloutState.CANCELLED, RolloutState.EXCLUDED):
        why = f" ({found.reason})" if found.reason else ""
        raise RewardConflict(f"rollout {rollout_id} was {found.state}{why}, so a reward for it counts nowhere")
    if group_state == GroupState.CANCELLED:
        raise RewardConflict(f"the rollout's group {found.group_id} was cancelled, so a reward for it counts nowhere")
    if await session.get(tables.GroupCredit, (found.group_id, found.run_id)) is not None:
        raise RewardConflict(
            f"the rollout's group {found.group_id} was credited before this reward came, so it could not be trained:"
            " send rewards before the last rollout of the group ends"
        )
    row = tables.ExternalReward(rollout_id=rollout_id, attempt=attempt, token_name=token_name, **request.model_dump())
    session.add(row)
    await session.flush()
    await session.refresh(row)
    return _external(row), True


def _check_takes_rewards(run: tables.Run) -> None:
    """Raises: RewardConflict"""
    if run.intent in _ABANDONED:
        raise RewardConflict(f"run {run.id} was cancelled, so a reward for its rollouts counts nowhere")
    try:
        document = stored_object(run.config)
    except BrokenDocument as error:
        raise RewardConflict(f"run {run.id}: {error}") from error
    if document.get("reward") is not None:
        raise RewardConflict(
            f"run {run.id} names its rewards in reward.components: give feedback for one that is from: feedback, or"
            " rewards to rollouts of a run without reward"
        )


async def _attempt_of(session: ReadSession, rollout: tables.Rollout, call_id: str) -> int:
    call = await session.get(tables.ModelCall, (rollout.run_id, call_id))
    if call is None or call.rollout_id != rollout.id:
        raise UnknownCall(f"rollout {rollout.id} has no model call {call_id!r}: list its calls")
    if call.attempt <= rollout.excused_attempt:
        raise RewardConflict(
            f"call {call_id} is of attempt {call.attempt}, which a failure of the platform ended, so a reward for it"
            " counts nowhere: reward a call of the last attempt"
        )
    return call.attempt


async def list_calls(
    session: ReadSession,
    rollout_id: str,
    *,
    attempt: int | None = None,
    prompt: bool = False,
    whole: bool = True,
    cursor: str | None,
    limit: int,
) -> Page[Call]:
    """Model calls of a rollout in the order they arrived, with their credit.

    Args: attempt: None for all; prompt: whether the prompt's token ids are given too; whole: whether each call repeats
        what it shares with its parent
    """
    call, credit, delivery = tables.ModelCall, tables.CallCredit, tables.Delivery
    name = f"calls of {rollout_id}"
    conditions = [call.run_id == run_of(rollout_id), call.rollout_id == rollout_id]
    if attempt is not None:
        conditions.append(call.attempt == attempt)
    if key := decode_cursor(cursor, name, int, str):
        conditions.append(tuple_(call.sequence, call.id) > tuple_(*key))
    same = (credit.run_id == call.run_id) & (credit.call_id == call.id)
    sent = (delivery.run_id == call.run_id) & (delivery.request_id == call.request_id)
    columns = select(call, credit, delivery.delivered).outerjoin(credit, same).outerjoin(delivery, sent)
    query = columns.where(*conditions).order_by(call.sequence, call.id)
    rows = (await session.execute(query.limit(limit + 1))).all()
    listed = [row[0] for row in rows]
    found = await (full_calls(session, listed) if whole else _own_parts(session, listed))
    return page(
        name,
        [(*row, full) for row, full in zip(rows, found, strict=True)],
        limit,
        lambda row: _call(*row, prompt=prompt),
        lambda row: (row[0].sequence, row[0].id),
    )


class OwnPart(NamedTuple):
    """The part that a call adds to its parent; tools is None where they are the parent's."""

    turns: tuple[Turn, ...]
    tools: Sequence[Json] | None
    prompt_ids: bytes


async def _own_parts(
    session: ReadSession, rows: Sequence[tables.ModelCall]
) -> list[OwnPart | FullCall | MissingParent]:
    """The calls as they are stored; in full where clocks of two gateways gave the parent the later place."""
    parents = {row.parent_call_id for row in rows if row.parent_call_id is not None}
    call = tables.ModelCall
    query = select(call.id, call.sequence).where(call.run_id.in_({row.run_id for row in rows}), call.id.in_(parents))
    places = {one.id: (one.sequence, one.id) for one in await session.execute(query)}
    late = [row for row in rows if row.parent_call_id in places and places[row.parent_call_id] > (row.sequence, row.id)]
    full = dict(zip((row.id for row in late), await full_calls(session, late), strict=True))
    return [full.get(row.id) or _own_part(row, places) for row in rows]


def _own_part(row: tables.ModelCall, stored: Container[str]) -> OwnPart | FullCall | MissingParent:
    if row.parent_call_id is None:
        return full_call({}, row)
    if row.parent_call_id not in stored:
        return MissingParent(row.id, row.parent_call_id)
    return OwnPart(parse_turns(row.turns), row.tools, row.prompt_ids)


def _call(
    row: tables.ModelCall,
    credit: tables.CallCredit | None,
    delivered: bool | None,
    full: OwnPart | FullCall | MissingParent,
    *,
    prompt: bool,
) -> Call:
    values: dict[str, Any] = {
        "delivered": delivered,
        "sampled_ids": _ints(row.sampled_ids),
        "logprobs": _floats(row.generator_logprobs),
        "policy_versions": _ints(row.policy_versions),
        "answer": None if row.answer is None else parse_turn(row.answer),
        "credit": None if credit is None else CallCredit.model_validate(_columns(credit, CallCredit)),
        **dict.fromkeys(("turns", "tools", "prompt_ids", "missing_parent", "parent_call_id")),
        **dict.fromkeys(("shared_turns", "shared_tokens"), 0),
    }
    if isinstance(full, OwnPart):
        values |= {name: getattr(row, name) for name in ("parent_call_id", "shared_turns", "shared_tokens")}
    if isinstance(full, MissingParent):
        values["missing_parent"] = str(full)
    else:
        values |= {"turns": full.turns, "tools": full.tools, "prompt_ids": _ints(full.prompt_ids) if prompt else None}
    columns = {name: getattr(row, name) for name in Call.model_fields.keys() - values.keys()}
    return Call(**columns, **values)


def _columns(row: object, model: type[CallCredit]) -> dict[str, Any]:
    return {name: getattr(row, name) for name in model.model_fields}


def _ints(array: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(array) // 4}i", array))


def _floats(array: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(array) // 4}f", array))


async def list_spans(
    session: ReadSession, rollout_id: str, *, attempt: int | None, kind: str | None, cursor: str | None, limit: int
) -> Page[Span]:
    """Spans of a rollout by start."""
    span, name = tables.Span, f"spans of {rollout_id}"
    conditions = [span.run_id == run_of(rollout_id), span.rollout_id == rollout_id]
    if attempt is not None:
        conditions.append(span.attempt == attempt)
    if kind is not None:
        conditions.append(span.kind == kind)
    if key := decode_cursor(cursor, name, int, str):
        conditions.append(tuple_(span.start_ns, span.span_id) > tuple_(*key))
    query = select(span).where(*conditions).order_by(span.start_ns, span.span_id).limit(limit + 1)
    rows = (await session.scalars(query)).all()
    return page(
        name,
        rows,
        limit,
        lambda row: Span.model_validate(row, from_attributes=True),
        lambda row: (row.start_ns, row.span_id),
    )


async def list_samples(
    session: ReadSession,
    run_id: str,
    *,
    rollout_id: str | None = None,
    step: int | None = None,
    tokens: bool = False,
    cursor: str | None,
    limit: int,
) -> Page[Sample]:
    """Samples of a run by id, with the steps that trained each.

    Args: step: those that it trained, for the first time or again; tokens: whether the arrays are given too
    """
    sample, consumed, again, name = tables.Sample, tables.StepSample, tables.StepReplay, f"samples of {run_id}"
    conditions: list[ColumnElement[bool]] = [sample.run_id == run_id]
    if rollout_id is not None:
        conditions.append(sample.rollout_id == rollout_id)
    if step is not None:
        replayed = select(again.group_id).where(again.run_id == run_id, again.step == step)
        conditions.append((consumed.step == step) | sample.group_id.in_(replayed))
    if key := decode_cursor(cursor, name, str):
        conditions.append(sample.id > cast(str, key[0]))
    same = (consumed.run_id == sample.run_id) & (consumed.sample_id == sample.id)
    used = (again.group_id == sample.group_id) & (again.run_id == sample.run_id)
    uses = select(again.step).where(used).order_by(again.step).scalar_subquery()
    query = select(sample, consumed.step, func.array(uses))
    query = query.outerjoin(consumed, same).where(*conditions).order_by(sample.id)
    rows = (await session.execute(query.limit(limit + 1))).all()
    return page(name, rows, limit, lambda row: _sample(row[0], row[1], row[2], tokens), lambda row: (row[0].id,))


def _sample(row: tables.Sample, step: int | None, replays: list[int], tokens: bool) -> Sample:
    arrays: dict[str, list[int] | list[float]] = {}
    if tokens:
        arrays = {
            "token_ids": _ints(row.token_ids),
            "mask": list(row.mask),
            "generator_logprobs": _floats(row.generator_logprobs),
            "advantages": _floats(row.advantages),
            "policy_versions": _ints(row.policy_versions),
        }
    shown = {name: getattr(row, name) for name in Sample.model_fields if hasattr(row, name)}
    return Sample(**{**shown, **dict.fromkeys(_ARRAYS), **arrays, "step": step, "replayed_in": replays})


_ARRAYS = ("token_ids", "mask", "generator_logprobs", "advantages", "policy_versions")


async def list_engines(session: ReadSession) -> list[Engine]:
    """Every engine that the controller has seen. One without a run's weights is idle while no run has its pool."""
    rows = (await session.scalars(select(tables.Engine).order_by(tables.Engine.url))).all()
    policies = await policies_by_id(session, [row.run_id for row in rows if row.run_id is not None])
    had = set(await session.scalars(select(tables.Pool.name).where(func.cardinality(tables.Pool.run_ids) > 0)))
    return [_engine(row, policies.get(row.run_id or ""), is_idle=_waits(row) and row.pool not in had) for row in rows]


def _waits(row: tables.Engine) -> bool:
    return row.state == EngineState.UPDATING and row.run_id is None


def _engine(row: tables.Engine, policy: PolicyKey | None, *, is_idle: bool) -> Engine:
    engine = Engine(
        url=row.url,
        pool=row.pool,
        run_id=row.run_id,
        policy_version=row.policy_version,
        state="idle" if is_idle else row.state,
        detail=None if is_idle else row.detail,
        updated_at=row.updated_at,
    )
    if policy is None or policy.is_own:
        return engine
    return engine.model_copy(update={"run_id": policy.run_id, "policy": policy.name})


async def list_pools(session: ReadSession) -> list[Pool]:
    """Every pool with its engines, by name."""
    engines = await list_engines(session)
    pools = (await session.scalars(select(tables.Pool).order_by(tables.Pool.name))).all()
    policies = await policies_by_id(session, [one for pool in pools for one in (*pool.run_ids, *pool.waiting)])

    def runs_of(ids: Sequence[str]) -> list[str]:
        return list(dict.fromkeys(policies[one].run_id if one in policies else one for one in ids))

    return [
        Pool(
            name=pool.name,
            model_path=pool.model_path,
            context_length=pool.context_length,
            adapters=pool.adapters,
            max_adapter_rank=pool.max_adapter_rank,
            embeddings=pool.embeddings,
            run_ids=runs_of(pool.run_ids),
            waiting=runs_of(pool.waiting),
            engines=[engine for engine in engines if engine.pool == pool.name],
        )
        for pool in pools
    ]


async def count_work(session: ReadSession) -> tuple[int, int]:
    """Rollouts that wait for an attempt, and live attempts."""
    # A rollout keeps its stored state while it runs and is graded: the index over it narrows the search.
    waits = literal_column(ROLLOUT_STATE) == "queued"
    queued = select(func.count()).select_from(tables.Rollout).where(tables.Rollout.state == "queued", waits)
    live = select(func.count()).select_from(tables.Attempt).where(tables.Attempt.state.in_(("leased", "running")))
    return await session.scalar(queued) or 0, await session.scalar(live) or 0


async def schema_revision(session: ReadSession) -> str | None:
    """The migration that the database is at."""
    return cast(str | None, await session.scalar(text("SELECT max(version_num) FROM alembic_version")))
