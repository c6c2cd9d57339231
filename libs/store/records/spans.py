"""Telemetry: spans and rewards, written in bulk by the collector so that a repeat changes nothing.

The gateway writes the spans of embeddings.

Refused            the store will never take these rows
  AttemptEnded     their attempt does not run any more
  RewardConflict   the key of a reward has given another reward before
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import psycopg
from sqlalchemy import and_, func, or_, text
from sqlalchemy.dialects.postgresql import Insert, insert

from leyden.libs.contracts.states import GATEWAY_SCOPE
from leyden.libs.faults import fault_point
from leyden.libs.store import tables
from leyden.libs.store.attempts import AttemptKey, lock_running_attempts
from leyden.libs.store.database import Database, ReadSession, Refused, Session, copy_rows

ENDPOINT = "endpoint"
"""Source of rewards that an agent sent to the reward endpoint; there a key with two rewards is a mistake."""

REQUEST_SHA256 = "leyden.request_sha256"
"""Attribute of the gateway's spans: the digest of the request in hex, by which a repeat is known."""
TRUNCATED = "leyden.truncated"
"""Attribute of a span that has lost attributes or parts of long ones."""

FEEDBACK = "feedback"
"""Source of values for components that are `from: otlp`: rows of `feedback`, not of `rewards`."""

# The time of a value is that of its event: exporters send spans when they end, and log records apart from them. It is
# never after its arrival, and a microsecond orders values of one time.
_GIVE = text("""
    INSERT INTO feedback (rollout_id, key, attempt, run_id, component, value, created_at)
    SELECT rollout_id, 'otlp:' || attempt || ':' || key, attempt, run_id, name, value,
           at + row_number() OVER (PARTITION BY rollout_id, attempt, at ORDER BY time_ns, place)
               * interval '1 microsecond'
    FROM (
        SELECT *, least(statement_timestamp(),
                        timestamptz 'epoch' + nullif(time_ns, 0) / 1000 * interval '1 microsecond') AS at
        FROM unnest(CAST(:rollout_ids AS text[]), CAST(:attempts AS integer[]), CAST(:keys AS text[]),
                    CAST(:run_ids AS text[]), CAST(:names AS text[]), CAST(:values AS double precision[]),
                    CAST(:times AS bigint[]))
            WITH ORDINALITY AS v (rollout_id, attempt, key, run_id, name, value, time_ns, place)) AS given
    ON CONFLICT DO NOTHING
""")

_OTLP_COMPONENTS = text("""
    SELECT jsonb_path_query(config, '$.reward.components[*] ? (@.from == "otlp").name') #>> '{}' FROM runs
    WHERE id = :run
""")

_STORED = text("""
    SELECT r.rollout_id, r.attempt, r.key, r.run_id, r.source, r.name, r.value, r.response_id, r.tool_call_id
    FROM unnest(CAST(:rollout_ids AS text[]), CAST(:attempts AS integer[]), CAST(:keys AS text[]))
        AS asked (rollout_id, attempt, key)
    JOIN rewards r ON r.rollout_id = asked.rollout_id AND r.attempt = asked.attempt AND r.key = asked.key
""")


_STORED_SPANS = text("""
    SELECT count(*), coalesce(sum(pg_column_size(attributes)), 0) FROM spans
    WHERE run_id = :run AND rollout_id = :rollout AND attempt = :attempt
""")
_HAS_REQUEST = text(f"""
    SELECT EXISTS (
        SELECT FROM spans WHERE run_id = :run AND rollout_id = :rollout AND attempt = :attempt
        AND scope = '{GATEWAY_SCOPE}' AND attributes ->> '{REQUEST_SHA256}' = :digest)
""")  # noqa: S608  # constants alone
_CALLS = "FROM model_calls WHERE run_id = :run AND rollout_id = :rollout AND attempt = :attempt"
_REQUEST_IDS = text(f"SELECT request_id {_CALLS}")  # constants alone
# One pass over the answers, however many ids are asked for.
_UNKNOWN_TOOL_CALLS = text(f"""
    SELECT unnest(CAST(:ids AS text[]))
    EXCEPT SELECT jsonb_path_query(answer, '$.tool_calls[*].id') #>> '{{}}' {_CALLS}
""")  # constants alone
_STORED_REWARDS = text("""
    SELECT (SELECT count(*) FROM rewards WHERE rollout_id = :rollout AND attempt = :attempt)
         + (SELECT count(*) FROM feedback WHERE rollout_id = :rollout AND attempt = :attempt)
""")


