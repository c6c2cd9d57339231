"""Migrations against models: a migrated database holds what the tables say, and every step can be taken back."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.pool import NullPool

from leyden.libs.contracts import states
from leyden.libs.store.database import Database, sqlalchemy_url
from leyden.libs.store.migrate import downgrade, migrate
from leyden.libs.store.schema import MIGRATIONS, SchemaOutdated, check_schema, newest_revision
from leyden.libs.store.tables import Base
from tests import builders

CATALOG = {
    "columns": """
        SELECT c.relname, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull,
               pg_get_expr(d.adbin, d.adrelid), col_description(c.oid, a.attnum)
        FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
        LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
        WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p') ORDER BY 1, 2""",
    "constraints": """
        SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint
        WHERE connamespace = 'public'::regnamespace ORDER BY 1, 2""",
    "indexes": "SELECT tablename, indexname, indexdef FROM pg_indexes WHERE schemaname = 'public' ORDER BY 1, 2",
    "tables": """
        SELECT relname, pg_get_partkeydef(oid), obj_description(oid) FROM pg_class
        WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p') ORDER BY 1""",
}
OWN = "alembic_version"


def catalog(connection: Connection) -> dict[str, list[tuple[object, ...]]]:
    return {
        name: [tuple(row) for row in connection.execute(text(query)) if row[0] != OWN]
        for name, query in CATALOG.items()
    }


def connect(dsn: str) -> Connection:
    return create_engine(sqlalchemy_url(dsn), poolclass=NullPool).connect()


def test_a_migrated_database_equals_the_models(empty_postgres_dsn: str, postgres_dsn: str) -> None:
    with connect(empty_postgres_dsn) as models, connect(postgres_dsn) as migrated:
        Base.metadata.create_all(models)
        expected, found = catalog(models), catalog(migrated)
    # Where this fails: python -m leyden.libs.store.migrate --new "what changed", then review the file.
    assert found == expected


def test_alembic_finds_nothing_to_migrate(postgres_dsn: str) -> None:
    with connect(postgres_dsn) as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []


def test_every_table_and_column_has_a_comment(postgres_dsn: str) -> None:
    with connect(postgres_dsn) as connection:
        found = catalog(connection)
    assert [row for row in found["columns"] if not row[-1]] == []
    assert [row for row in found["tables"] if not row[-1]] == []


def test_every_table_names_its_one_writer() -> None:
    writers = ("api", "collector", "controller", "credit", "gateway", "migrations", "runner", "trainer")
    for table in Base.metadata.sorted_tables:
        assert str(table.comment).startswith(tuple(f"Writer: {writer}" for writer in writers)), table.name


def test_partitions_that_exist_are_stored_like_new_ones(empty_postgres_dsn: str) -> None:
    migrate(empty_postgres_dsn, "20261121_0005")
    with psycopg.connect(empty_postgres_dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE earlier PARTITION OF model_calls FOR VALUES IN ('run-earlier')")
        migrate(empty_postgres_dsn)
        columns = "SELECT attname, attstorage, attcompression FROM pg_attribute WHERE attnum > 0 AND attrelid = "
        found = connection.execute(f"{columns} 'earlier'::regclass ORDER BY 1").fetchall()
        assert found == connection.execute(f"{columns} 'model_calls'::regclass ORDER BY 1").fetchall()


def test_migrations_are_reversible(empty_postgres_dsn: str) -> None:
    migrate(empty_postgres_dsn)
    downgrade(empty_postgres_dsn, "base")
    with connect(empty_postgres_dsn) as connection:
        left = catalog(connection)
        functions = connection.scalar(text("SELECT count(*) FROM pg_proc WHERE pronamespace = 'public'::regnamespace"))
    assert left == {"columns": [], "constraints": [], "indexes": [], "tables": []}
    assert functions == 0
    migrate(empty_postgres_dsn)


async def test_a_call_that_continues_another_is_never_taken_for_a_whole_one(empty_postgres_dsn: str) -> None:
    migrate(empty_postgres_dsn)
    database = Database(empty_postgres_dsn)
    _, [rollout, _] = await builders.add_group(database, await builders.add_run(database))
    first = await builders.add_call(database, rollout)
    await builders.add_call(database, rollout, continues=first.id)
    with pytest.raises(RuntimeError, match="prune their runs first"):
        downgrade(empty_postgres_dsn, "20261121_0009")
    # Such as keep all were known before such as keep a part.
    downgrade(empty_postgres_dsn, "20261121_0010")
    assert _whole(empty_postgres_dsn) == [3, 8]
    migrate(empty_postgres_dsn)
    await builders.add_call(database, rollout, continues=first.id, kept_messages=1, kept_tokens=2)
    await database.close()
    with pytest.raises(RuntimeError, match="keep a part of others"):
        downgrade(empty_postgres_dsn, "20261121_0010")
    with psycopg.connect(empty_postgres_dsn) as connection:
        assert connection.execute("SELECT count(continues), count(*) FROM model_calls").fetchone() == (2, 3)
    assert _whole(empty_postgres_dsn) == [3, 8, 5]


def _whole(dsn: str) -> list[int]:
    """Tokens of the prompts as the view shows them."""
    with psycopg.connect(dsn) as connection:
        rows = connection.execute("SELECT length(prompt_ids) / 4 FROM whole_calls ORDER BY sequence").fetchall()
    return [int(row[0]) for row in rows]


def test_several_services_may_migrate_at_once(empty_postgres_dsn: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(migrate, [empty_postgres_dsn] * 4))
    with connect(empty_postgres_dsn) as connection:
        assert connection.scalar(text("SELECT version_num FROM alembic_version")) == newest_revision()


def test_the_newest_revision_by_name_is_the_last_by_order() -> None:
    assert newest_revision() == ScriptDirectory(str(MIGRATIONS)).get_current_head()


async def test_readiness_tells_an_outdated_schema(empty_postgres_dsn: str) -> None:
    database = Database(empty_postgres_dsn)
    with pytest.raises(SchemaOutdated, match=r"schema None.*run python -m libs\.store\.migrate"):
        await check_schema(database)
    migrate(empty_postgres_dsn)
    await check_schema(database)
    await database.close()


@pytest.mark.parametrize(
    ("entity", "table"),
    [
        ("run", states.RUN_TRANSITIONS),
        ("group", states.GROUP_TRANSITIONS),
        ("rollout", states.ROLLOUT_TRANSITIONS),
        ("attempt", states.ATTEMPT_TRANSITIONS),
    ],
)
def test_the_transitions_in_the_database_are_those_of_the_contracts(
    postgres_dsn: str, entity: str, table: Mapping[StrEnum, frozenset[StrEnum]]
) -> None:
    with psycopg.connect(postgres_dsn) as connection:
        rows = connection.execute(
            "SELECT from_state, to_state FROM state_transitions WHERE entity = %s", [entity]
        ).fetchall()
    assert set(rows) == {(str(old), str(new)) for old, allowed in table.items() for new in allowed}
