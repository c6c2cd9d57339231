"""Brings a database to the schema of `leyden.libs.store.tables`.

`python -m leyden.libs.store.migrate` upgrades the database of LEYDEN_DATABASE_URL; `--new MESSAGE` writes the
migration that would bring it to the current models, dated today, for a person to review.
"""

from __future__ import annotations

import argparse
from datetime import UTC, datetime

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.pool import NullPool

from leyden.libs.store.database import sqlalchemy_url
from leyden.libs.store.schema import MIGRATIONS
from leyden.libs.store.settings import StoreSettings

# Any number, as long as nothing else locks it: "leyden" in ASCII.
_LOCK = 0x6C657964656E


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


def write_migration(dsn: str, message: str) -> None:
    """Writes the difference between the database, which must be migrated, and the models as a new file."""
    with _connect(dsn) as connection, connection.begin():
        today = datetime.now(tz=UTC).strftime("%Y%m%d_%H%M")
        command.revision(_config(connection), message=message, autogenerate=True, rev_id=today)


def _connect(dsn: str) -> Connection:
    return create_engine(sqlalchemy_url(dsn), poolclass=NullPool, connect_args={"connect_timeout": 10}).connect()


def _config(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
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
