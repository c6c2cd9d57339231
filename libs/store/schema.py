"""The schema that this code needs, checked without importing alembic."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import text

from leyden.libs.store.database import Database

MIGRATIONS = Path(__file__).parent / "migrations"


class SchemaOutdated(Exception):
    """The database is not at the schema this code needs: run `leyden up` or `python -m leyden.libs.store.migrate`."""


async def check_schema(database: Database) -> None:
    """Returns when this code can run on the database; for readiness.

    A newer one is fine: migrations expand before they contract, so that the version before runs on it (a rollback).
    Raises: SchemaOutdated: it is older, or empty.
    """
    async with database.engine.connect() as connection:
        migrated = await connection.scalar(text("SELECT to_regclass('alembic_version')")) is not None
        found = await connection.scalar(text("SELECT version_num FROM alembic_version")) if migrated else None
    if found is None or found < newest_revision():
        raise SchemaOutdated(
            f"the database is at schema {found}, this code needs {newest_revision()}:"
            " run python -m leyden.libs.store.migrate"
        )


def newest_revision() -> str:
    """The revision of the last migration: the first two words of its file name, `<date>_<number>_<words>.py`.

    Revisions sort by age.
    """
    return max("_".join(file.stem.split("_")[:2]) for file in (MIGRATIONS / "versions").glob("[0-9]*.py"))
