"""Checks whether gateway, collector and store answer, so that their absence never counts as an agent's failure.

A listening socket accepts connections even while no process serves it. So a check sends a request, which only a
process answers, over a connection that stays open: a process that dies cuts it, and the next check needs a new one.
A server that announces the end of the connection in its answer, as nginx does after 1,000 requests, has not died.

The store is checked because gateway and collector hold requests while it is away, and then refuse them: such a refusal
leaves no record of whose failure it was. They hold for longer than a check takes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import aiohttp
from yarl import URL

from leyden.libs.contracts.states import OutcomeKind
from leyden.libs.queue.leases import Outcome
from leyden.libs.store.database import StoreAway
from leyden.libs.telemetry import RateLimitedLogger, logger

log = logger()
limited_log = RateLimitedLogger(log)

CHECK_SECONDS = 0.5
ANSWER_SECONDS = 5.0
UNAUTHORIZED = 401
UNWATCHED = "the agent failed, and this process did not yet watch gateway and collector when it began"
UNWATCHED_ENDPOINT = "not watched"


class EndpointMonitor:
    """Remembers when an endpoint of agents, or the store behind them, did not answer. Belongs to the running loop.

    Args: urls: the gateway's first; ping_store: raises while the store does not answer
    Attributes: watching_since: of `time.monotonic`: nothing is known of the time before
    """

    def __init__(self, urls: Sequence[str], ping_store: Callable[[], Awaitable[object]]) -> None:
        self._endpoints = [_Endpoint(url) for url in urls]
        self._checked: list[_Endpoint | _Store] = [*self._endpoints, _Store(ping_store)]
        self.watching_since = time.monotonic()

    async def run(self) -> None:
        """Checks all the time."""
        async with asyncio.TaskGroup() as group:
            for one in self._checked:
                group.create_task(_check_for_ever(one))

    async def refuses_key(self, url: str, key: str) -> bool:
        """Returns whether the gateway answers 401 to an attempt's key: then it has other keys than this runner.

        Args: url: of a route that takes the key; key: bearer, which goes to no other address and over no connection
            that is less safe than the URL says
        """
        timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
        headers = {"authorization": f"Bearer {key}"}
        with suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
                session.get(url, allow_redirects=False) as answer,
            ):
                return answer.status == UNAUTHORIZED
        return False

    async def check(self) -> None:
        """Checks once more, beside `run`."""
        await asyncio.gather(*(one.check() for one in self._checked))

    def down_since(self, moment: float) -> str | None:
        """An endpoint that was down at this moment of `time.monotonic` or later; None when all answered."""
        return next((one.name for one in self._checked if one.last_down is not None and one.last_down >= moment), None)

    async def gateway_down_since(self, moment: float) -> float | None:
        """Checks the gateway once more. Returns when it was last down, or may have been, unwatched; None where it was
        not since this moment. Both by `time.monotonic`."""
        gateway = self._endpoints[0]
        await gateway.check()
        last = self.watching_since if gateway.last_down is None else gateway.last_down
        return None if last < moment else last

    async def close(self) -> None:
        """Closes the connections."""
        for endpoint in self._endpoints:
            await endpoint.close()


class _Endpoint:
    """One address, and the last moment at which it did not answer.

    All checks share one connection: a second connection means that the first one was cut, so the process died in
    between, however soon another one serves; unless the last answer announced that the first one ends.
    """

    def __init__(self, url: str) -> None:
        self._url = URL(url).origin()
        self.name = f"{self._url.host}:{self._url.port}"
        self.last_down: float | None = None
        self._cuts = 0
        # The first connection, and the one after an announced end.
        self._may_connect = True
        trace = aiohttp.TraceConfig()
        trace.on_connection_create_start.append(self._count_connection)
        self._session = aiohttp.ClientSession(
            # Without a check of certificates: no secret is sent, and an endpoint that agents trust may be none that
            # this process trusts.
            connector=aiohttp.TCPConnector(limit=1, ssl=False),
            timeout=aiohttp.ClientTimeout(total=ANSWER_SECONDS),
            trace_configs=[trace],
        )

    async def check(self) -> None:
        """Asks once. Any answer proves a process."""
        before = self._cuts
        try:
            async with self._session.head(self._url, allow_redirects=False) as answer:
                self._may_connect = _ends_connection(answer)
        except (aiohttp.ClientError, OSError, TimeoutError):
            self._may_connect = False
            self._mark_down()
        else:
            if self._cuts > before:
                # Until now, for attempts that started meanwhile.
                self._mark_down()

    async def close(self) -> None:
        await self._session.close()

    async def _count_connection(self, *_: object) -> None:
        if not self._may_connect:
            self._cuts += 1
        self._may_connect = False

    def _mark_down(self) -> None:
        self.last_down = time.monotonic()
        log.info("endpoint down", endpoint=self.name)


def _ends_connection(answer: aiohttp.ClientResponse) -> bool:
    """Whether the server closes the connection after this answer."""
    words = {word.strip().lower() for word in ",".join(answer.headers.getall("connection", [])).split(",")}
    return "close" in words or (answer.version == aiohttp.HttpVersion10 and "keep-alive" not in words)


class _Store:
    """The store, and the last moment at which it was away."""

    name = "the store"

    def __init__(self, ping: Callable[[], Awaitable[object]]) -> None:
        self._ping = ping
        self.last_down: float | None = None

    async def check(self) -> None:
        """Asks once."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._ping()
        except (StoreAway, TimeoutError) as error:
            # After the question, and so for attempts that started while it was asked.
            self.last_down = time.monotonic()
            limited_log.warning("store away", cause=str(error) or f"no answer within {ANSWER_SECONDS:g} s")


async def _check_for_ever(one: _Endpoint | _Store) -> None:
    while True:
        await one.check()
        await asyncio.sleep(CHECK_SECONDS)


async def attribute_failure(outcome: Outcome, started: float, endpoints: EndpointMonitor) -> Outcome:
    """The outcome, or `infra_error` when an agent failed while one of its endpoints was down, or may have been.

    One that ended well notes when the gateway was down: an agent may have caught that error. Without a reward it also
    keeps the endpoint's name: a reward may have come in another way. Time that nobody watched counts as down.

    Args: started: when the agent began, of `time.monotonic`, be it before this process
    """
    was_watched = started >= endpoints.watching_since
    is_failure = outcome.kind in {OutcomeKind.AGENT_ERROR, OutcomeKind.TIMEOUT}
    if is_failure and not was_watched:
        return replace(outcome, kind=OutcomeKind.INFRA_ERROR, detail=f"{UNWATCHED} ({outcome.detail})")
    if outcome.kind is OutcomeKind.SUCCEEDED:
        outcome = replace(outcome, gateway_down_at=await endpoints.gateway_down_since(started))
    if not is_failure and (outcome.kind is not OutcomeKind.SUCCEEDED or outcome.reward is not None):
        return outcome
    await endpoints.check()
    down = endpoints.down_since(started) or (None if was_watched else UNWATCHED_ENDPOINT)
    if down is None:
        return outcome
    if not is_failure:
        return replace(outcome, endpoint_down=down)
    detail = f"{down} did not answer while the agent ran ({outcome.kind}: {outcome.detail})"
    return replace(outcome, kind=OutcomeKind.INFRA_ERROR, detail=detail)
