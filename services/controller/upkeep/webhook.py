"""Delivers the events of runs to the operator's webhook, beside the ticks: at least once, each with an id."""

from __future__ import annotations

import httpx
from prometheus_client import Counter

from leyden.libs.faults import fault_point
from leyden.libs.store.alarms.events import Due, due_events, mark_delivered, mark_failed
from leyden.libs.store.database import Database
from leyden.libs.telemetry import RateLimitedLogger, logger
from leyden.services.controller.settings import Settings
from leyden.services.controller.upkeep.rounds import repeat

log = logger()
limited_log = RateLimitedLogger(log)

DELIVERIES = Counter("controller_webhook_deliveries_total", "Deliveries to the webhook.", ["result"])

PAUSE_SECONDS = 1.0
ANSWER_SECONDS = 10.0
FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS, MOST_TRIES = 5.0, 600.0, 20
"""An event whose receiver stays away is given up after some two hours."""


async def deliver_forever(settings: Settings, database: Database) -> None:
    """Delivers what is due, until cancelled; returns at once without a webhook."""
    if settings.webhook_url is None:
        return
    url = settings.webhook_url.get_secret_value()
    async with httpx.AsyncClient(timeout=ANSWER_SECONDS) as http:
        await repeat(lambda: deliver_due(http, url, database), PAUSE_SECONDS, "events not delivered")


async def deliver_due(http: httpx.AsyncClient, url: str, database: Database) -> None:
    """Posts each event that is due, one after another; a 2xx answer accepts it."""
    async with database.read() as session:
        due = await due_events(session)
    for event in due:
        error = await _post(http, url, event)
        fault_point("controller.event_posted")
        async with database.session() as session:
            if error is None:
                await mark_delivered(session, event.id)
                goes_on = False
            else:
                goes_on = await mark_failed(
                    session,
                    event.id,
                    error,
                    first=FIRST_RETRY_SECONDS,
                    longest=LONGEST_RETRY_SECONDS,
                    most=MOST_TRIES,
                )
        DELIVERIES.labels("delivered" if error is None else "failed" if goes_on else "given_up").inc()
        if error is not None:
            limited_log.warning("event not delivered", event_id=event.id, cause=error, again=goes_on)


async def _post(http: httpx.AsyncClient, url: str, event: Due) -> str | None:
    """The cause of a failure; None once the receiver accepted the event. The cause never shows the URL, which may hold
    a secret."""
    try:
        answer = await http.post(url, json=event.body, headers={"idempotency-key": event.id})
    except httpx.HTTPError as error:
        return f"the webhook does not answer ({type(error).__name__})"
    return None if answer.is_success else f"the webhook answers {answer.status_code}"
