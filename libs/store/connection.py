"""Connections to Postgres that never wait for ever: a server that is silent is a server that is away."""

from __future__ import annotations

import asyncio
import os
from typing import Any, TypeVar

from psycopg import AsyncConnection, OperationalError, waiting
from psycopg.abc import PQGen
from psycopg.conninfo import conninfo_to_dict

RV = TypeVar("RV")

CONNECT_SECONDS = 5
"""Per address; `?connect_timeout=…` in the DSN overrides it, as every setting of libpq may be given there."""
IDLE_TRANSACTION_SECONDS = 300
"""A process that stands still inside a transaction loses it, and with it the locks that others wait for."""

_KEEPALIVES = {
    # A server that vanished without a word is noticed within seconds.
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}
_SERVER = {
    "timezone": "UTC",
    "idle_in_transaction_session_timeout": f"{IDLE_TRANSACTION_SECONDS}s",
    # And the other way round: what a vanished client left running or locked ends within seconds.
    "client_connection_check_interval": "5s",
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
}


class BoundedConnection(AsyncConnection[tuple[object, ...]]):
    """A connection whose every wait for the server ends: with the answer, or with the connection.

    psycopg would politely cancel the statement first, which takes another ten seconds where nobody answers. Closing is
    as safe: the server rolls back what was not committed.
    """

    answer_seconds: float = 30.0
    _ear: _Ear | None = None

    def listen(self) -> None:
        """Keeps it registered with the running loop until it is closed: for one that is asked many times a second."""
        self._ear = _Ear(self.pgconn.socket)

    async def close(self) -> None:
        self._close_ear()
        await super().close()

    async def wait(self, gen: PQGen[RV], interval: float = 0.1, timeout: float | None = None) -> RV:  # noqa: ASYNC109 - psycopg's own
        """The result of a step of the protocol.

        Raises: psycopg.OperationalError: no answer within `answer_seconds`; the connection is closed
        """
        if timeout is not None:
            return await super().wait(gen, interval, timeout)
        try:
            if self._ear is not None:
                return await self._ear.result(gen, self.answer_seconds)
            async with asyncio.timeout(self.answer_seconds):
                return await waiting.wait_async(gen, self.pgconn.socket, interval=interval)
        except TimeoutError:
            self._cut()
            message = f"Postgres did not answer within {self.answer_seconds:g} s, so the connection was closed"
            raise OperationalError(message) from None
        except asyncio.CancelledError:
            self._cut()
            raise

    def _cut(self) -> None:
        self.pgconn.finish()
        self._close_ear()

    def _close_ear(self) -> None:
        if self._ear is not None:
            self._ear.close()
            self._ear = None


class _Ear:
    """Hears when the server has sent something.

    psycopg would register with the loop, and set a timer aside, anew for every wait: a third of a lone row.
    """

    def __init__(self, descriptor: int) -> None:
        self._loop = asyncio.get_running_loop()
        # One of its own: libpq may close the other at any time, and its number be another's.
        self._descriptor = os.dup(descriptor)
        self._heard: asyncio.Future[None] | None = None
        self._is_open = False

    def close(self) -> None:
        self._shut()
        os.close(self._descriptor)

    async def result(self, gen: PQGen[RV], seconds: float) -> RV:
        """What a step of the protocol comes to.

        Raises: TimeoutError: it took longer than this
        """
        deadline = self._loop.time() + seconds
        try:
            state = next(gen)
            while True:
                await self._ready(state, deadline)
                state = gen.send(waiting.READY_RW if state & waiting.WAIT_W else waiting.READY_R)
        except StopIteration as end:
            result: RV = end.value
            return result

    async def _ready(self, state: waiting.Wait, deadline: float) -> None:
        if not self._is_open:
            self._loop.add_reader(self._descriptor, self._hear)
            self._is_open = True
        self._heard = heard = self._loop.create_future()
        if state & waiting.WAIT_W:
            self._loop.add_writer(self._descriptor, self._hear)
        timer = self._loop.call_at(deadline, _late, heard)
        try:
            await heard
        finally:
            timer.cancel()
            if state & waiting.WAIT_W:
                self._loop.remove_writer(self._descriptor)
            self._heard = None

    def _hear(self) -> None:
        if self._heard is None:
            # Nobody has asked: it stays until someone does, and would be told again and again.
            self._shut()
        elif not self._heard.done():
            self._heard.set_result(None)

    def _shut(self) -> None:
        if self._is_open:
            self._loop.remove_reader(self._descriptor)
            self._is_open = False


def _late(heard: asyncio.Future[None]) -> None:
    if not heard.done():
        heard.set_exception(TimeoutError())


async def connect(dsn: str = "", *, answer_seconds: float, **arguments: Any) -> BoundedConnection:
    """An open connection; see `arguments` for those that every connection of ours has.

    Raises: psycopg.OperationalError: Postgres is away
    """
    connection = await BoundedConnection.connect(dsn, **arguments)
    # Later than statement_timeout, so that a server that lives says itself what took too long.
    connection.answer_seconds = answer_seconds + 1.0
    return connection


def arguments(dsn: str, client: str, answer_seconds: float) -> dict[str, Any]:
    """What libpq is told beside the DSN; where the DSN says otherwise, it wins.

    Args: client: `application_name`, by which an operator knows whose connection it is
    """
    server = {"statement_timeout": f"{round(answer_seconds * 1000)}ms", **_SERVER}
    ours: dict[str, Any] = {
        "application_name": client,
        "connect_timeout": CONNECT_SECONDS,
        "options": " ".join(f"-c {name}={value}" for name, value in server.items()),
        # After a failover: neither the old primary nor a replica, which would refuse every write.
        "target_session_attrs": "read-write",
        **_KEEPALIVES,
    }
    given = conninfo_to_dict(dsn.replace("postgresql+psycopg://", "postgresql://", 1))
    return {name: value for name, value in ours.items() if name not in given}
