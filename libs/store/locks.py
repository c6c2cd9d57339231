"""Advisory locks on a connection of their own: held exactly as long as the connection lives."""

from __future__ import annotations

import hashlib

from psycopg import OperationalError

from leyden.libs.store.connection import BoundedConnection, arguments, connect


class LockLost(Exception):
    """The connection that held the lock is gone, and with it the lock: stop acting."""


class AdvisoryLock:
    """One named lock of a database, held by at most one connection.

    Args: name: such as `controller` or `trainer:run-abc`; lower-level code sees its first 63 bits of SHA-256.
        client, answer_seconds: as for `Database`
    """

    def __init__(self, dsn: str, name: str, client: str = "leyden", *, answer_seconds: float = 30.0) -> None:
        self.name = name
        self._dsn = dsn
        self._client = client
        self._answer_seconds = answer_seconds
        self._key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) >> 1
        self._connection: BoundedConnection | None = None

    async def acquire(self) -> bool:
        """Takes the lock if nobody holds it.

        Raises: psycopg.OperationalError: Postgres is away.
        """
        if self._connection is None:
            # Its keepalives: a connection that died silently releases the lock on the server within half a minute.
            self._connection = await connect(
                self._dsn,
                answer_seconds=self._answer_seconds,
                autocommit=True,
                **arguments(self._dsn, self._client, self._answer_seconds),
            )
        try:
            row = await (await self._connection.execute("SELECT pg_try_advisory_lock(%s)", (self._key,))).fetchone()
        except OperationalError:
            await self.release()
            raise
        return bool(row and row[0])

    async def check(self) -> None:
        """Proves that the connection lives.

        Raises: LockLost: it does not.
        """
        try:
            if self._connection is None:
                raise LockLost(f"the lock {self.name!r} is not held")
            await self._connection.execute("SELECT 1")
        except OperationalError as error:
            raise LockLost(f"the connection that held the lock {self.name!r} is gone") from error

    async def release(self) -> None:
        """Closes the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
