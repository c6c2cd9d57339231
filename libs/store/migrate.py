"""Brings a database to the schema of `leyden.libs.store.tables`.

`python -m leyden.libs.store.migrate` upgrades the database of LEYDEN_DATABASE_URL; `--new MESSAGE` writes the
migration that would bring it to the current models, dated today, for a person to review. Migrations hold no comments:
every upgrade writes those of the models.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.pool import NullPool
from sqlalchemy.schema import SetColumnComment, SetTableComment

from leyden.libs.service.startup import exit_on_config_error
from leyden.libs.store.database import sqlalchemy_url
from leyden.libs.store.schema import MIGRATIONS, newest_revision
from leyden.libs.store.settings import StoreSettings
from leyden.libs.store.tables import Base

# Any number, as long as nothing else locks it: "leyden" in ASCII.
_LOCK = 0x6C657964656E


class UnknownSchema(Exception):
    """The database is at a revision that this code does not have: an older or a newer version of Leyden made it."""


def migrate(dsn: str, revision: str = "head") -> str | None:
    """Upgrades to `revision` in one transaction; returns the revision before. Concurrent callers wait.

    Changes nothing in a database that has it, or that a newer version of Leyden has migrated: this code runs on that.
    Raises: UnknownSchema: the message says what to do
    """
    with _locked(dsn) as (connection, config):
        before = MigrationContext.configure(connection).get_current_revision()
        if is_newer(before):
            return before
        _check_revision(before)
        command.upgrade(config, revision)
        if revision == "head" and before != newest_revision():
            _write_comments(connection)
    return before


def is_newer(revision: str | None) -> bool:
    """Whether a newer version of Leyden made the schema."""
    return revision is not None and revision > newest_revision()


def downgrade(dsn: str, revision: str) -> None:
    """Takes back every migration after `revision`.

    Raises: UnknownSchema
    """
    with _locked(dsn) as (connection, config):
        _check_revision(MigrationContext.configure(connection).get_current_revision())
        command.downgrade(config, revision)


def write_migration(dsn: str, message: str) -> None:
    """Writes the difference between the database, which must be migrated, and the models as a new file.

    Raises: UnknownSchema
    """
    with _locked(dsn) as (connection, config):
        _check_revision(MigrationContext.configure(connection).get_current_revision())
        today = datetime.now(tz=UTC).strftime("%Y%m%d_%H%M")
        command.revision(config, message=message, autogenerate=True, rev_id=today)


@contextmanager
def _locked(dsn: str) -> Iterator[tuple[Connection, Config]]:
    """A transaction of a database that no other process migrates meanwhile, and alembic on it."""
    engine = create_engine(sqlalchemy_url(dsn), poolclass=NullPool, connect_args={"connect_timeout": 10})
    with engine.connect() as connection, connection.begin():
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS))
        config.set_main_option("file_template", "%%(rev)s_%%(slug)s")
        config.attributes["connection"] = connection
        yield connection, config


def _write_comments(connection: Connection) -> None:
    for table in Base.metadata.sorted_tables:
        connection.execute(SetTableComment(table))
        for column in table.columns:
            connection.execute(SetColumnComment(column))


def _check_revision(found: str | None) -> None:
    known = [script.revision for script in ScriptDirectory(str(MIGRATIONS)).walk_revisions()]
    if found is not None and found not in known:
        raise UnknownSchema(
            f"the database is at schema {found}, which this version of Leyden does not know."
            f" It cannot upgrade a schema older than {known[-1]}: name an empty database in LEYDEN_DATABASE_URL, or,"
            " for the embedded one, move the folder `postgres` out of the platform's home."
            f" A schema newer than {known[0]} needs the version of Leyden that made it."
        )


@exit_on_config_error(StoreSettings)
def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--new", metavar="MESSAGE", help="write a migration instead of applying them")
    arguments = parser.parse_args()
    settings = StoreSettings()
    dsn = settings.database_url
    if not settings.is_set():
        parser.error("set LEYDEN_DATABASE_URL to postgresql://user:password@host/name")
    try:
        if arguments.new:
            write_migration(dsn, arguments.new)
        elif is_newer(before := migrate(dsn)):
            sys.stdout.write(
                f"nothing to do: a newer version of Leyden has migrated the database to schema {before};"
                f" this one needs {newest_revision()} and runs on it\n"
            )
    except UnknownSchema as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
