"""Deliveries: how long each request to the model waited, and whether its client got the answer.

The gateway writes the row of a request that waits while it waits (ADR 47), and completes it when the answer went out or
the client is gone. A request that the platform failed before it had a call has this row alone. `WAITS` sums the rows of
an attempt up, for the controller, which judges whose failure it was. `RECEIVED` keeps answers that no agent had from
graders.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from sqlalchemy import text

from leyden.libs.contracts.states import CallStatus
from leyden.libs.store.database import Database

BEGIN_SECONDS = 0.25
"""A request that waits for longer has a row while it waits."""
GONE_SECONDS = 10.0
"""A gateway without a sign of life for this long is gone, and its open requests with it."""
RETURN_SECONDS, AWAY_SECONDS = 2.0, 600.0
"""After an outage of the store all gateways look gone: one that was seen within `AWAY_SECONDS` may return within
`RETURN_SECONDS`, with the rows that it held."""
PATIENCE_SECONDS = 60.0
"""So long after its end an attempt is judged by the rows that exist."""
UNREAD = b""
"""The digest of a request that the gateway did not read, or that asks for no call: any later one may repeat it."""


@dataclass(frozen=True, slots=True)
class NewDelivery:
    """One row of `deliveries`, columns in the table's words."""

    run_id: str
    request_id: str
    rollout_id: str
    attempt: int
    gateway: str
    sequence: int
    request_sha256: bytes
    waited_seconds: float | None = None
    seconds: float | None = None
    delivered: bool | None = None


_TYPES = {
    "run_id": "text", "request_id": "text", "rollout_id": "text", "attempt": "integer", "gateway": "text",
    "sequence": "bigint", "request_sha256": "bytea", "waited_seconds": "double precision",
    "seconds": "double precision", "delivered": "boolean",
}  # fmt: skip

# A delivered row stays so: a repeat of the request may get the answer that the first client did not.
_WRITE = f"""
    WITH sign_of_life AS (
        INSERT INTO gateways (name, seen_at)
        VALUES (%(gateway_name)s, clock_timestamp() - make_interval(secs => %(age)s))
        ON CONFLICT (name) DO UPDATE SET seen_at = excluded.seen_at)
    INSERT INTO deliveries AS d ({", ".join(_TYPES)})
    SELECT * FROM unnest({", ".join(f"%({name})s::{kind}[]" for name, kind in _TYPES.items())})
    ON CONFLICT (run_id, request_id) DO UPDATE SET
        waited_seconds = greatest(excluded.waited_seconds, d.waited_seconds),
        seconds = greatest(excluded.seconds, d.seconds),
        delivered = CASE WHEN d.delivered THEN true ELSE coalesce(excluded.delivered, d.delivered) END
"""  # noqa: S608  # constants alone

_FORGET = text("DELETE FROM gateways WHERE name = :gateway OR seen_at < clock_timestamp() - interval '1 day'")

# Whether the controller must wait before it judges attempt a: a gateway has a request of it whose end it has not
# written, or may have one that it has not written at all.
UNSETTLED = f"""
    a.finished_at > clock_timestamp() - interval '{PATIENCE_SECONDS} seconds' AND (
        EXISTS (
            SELECT FROM deliveries q JOIN gateways g ON g.name = q.gateway
            WHERE q.rollout_id = a.rollout_id AND q.attempt = a.number AND q.seconds IS NULL
            AND g.seen_at > clock_timestamp() - interval '{GONE_SECONDS} seconds')
        OR EXISTS (
            SELECT FROM gateways g
            WHERE g.seen_at < a.finished_at + interval '{2 * BEGIN_SECONDS} seconds'
            AND (g.seen_at > clock_timestamp() - interval '{GONE_SECONDS} seconds'
                 OR g.seen_at > clock_timestamp() - interval '{AWAY_SECONDS} seconds'
                 AND a.finished_at > clock_timestamp() - interval '{RETURN_SECONDS} seconds')))
"""  # noqa: S608  # constants alone

# Whether an agent got the answer of its call m, as far as anybody knows. A call that continues an answer has it.
RECEIVED = """(
    NOT EXISTS (SELECT FROM deliveries q WHERE q.run_id = m.run_id AND q.request_id = m.request_id AND NOT q.delivered)
    OR EXISTS (
        SELECT FROM model_calls k
        WHERE k.run_id = m.run_id AND k.rollout_id = m.rollout_id AND k.attempt = m.attempt AND k.parent_call_id = m.id
        AND k.shared_turns > m.shared_turns + jsonb_array_length(m.turns)))"""

# The refusal of a request is its answer.
_ANSWERED = "m.status IN ('completed', 'refused')"

# The requests of attempt a of run r. One that its gateway did not end waited until that gateway's last sign of life. A
# row of 0 seconds says that another gateway delivered the stored answer: the call's own row has its times.
_REQUESTS = f"""
    SELECT coalesce(m.sequence, q.sequence) AS sequence, q.request_sha256,
           coalesce(q.delivered, {_ANSWERED}, false) AS delivered,
           coalesce(CASE WHEN q.seconds > 0 THEN q.waited_seconds END, m.queued_seconds, open.seconds) AS waited,
           coalesce(nullif(q.seconds, 0), m.total_seconds, open.seconds) AS seconds
    FROM deliveries q
    LEFT JOIN gateways g ON g.name = q.gateway
    LEFT JOIN model_calls m ON m.run_id = r.run_id AND m.id = q.request_id
    CROSS JOIN LATERAL (
        SELECT {BEGIN_SECONDS} + greatest(0, extract(
            epoch FROM least(a.finished_at, g.seen_at) - q.created_at))::double precision AS seconds) AS open
    WHERE q.rollout_id = a.rollout_id AND q.attempt = a.number AND q.run_id = r.run_id
    UNION ALL
    SELECT m.sequence, m.request_sha256, {_ANSWERED}, m.queued_seconds, m.total_seconds
    FROM model_calls m
    WHERE m.run_id = r.run_id AND m.rollout_id = a.rollout_id AND m.attempt = a.number AND m.choice = 0
    AND NOT EXISTS (SELECT FROM deliveries q WHERE q.run_id = m.run_id AND q.request_id = m.request_id)
"""  # noqa: S608  # constants alone

