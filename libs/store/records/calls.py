"""Model calls: the gateway's durable record, and what the gateway reads back."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import NamedTuple

import orjson
from psycopg.types.json import Json as JsonColumn
from psycopg.types.json import Jsonb as JsonbColumn
from sqlalchemy import ARRAY, Text, all_, literal, select

from leyden.libs.contracts.config import EmbeddingModel, Override, Policy, Role, RunConfig
from leyden.libs.contracts.conversation import Dialect, Json, Turn, turn_json
from leyden.libs.contracts.states import CallStatus, Continuation
from leyden.libs.store import tables
from leyden.libs.store.database import BadValue, Database, ReadSession, copy_into, copy_rows
from leyden.libs.store.policies import further_policies
from leyden.libs.store.records.chains import FullCall, MissingParent, full_calls

# Postgres stores no NUL in JSON; the escape counts only after an even number of backslashes.
_NUL = re.compile(rb"(?<!\\)((?:\\\\)*)\\u0000")


@dataclass(frozen=True, slots=True)
class NewCall:
    """One row of `model_calls`, columns in the table's words; arrays as bytes.

    A call with a parent, an earlier and durable call of its attempt, holds only what it adds: `turns` follow the first
    `shared_turns` turns of the parent (its turns, then its answer), `prompt_ids` the first `shared_tokens` tokens (its
    prompt, then its sampled tokens); `tools` is None where they are the parent's.
    """

    run_id: str
    id: str
    rollout_id: str
    attempt: int
    request_id: str
    choice: int
    sequence: int
    status: CallStatus
    trainable: bool
    untrainable_reason: str | None
    masks_forced: bool
    request_sha256: bytes
    dialect: Dialect
    request: Json
    parent_call_id: str | None
    shared_turns: int
    shared_tokens: int
    turns: Sequence[Turn]
    tools: Sequence[Json] | None
    answer: Turn | None
    prompt_ids: bytes | memoryview
    sampled_ids: bytes
    generator_logprobs: bytes
    policy_versions: bytes
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    min_policy_version: int | None
    max_policy_version: int | None
    temperature: float
    finish_reason: str | None
    trace_id: str | None
    parent_span_id: str | None
    agent: str
    agent_name: str | None
    role: str | None
    continuation: Continuation
    queued_seconds: float
    first_token_seconds: float | None
    total_seconds: float
    asked: Json | None = None
    written_ids: bytes | None = None
    routed_experts: bytes | None = None


class CallDefaults(NamedTuple):
    """A run's temperature of calls that set none, 1 (OpenAI's default) unless it says so, its choice of
    `training.constrained_calls`, its roles, and the names of those that train (None: every call trains).

    `policy_ids`: by role the policy that answers, for roles that have another one than the run's own; `frozen`:
    the roles whose policy does not train; `provided`: by role the policy of a provider; `override`: sampling of the
    policies that train, in training rollouts; `rerolls`: whether the run has re-rolls; `embeddings`: the model of a
    provider that makes them; `replays_routing`: the trainer replays the experts that engines chose.
    """

    temperature: float
    constrained_calls: str
    roles: Sequence[Role] = ()
    train: Collection[str] | None = None
    policy_ids: Mapping[str, str] = MappingProxyType({})
    frozen: Collection[str] = ()
    provided: Mapping[str, Policy] = MappingProxyType({})
    override: Override | None = None
    refuses_hosted_tools: bool = False
    rerolls: bool = False
    embeddings: EmbeddingModel | None = None
    replays_routing: bool = False

    def policy_id(self, run_id: str, role: str | None) -> str:
        """The run whose policy answers calls of a role. Args: run_id: the run with these defaults."""
        return self.policy_ids.get(role or "", run_id)


_TYPES = {
    "attempt": "int4", "choice": "int4", "sequence": "int8", "trainable": "bool", "masks_forced": "bool",
    "request_sha256": "bytea",
    "request": "jsonb", "shared_turns": "int4", "shared_tokens": "int4", "turns": "jsonb", "tools": "json",
    "answer": "jsonb", "prompt_ids": "bytea", "sampled_ids": "bytea", "generator_logprobs": "bytea",
    "policy_versions": "bytea", "prompt_tokens": "int4", "completion_tokens": "int4", "cached_tokens": "int4",
    "min_policy_version": "int4", "max_policy_version": "int4", "temperature": "float8", "queued_seconds": "float8",
    "first_token_seconds": "float8", "total_seconds": "float8", "asked": "jsonb",
    "written_ids": "bytea", "routed_experts": "bytea",
}  # fmt: skip
"""Types of the columns that are not text."""
_LIMITS = {"int4": 2**31, "int8": 2**63}
_COLUMNS = {field.name: _TYPES.get(field.name, "text") for field in fields(NewCall)}


async def write_calls(database: Database, calls: Sequence[NewCall], may_exist: bool = False) -> None:
    """Makes the calls durable in one transaction, all or none.

    Args: may_exist: an earlier try may have committed; calls whose id exists stay as they are
    Raises: StoreAway: try again with `may_exist`; Refused
    """
    types, rows = list(_COLUMNS.values()), map(_row, calls)
    if not may_exist:
        async with database.statements() as connection:
            await copy_into(connection, "model_calls", list(_COLUMNS), rows, types=types)
        return
    async with database.session() as session:
        await copy_rows(session, "model_calls", list(_COLUMNS), rows, types=types, on_conflict_do_nothing=True)


def _row(call: NewCall) -> list[object]:
    return [_value(getattr(call, name), kind) for name, kind in _COLUMNS.items()]


def _value(value: object, kind: str) -> object:
    if value is None:
        return None
    # psycopg would wrap it around.
    if isinstance(value, int) and kind in _LIMITS and not -_LIMITS[kind] <= value < _LIMITS[kind]:
        raise BadValue(f"{value} is no {kind}")
    match kind:
        case "json":
            return JsonColumn(value, storable_json)
        case "jsonb":
            return JsonbColumn(value, storable_json)
        case "text":
            return str(value)
    return value


def storable_json(document: object) -> bytes:
    """The JSON text of a document with turns in it, each U+0000 replaced by U+FFFD."""
    text = orjson.dumps(document, default=turn_json, option=orjson.OPT_PASSTHROUGH_DATACLASS)
    return _NUL.sub(rb"\1\\ufffd", text) if rb"\u0000" in text else text


async def completed_calls(
    session: ReadSession, run_id: str, rollout_id: str, attempt: int, *, except_ids: Collection[str]
) -> list[tuple[tables.ModelCall, FullCall]]:
    """Completed calls of an attempt, oldest first, choices of a request in order, without those that lack a parent.

    Args: except_ids: calls that the reader has already
    """
    table = tables.ModelCall
    rows = await session.scalars(
        select(table)
        .where(
            table.run_id == run_id,
            table.rollout_id == rollout_id,
            table.attempt == attempt,
            table.id != all_(literal(list(except_ids), ARRAY(Text))),
            table.status == CallStatus.COMPLETED,
        )
        .order_by(table.sequence, table.choice)
    )
    calls = rows.all()
    found = zip(calls, await full_calls(session, calls), strict=True)
    return [(call, full) for call, full in found if not isinstance(full, MissingParent)]


EVER = (0.0, 2.0**33)
"""Between these moments, in seconds since the epoch, every call arrives."""


async def answered_requests(
    session: ReadSession,
    run_id: str,
    rollout_id: str,
    attempt: int,
    *,
    request_sha256: bytes,
    arrived: tuple[float, float] = EVER,
) -> Sequence[tables.ModelCall]:
    """The completed and refused calls of one body within an attempt, latest request first, its choices in order.

    A refusal is an answer, too. Their rows hold only what each call adds to its parent.

    Args: arrived: between these moments, in seconds since the epoch
    """
    table = tables.ModelCall
    rows = await session.scalars(
        select(table)
        .where(
            table.run_id == run_id,
            table.rollout_id == rollout_id,
            table.attempt == attempt,
            table.request_sha256 == request_sha256,
            table.status.in_((CallStatus.COMPLETED, CallStatus.REFUSED)),
            table.sequence.between(int(arrived[0] * 1e9), int(arrived[1] * 1e9)),
        )
        .order_by(table.sequence.desc(), table.choice)
    )
    return rows.all()


async def calls_by_id(
    session: ReadSession, run_id: str, rollout_id: str, attempt: int, *, ids: Collection[str]
) -> list[tuple[tables.ModelCall, FullCall]]:
    """The completed calls of an attempt that have these ids, without those that lack a parent."""
    table = tables.ModelCall
    rows = await session.scalars(
        select(table).where(
            table.run_id == run_id,
            table.id.in_(ids),
            table.rollout_id == rollout_id,
            table.attempt == attempt,
            table.status == CallStatus.COMPLETED,
        )
    )
    calls = rows.all()
    found = zip(calls, await full_calls(session, calls), strict=True)
    return [(call, full) for call, full in found if not isinstance(full, MissingParent)]


async def call_defaults(session: ReadSession, run_id: str) -> CallDefaults:
    """Reads what a run's document says of its calls; the defaults where the run is unknown.

    Raises: BrokenDocument
    """
    document = await session.scalar(select(tables.Run.config).where(tables.Run.id == run_id))
    if document is None:
        return CallDefaults(1.0, "leave_out")
    config = RunConfig.stored(document)
    override, roles = config.sampling.override, config.roles
    of_roles = {role.name: config.policies[role.policy] for role in roles if role.policy is not None}
    return CallDefaults(
        1.0 if config.sampling.temperature is None else config.sampling.temperature,
        config.training.constrained_calls,
        roles,
        config.train,
        await _policy_ids(session, run_id, roles) if config.policies else {},
        [name for name, policy in of_roles.items() if not policy.trains],
        {name: policy for name, policy in of_roles.items() if policy.provider is not None},
        None if override == "keep" else override,
        config.group_agents[0].agent.hosted_tools == "refuse",
        config.credit.baseline.type == "monte_carlo",
        config.embeddings,
        config.training.routing_replay,
    )


async def _policy_ids(session: ReadSession, run_id: str, roles: Sequence[Role]) -> dict[str, str]:
    found = await further_policies(session, run_id)
    return {role.name: found[role.policy].id for role in roles if role.policy in found}