class AttemptEnded(Refused):
    """The attempt of the rows was settled, expired or cancelled before the commit."""


class RewardConflict(Refused):
    """The key of a reward has given another reward before, which stays."""


class NewSpan(NamedTuple):
    """One row of `spans`, columns in the table's words and order of `COPY`. `attributes` is a JSON text."""

    run_id: str
    rollout_id: str
    attempt: int
    trace_id: str
    span_id: str
    parent_span_id: str | None
    name: str
    kind: str
    tool: str | None
    status: str
    error_type: str | None
    tool_call_id: str | None
    response_id: str | None
    start_ns: int
    end_ns: int
    scope: str | None
    attributes: str


class NewReward(NamedTuple):
    """One row of `rewards` or `feedback`. `key` is unique within the attempt. `time_ns` is when it was given, or 0;
    `rewards` has no such column.
    """

    rollout_id: str
    attempt: int
    key: str
    run_id: str
    source: str
    name: str
    value: float
    response_id: str | None
    tool_call_id: str | None
    time_ns: int = 0


class UnknownPlaces(NamedTuple):
    """Ids that no answer of an attempt has."""

    response_ids: set[str]
    tool_call_ids: set[str]

    def of(self, reward: NewReward) -> str | None:
        """The id of a reward that keeps it from its place, with its field; None where it has one.

        The answer's id is its place, which the tool call narrows down to a choice; a tool call alone is a place, too.
        """
        if reward.response_id is not None:
            return f"response_id {reward.response_id!r}" if reward.response_id in self.response_ids else None
        return f"tool_call_id {reward.tool_call_id!r}" if reward.tool_call_id in self.tool_call_ids else None


async def write_telemetry(database: Database, spans: Sequence[NewSpan], rewards: Sequence[NewReward]) -> None:
    """Makes rows durable in one transaction, all or none; rows whose key exists stay as they are, but a reward of
    telemetry takes the place that it lacks.

    Idempotency keys: rollout, attempt, trace and span; rollout, attempt and the reward's key. The transaction locks
    the attempts, so none of them ends before the commit, and all telemetry of an attempt is there when it is settled.

    Raises: StoreAway: try again, a repeat is harmless; Refused
    """
    try:
        await _write(database, spans, rewards, may_exist=False)
    except Refused as error:
        if not isinstance(error.__cause__, psycopg.errors.UniqueViolation):
            raise
        # Exporters rarely send spans again, and the comparison with stored ones doubles the time.
        await _write(database, spans, rewards, may_exist=True)


async def stored_spans(session: ReadSession, run_id: str, rollout_id: str, attempt: int) -> tuple[int, int]:
    """The spans of an attempt and the bytes of their attributes."""
    names = {"run": run_id, "rollout": rollout_id, "attempt": attempt}
    count, size_bytes = (await session.execute(_STORED_SPANS, names)).one()
    return int(count), int(size_bytes)


async def has_request(session: ReadSession, run_id: str, rollout_id: str, attempt: int, digest: str) -> bool:
    """Whether a span of the gateway has the attempt's request with this digest."""
    names = {"run": run_id, "rollout": rollout_id, "attempt": attempt, "digest": digest}
    return bool(await session.scalar(_HAS_REQUEST, names))


async def unknown_places(session: ReadSession, rewards: Sequence[NewReward]) -> UnknownPlaces:
    """The ids that rewards of one attempt name and no answer of it has."""
    names = {"run": rewards[0].run_id, "rollout": rewards[0].rollout_id, "attempt": rewards[0].attempt}
    answers = {one.response_id for one in rewards if one.response_id is not None}
    tool_calls = {one.tool_call_id for one in rewards if one.tool_call_id is not None}
    if answers:
        # An answer's id is its request's with a prefix, such as `chatcmpl-`.
        stored = set(await session.scalars(_REQUEST_IDS, names))
        lengths = {len(one) for one in stored}
        answers = {one for one in answers if stored.isdisjoint(one[-length:] for length in lengths)}
    if tool_calls:
        # It reads whole answers.
        tool_calls = set(await session.scalars(_UNKNOWN_TOOL_CALLS, {**names, "ids": sorted(tool_calls)}))
    return UnknownPlaces(answers, tool_calls)


