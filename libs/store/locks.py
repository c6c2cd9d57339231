"""Advisory locks, each on its own connection: the server releases the lock when the connection ends."""

from __future__ import annotations

import hashlib

from leyden.libs.store.database import BoundedConnection, StoreAway, connect, connect_arguments, store_errors


class LockLost(Exception):
    """The connection of the lock is gone, and with it the lock: stop acting."""


class AdvisoryLock:
    """One named lock of a database, held by at most one connection.

    Args: name: such as `controller` or `trainer:run-abc`; Postgres knows it by 63 bits of its SHA-256; client,
        answer_seconds: as for `Database`
    """

    def __init__(self, dsn: str, name: str, client: str = "leyden", *, answer_seconds: float = 30.0) -> None:
        self.name = name
        self._dsn = dsn
        self._client = client
        self._answer_seconds = answer_seconds
        self._key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) >> 1
        self._connection: BoundedConnection | None = None

    async def acquire(self) -> bool:
        """True when this connection holds the lock now.

        Raises: StoreAway
        """
        try:
            with store_errors():
                if self._connection is None:
                    # Keepalives: the server releases the lock of a vanished client within half a minute.
                    self._connection = await connect(
                        self._dsn,
                        answer_seconds=self._answer_seconds,
                        autocommit=True,
                        **connect_arguments(self._dsn, self._client, self._answer_seconds),
                    )
                cursor = await self._connection.execute("SELECT pg_try_advisory_lock(%s)", (self._key,))
                row = await cursor.fetchone()
        except StoreAway:
            await self.release()
            raise
        return bool(row and row[0])

    async def check(self) -> None:
        """Returns while the connection lives.

        Raises: LockLost
        """
        if self._connection is None:
            raise LockLost(f"the lock {self.name!r} is not held")
        try:
            with store_errors():
                await self._connection.execute("SELECT 1")
        except StoreAway as error:
            raise LockLost(f"the connection that held the lock {self.name!r} is gone") from error

    async def release(self) -> None:
        """Closes the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
