"""Brings a database to the schema of `libs.store.tables`.

`python -m libs.store.migrate` upgrades the database of LEYDEN_DATABASE_URL; `--new MESSAGE` writes the migration that
would bring it to the current models, dated today, for a person to review.
"""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.pool import NullPool

from libs.store.database import Database, sqlalchemy_url
from libs.store.settings import StoreSettings

_FOLDER = Path(__file__).parent / "migrations"
# Any number, as long as nothing else locks it: "leyden" in ASCII.
_LOCK = 0x6C657964656E


class SchemaOutdated(Exception):
    """The database is not at the schema this code needs: run `leyden up` or `python -m libs.store.migrate`."""


def migrate(dsn: str, revision: str = "head") -> None:
    """Upgrades to `revision` in one transaction; nothing happens when there. Callers at once wait for the first."""
    with _connect(dsn) as connection, connection.begin():
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        command.upgrade(_config(connection), revision)


def downgrade(dsn: str, revision: str) -> None:
    """Takes back every migration after `revision` (`base` for all)."""
    with _connect(dsn) as connection, connection.begin():
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        command.downgrade(_config(connection), revision)


async def check_schema(database: Database) -> None:
    """Returns when the database is at the newest migration; for readiness.

    Raises: SchemaOutdated: it is older, newer, or empty.
    """
    async with database.engine.connect() as connection:
        found = await connection.run_sync(lambda sync: MigrationContext.configure(sync).get_current_revision())
    if found != newest_revision():
        raise SchemaOutdated(
            f"the database is at schema {found}, this code needs {newest_revision()}: run python -m libs.store.migrate"
        )


def newest_revision() -> str:
    """The revision of the last migration file."""
    revision = ScriptDirectory(str(_FOLDER)).get_current_head()
    assert revision is not None
    return revision


def write_migration(dsn: str, message: str) -> None:
    """Writes the difference between the database, which must be migrated, and the models as a new file."""
    with _connect(dsn) as connection, connection.begin():
        today = datetime.now(tz=UTC).strftime("%Y%m%d_%H%M")
        command.revision(_config(connection), message=message, autogenerate=True, rev_id=today)


def _connect(dsn: str) -> Connection:
    return create_engine(sqlalchemy_url(dsn), poolclass=NullPool, connect_args={"connect_timeout": 10}).connect()


def _config(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(_FOLDER))
    config.set_main_option("file_template", "%%(rev)s_%%(slug)s")
    config.attributes["connection"] = connection
    return config


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--new", metavar="MESSAGE", help="write a migration instead of applying them")
    arguments = parser.parse_args()
    dsn = StoreSettings().database_url
    if not dsn:
        parser.error("set LEYDEN_DATABASE_URL to postgresql://user:password@host/name")
    if arguments.new:
        write_migration(dsn, arguments.new)
    else:
        migrate(dsn)


if __name__ == "__main__":
    main()