async def otlp_components(session: ReadSession, run_id: str) -> frozenset[str]:
    """The names of the components that telemetry of a run's agents gives."""
    return frozenset(await session.scalars(_OTLP_COMPONENTS, {"run": run_id}))


async def stored_rewards(session: ReadSession, rollout_id: str, attempt: int) -> int:
    """The rewards that an attempt's agent and its telemetry gave."""
    return await session.scalar(_STORED_REWARDS, {"rollout": rollout_id, "attempt": attempt}) or 0


async def _write(
    database: Database, spans: Sequence[NewSpan], rewards: Sequence[NewReward], *, may_exist: bool
) -> None:
    async with database.session() as session:
        await _lock_attempts(session, spans, rewards)
        if spans:
            await copy_rows(session, "spans", NewSpan._fields, spans, on_conflict_do_nothing=may_exist)
        fault_point("collector.spans_written")
        if own := [_columns(reward) for reward in rewards if reward.source != FEEDBACK]:
            await session.execute(_add_rewards(), own)
        await _give(session, [reward for reward in rewards if reward.source == FEEDBACK])
        await _compare(session, [reward for reward in rewards if reward.source == ENDPOINT])


def _columns(reward: NewReward) -> dict[str, Any]:
    columns = reward._asdict()
    del columns["time_ns"]
    return columns


def _add_rewards() -> Insert:
    """Adds rewards. Telemetry may bring an evaluation twice and its place once, first or last."""
    table, statement = tables.Reward, insert(tables.Reward)
    sent, places = statement.excluded, ("response_id", "tool_call_id")
    lacks = [getattr(table, name).is_(None) & sent[name].is_not(None) for name in places]
    return statement.on_conflict_do_update(
        index_elements=["rollout_id", "attempt", "key"],
        set_={name: func.coalesce(getattr(table, name), sent[name]) for name in places},
        where=and_(table.source != ENDPOINT, sent.source != ENDPOINT, or_(*lacks)),
    )


async def _give(session: Session, feedback: Sequence[NewReward]) -> None:
    if feedback:
        columns = {
            "rollout_ids": [one.rollout_id for one in feedback],
            "attempts": [one.attempt for one in feedback],
            "keys": [one.key for one in feedback],
            "run_ids": [one.run_id for one in feedback],
            "names": [one.name for one in feedback],
            "values": [one.value for one in feedback],
            "times": [one.time_ns for one in feedback],
        }
        await session.execute(_GIVE, columns)


async def _lock_attempts(session: Session, spans: Sequence[NewSpan], rewards: Sequence[NewReward]) -> None:
    attempts = {AttemptKey(span.rollout_id, span.attempt) for span in spans}
    attempts |= {AttemptKey(reward.rollout_id, reward.attempt) for reward in rewards}
    ended = attempts - await lock_running_attempts(session, attempts)
    if ended:
        raise AttemptEnded(f"{len(ended)} attempts have ended")


async def _compare(session: Session, rewards: Sequence[NewReward]) -> None:
    """Raises: RewardConflict: the store has another reward under the key."""
    if not rewards:
        return
    keys = [(one.rollout_id, one.attempt, one.key) for one in rewards]
    columns = map(list, zip(*keys, strict=True))
    found = await session.execute(_STORED, dict(zip(("rollout_ids", "attempts", "keys"), columns, strict=True)))
    stored = {row[:3]: row for row in (NewReward(*row) for row in found)}
    for reward in rewards:
        if (before := stored[reward[:3]]) != reward:
            place = before.response_id or before.tool_call_id or "the rollout"
            raise RewardConflict(
                f"key {before.key!r} has given {before.name!r} = {before.value:g} to {place}, which stays: send"
                " another reward with another key"
            )