# The requests of attempt a of run r that the platform failed: with a call that its gateway gave up, or before they had
# one.
FAILED_REQUESTS = f"""
    SELECT m.sequence, m.request_sha256 FROM model_calls m
    WHERE m.run_id = r.run_id AND m.rollout_id = a.rollout_id AND m.attempt = a.number AND m.choice = 0
    AND m.status = '{CallStatus.FAILED}'
    UNION ALL
    SELECT q.sequence, q.request_sha256 FROM deliveries q
    WHERE q.rollout_id = a.rollout_id AND q.attempt = a.number AND q.run_id = r.run_id AND NOT q.delivered
    AND NOT EXISTS (SELECT FROM model_calls m WHERE m.run_id = q.run_id AND m.id = q.request_id)
"""  # noqa: S608  # constants alone


def _seconds(ranges: str) -> str:
    length = "coalesce(sum(upper(one) - lower(one)), 0) / 1e9"
    return f"(SELECT {length} FROM unnest({ranges}) AS one)::double precision"  # noqa: S608  # constants alone


# Of attempt a of run r: `waited`, the seconds in which its requests waited for the platform; `lost`, those of requests
# that got no answer while no other did, nor a later try of the same; `unanswered`, those of `lost` after the attempt's
# last answer; `answered`, those of its longest request with an answer, its waits left out; `last_answer`, the end of
# its last answer, in nanoseconds. Requests that waited at the
# same time count once, and none waits while another one of the attempt is sampled: otherwise an agent could make any
# failure the platform's by many concurrent requests, which wait for each other. A request's waits stand at its
# beginning here, those in the middle of its answer, too: their sum is known, and the rest is the time of its tokens.
WAITS = f"""
    SELECT {_seconds("waits")} AS waited, {_seconds("lost")} AS lost,
           {_seconds("lost * int8multirange(int8range(last_answer, NULL))")} AS unanswered,
           answered, last_answer
    FROM (
        SELECT coalesce(range_agg(wait), '{{}}') - coalesce(range_agg(sampled), '{{}}') AS waits,
               coalesce(range_agg(wait) FILTER (WHERE NOT delivered AND NOT is_repeated), '{{}}')
               - coalesce(range_agg(sampled), '{{}}') - coalesce(range_agg(span) FILTER (WHERE delivered), '{{}}')
                   AS lost,
               max(upper(span)) FILTER (WHERE delivered) AS last_answer,
               max(seconds - least(waited, seconds)) FILTER (WHERE delivered) AS answered
        FROM (
            SELECT delivered, seconds, waited, int8range(sequence, sequence + (waited * 1e9)::bigint) AS wait,
                   int8range(sequence + (least(waited, seconds) * 1e9)::bigint, sequence + (seconds * 1e9)::bigint)
                       AS sampled,
                   int8range(sequence, sequence + (seconds * 1e9)::bigint, '[]') AS span,
                   coalesce(CASE WHEN request_sha256 = '' THEN max(sequence) FILTER (WHERE delivered) OVER ()
                       ELSE max(sequence) FILTER (WHERE delivered) OVER (PARTITION BY request_sha256) END > sequence,
                       false) AS is_repeated
            FROM ({_REQUESTS}) AS requests
        ) AS intervals
    ) AS sums
"""  # noqa: S608  # constants alone


async def write_deliveries(
    database: Database, gateway: str, rows: Sequence[NewDelivery], *, started_at: float | None = None
) -> None:
    """Writes rows, and the gateway's sign of life with them. Idempotency key: run and request.

    Args:   started_at: the moment of `time.monotonic` up to which `rows` and earlier ones are all; None for now
    Raises: StoreAway, Refused
    """
    merged: dict[tuple[str, str], NewDelivery] = {}
    for row in rows:
        before = merged.get((row.run_id, row.request_id))
        merged[row.run_id, row.request_id] = row if before is None else _merged(before, row)
    # Sorted: two gateways that write the same rows lock them in one order.
    ordered = sorted(merged.values(), key=attrgetter("run_id", "request_id"))
    columns = {name: [getattr(row, name) for row in ordered] for name in _TYPES}
    async with database.statements() as connection:
        now = time.monotonic()
        age = now - (now if started_at is None else started_at)
        await connection.execute(_WRITE, {**columns, "gateway_name": gateway, "age": age})


async def forget_gateways(database: Database, gateway: str) -> None:
    """Deletes the rows of a gateway that has written all, and of those that are gone for a day."""
    async with database.session() as session:
        await session.execute(_FORGET, {"gateway": gateway})


def _merged(before: NewDelivery, after: NewDelivery) -> NewDelivery:
    """The row after both: what was delivered once stays so."""
    return replace(
        after,
        waited_seconds=_greatest(before.waited_seconds, after.waited_seconds),
        seconds=_greatest(before.seconds, after.seconds),
        delivered=before.delivered or (before.delivered if after.delivered is None else after.delivered),
    )


def _greatest(first: float | None, second: float | None) -> float | None:
    return max((value for value in (first, second) if value is not None), default=None)
