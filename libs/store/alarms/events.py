"""Events of runs for the operator's webhook: written with what they tell, delivered at least once.

judgement ──record_events──▶ due ──delivered──▶ done
                              ▲ └──failed──┐
                              └── a pause ─┴─ after many tries ──▶ given up
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

from sqlalchemy import func, select, text
from sqlalchemy.dialects.postgresql import insert

from leyden.libs.contracts.api.alarms import EventName, RunEvent
from leyden.libs.contracts.states import RunPhase
from leyden.libs.store import tables
from leyden.libs.store.alarms.stored import Judgement, alarm
from leyden.libs.store.database import ReadSession, Session
from leyden.libs.store.policies import policies_by_id

AT_ONCE = 100

_DELIVERED = text("UPDATE webhook_events SET delivered_at = clock_timestamp(), due_at = NULL WHERE id = :id")
_FAILED = text("""
    UPDATE webhook_events SET tries = tries + 1, error = :error,
        due_at = CASE WHEN tries + 1 < :most
            THEN clock_timestamp() + make_interval(secs => least(:longest, :first * power(2, tries))) END
    WHERE id = :id AND due_at IS NOT NULL
    RETURNING due_at
""")


@dataclass(frozen=True)
class Due:
    """An event to deliver now."""

    id: str
    run_id: str
    body: dict[str, Any]
    tries: int


async def record_events(session: Session, run_id: str, judged: Judgement) -> None:
    """Writes the events of a judgement in its transaction: alarms that began or ended, and the end of the run.

    A repeat writes no second one; idempotency key: the run with its end, or with the number of the alarm and its end.
    """
    run, status = await session.get_one(tables.Run, run_id), await session.get_one(tables.RunStatus, run_id)
    policy = (await policies_by_id(session, [run_id]))[run_id]
    # A policy ends with its run.
    ends = judged.ended_as in {RunPhase.COMPLETED, RunPhase.FAILED} and policy.is_own
    told: list[tuple[str, str, tables.Alarm | None]] = [
        (f"{run_id}.alarm.{row.number}", "stalled" if row.name == "stalled" else "alarm", row) for row in judged.raised
    ]
    told += [(f"{run_id}.alarm.{row.number}.ended", "alarm_ended", row) for row in judged.ended]
    if ends:
        told.append((f"{run_id}.{status.phase}", status.phase, None))
    for event_id, event, row in told:
        body = RunEvent(
            id=event_id,
            event=cast(EventName, event),
            at=datetime.now(tz=UTC),
            run_id=policy.run_id,
            policy=policy.name or None,
            run_name=run.name,
            phase=status.phase,
            reason=status.reason,
            alarm=None if row is None else alarm(row),
        )
        values = {"id": event_id, "run_id": run_id, "event": event, "body": body.model_dump(mode="json")}
        await session.execute(insert(tables.WebhookEvent).values(**values).on_conflict_do_nothing())


async def due_events(session: ReadSession) -> Sequence[Due]:
    """The events to deliver now, oldest first."""
    table = tables.WebhookEvent
    query = select(table).where(table.due_at <= func.clock_timestamp()).order_by(table.due_at, table.id).limit(AT_ONCE)
    return [Due(row.id, row.run_id, row.body, row.tries) for row in await session.scalars(query)]


async def mark_delivered(session: Session, event_id: str) -> None:
    """Ends the delivery of an event."""
    await session.execute(_DELIVERED, {"id": event_id})


async def mark_failed(session: Session, event_id: str, error: str, *, first: float, longest: float, most: int) -> bool:
    """Plans the next delivery; whether there is one.

    Args: first, longest: seconds of the pause after the first failure, which doubles, and the bound on it; most: tries
        after which the event is given up
    """
    names = {"id": event_id, "error": error.replace("\0", "\ufffd"), "first": first, "longest": longest, "most": most}
    return (await session.execute(_FAILED, names)).scalar() is not None
