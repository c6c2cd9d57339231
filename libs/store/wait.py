"""Waits for the database, in the init container of a pod: `python -m leyden.libs.store.wait schema`.

`server` waits until Postgres answers, `schema` until it has this code's migrations too. Each new cause of the wait is a
line on stderr; exit status 1 after `--seconds`, so that Kubernetes shows and repeats it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Literal

from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from leyden.libs.service.startup import exit_on_config_error
from leyden.libs.store.database import Database
from leyden.libs.store.schema import SchemaOutdated, check_schema
from leyden.libs.store.settings import StoreSettings

POLL_SECONDS = 1.0


async def wait_for(dsn: str, until: Literal["server", "schema"], seconds: float) -> None:
    """Returns when the database is there.

    Raises: TimeoutError: it is not within so many seconds
    """
    database, reported = Database(dsn, "leyden-wait", pool_size=1), ""
    try:
        async with asyncio.timeout(seconds):
            while cause := await _missing(database, until):
                if cause != reported:
                    sys.stderr.write(f"waiting: {cause}\n")
                    reported = cause
                await asyncio.sleep(POLL_SECONDS)
    finally:
        await database.close()


async def _missing(database: Database, until: Literal["server", "schema"]) -> str | None:
    try:
        if until == "schema":
            await check_schema(database)
        else:
            async with database.engine.connect() as connection:
                await connection.execute(text("SELECT 1"))
    except (SchemaOutdated, SQLAlchemyError, OSError) as error:
        return str(error).splitlines()[0]
    return None


@exit_on_config_error(StoreSettings)
def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("until", choices=("server", "schema"))
    parser.add_argument("--seconds", type=float, default=600.0)
    arguments = parser.parse_args()
    try:
        asyncio.run(wait_for(StoreSettings().database_url, arguments.until, arguments.seconds))
    except TimeoutError:
        raise SystemExit(f"the {arguments.until} is not there after {arguments.seconds:g} s") from None


if __name__ == "__main__":
    main()
