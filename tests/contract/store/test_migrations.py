"""Migrations against table classes: a migrated database equals them, and each step after the baseline is reversible."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from random import Random
from typing import Any

import numpy as np
import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from psycopg import sql
from psycopg.types.json import Jsonb
from sqlalchemy import Connection, create_engine, select, text
from sqlalchemy.pool import NullPool

from leyden.libs.contracts import states
from leyden.libs.contracts.conversation import Dialect, ToolCall, Turn, parse_turn, parse_turns, turn_json
from leyden.libs.store import tables
from leyden.libs.store.database import Database, sqlalchemy_url
from leyden.libs.store.migrate import UnknownSchema, downgrade, migrate
from leyden.libs.store.policies import base_models
from leyden.libs.store.records.chains import FullCall, full_calls
from leyden.libs.store.schema import MIGRATIONS, SchemaOutdated, check_schema, newest_revision
from leyden.libs.store.tables import Base
from leyden.libs.store.wait import wait_for
from tests.support import builders

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
BASELINE = "20261122_0011"
VERSION_BEFORE = "20261125_0039"
"""The newest revision of the version before: its services run on today's schema during an upgrade and after a rollback.
A release sets it to the newest revision of its predecessor."""


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
    writers = ("api", "collector", "controller", "credit", "gateway", "grader", "migrations", "runner", "trainer")
    for table in Base.metadata.sorted_tables:
        assert str(table.comment).startswith(tuple(f"Writer: {writer}" for writer in writers)), table.name


def test_partitions_that_exist_are_stored_like_new_ones(empty_postgres_dsn: str) -> None:
    migrate(empty_postgres_dsn, BASELINE)
    with psycopg.connect(empty_postgres_dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE earlier PARTITION OF model_calls FOR VALUES IN ('run-earlier')")
        migrate(empty_postgres_dsn)
        columns = "SELECT attname, attstorage, attcompression FROM pg_attribute WHERE attnum > 0 AND attrelid = "
        found = connection.execute(f"{columns} 'earlier'::regclass ORDER BY 1").fetchall()
        assert found == connection.execute(f"{columns} 'model_calls'::regclass ORDER BY 1").fetchall()


def test_a_migration_after_the_baseline_is_reversible(empty_postgres_dsn: str, postgres_dsn: str) -> None:
    migrate(empty_postgres_dsn)
    downgrade(empty_postgres_dsn, BASELINE)
    migrate(empty_postgres_dsn)
    with connect(empty_postgres_dsn) as again, connect(postgres_dsn) as migrated:
        assert catalog(again) == catalog(migrated)


def column_types(dsn: str) -> dict[tuple[str, str], tuple[str, bool]]:
    """Relation and column of every table and view: the type, and whether an INSERT must name the column."""
    query = """
        SELECT c.oid::regclass::text, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull AND NOT a.atthasdef
        FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
        WHERE c.relnamespace::regnamespace::text IN ('public', 'reports') AND c.relkind IN ('r', 'p', 'v')"""
    with connect(dsn) as connection:
        return {(row[0], row[1]): (row[2], row[3]) for row in connection.execute(text(query))}


def test_the_version_before_reads_and_writes_its_columns_on_this_schema(empty_postgres_dsn: str) -> None:
    migrate(empty_postgres_dsn, VERSION_BEFORE)
    before = column_types(empty_postgres_dsn)
    migrate(empty_postgres_dsn)
    now = column_types(empty_postgres_dsn)
    assert {("pools", "waiting"), ("reports.steps", "reward_mean")} < before.keys()
    assert before.keys() - now.keys() == set()
    assert {column: (old, now[column][0]) for column, (old, _) in before.items() if now[column][0] != old} == {}
    required = {column for column, (_, is_required) in now.items() if is_required and column[0] in dict(before)}
    assert required - {column for column, (_, is_required) in before.items() if is_required} == set()


def test_no_migration_before_the_baseline_can_be_reverted(empty_postgres_dsn: str) -> None:
    migrate(empty_postgres_dsn, BASELINE)
    with pytest.raises(RuntimeError, match="drop the database instead"):
        downgrade(empty_postgres_dsn, "base")


def test_migrating_twice_changes_nothing(empty_postgres_dsn: str) -> None:
    migrate(empty_postgres_dsn)
    with connect(empty_postgres_dsn) as connection:
        before = catalog(connection)
    migrate(empty_postgres_dsn)
    with connect(empty_postgres_dsn) as connection:
        assert catalog(connection) == before


def at_revision(dsn: str, revision: str) -> None:
    """A migrated database that says another revision."""
    migrate(dsn)
    with psycopg.connect(dsn) as connection:
        connection.execute("UPDATE alembic_version SET version_num = %s", [revision])


def run_migrate(dsn: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "leyden.libs.store.migrate"]
    environment = os.environ | {"LEYDEN_DATABASE_URL": dsn}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


OLDER, NEWER = "20261121_0005", "20990101_0001"


def test_a_schema_older_than_the_baseline_ends_with_one_line(empty_postgres_dsn: str) -> None:
    at_revision(empty_postgres_dsn, OLDER)
    with pytest.raises(UnknownSchema):
        migrate(empty_postgres_dsn)
    ended = run_migrate(empty_postgres_dsn)
    [line] = ended.stderr.splitlines()
    assert (ended.returncode, ended.stdout) == (1, "")
    assert f"is at schema {OLDER}, which this version of Leyden does not know" in line
    assert f"older than {BASELINE}: name an empty database" in line


async def test_code_runs_on_the_schema_of_a_newer_version(empty_postgres_dsn: str) -> None:
    at_revision(empty_postgres_dsn, NEWER)
    with connect(empty_postgres_dsn) as connection:
        before = catalog(connection)
    ended = run_migrate(empty_postgres_dsn)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert f"nothing to do: a newer version of Leyden has migrated the database to schema {NEWER}" in ended.stdout
    with connect(empty_postgres_dsn) as connection:
        assert catalog(connection) == before
        assert connection.scalar(text("SELECT version_num FROM alembic_version")) == NEWER
    database = Database(empty_postgres_dsn)
    await check_schema(database)
    await database.close()
    await wait_for(empty_postgres_dsn, "schema", 10)
    with pytest.raises(UnknownSchema, match=f"newer than {newest_revision()} needs the version of Leyden that made it"):
        downgrade(empty_postgres_dsn, BASELINE)


def test_revisions_sort_by_age() -> None:
    order = [script.revision for script in ScriptDirectory(str(MIGRATIONS)).walk_revisions()]
    assert order == sorted(order, reverse=True)


ASKED = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x":  1}'}}
MESSAGES: list[Any] = [
    ({"role": "developer", "content": "Be brief."}, Turn("system", "Be brief.")),
    ({"role": "user", "content": "a", "name": "me"}, Turn("user", "a", "me")),
    ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, Turn("user", "a\nb")),
    ({"role": "user", "content": [], "name": None}, Turn("user", "")),
    (
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [ASKED, {"function": {"name": "g"}}]},
        Turn("assistant", "", None, (ToolCall("1", "f", '{"x":  1}'), ToolCall("", "g", ""))),
    ),
    (
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "tool_calls": []},
        Turn("assistant", "no"),
    ),
    ({"role": "assistant", "content": "b", "tool_calls": None, "extra": 1}, Turn("assistant", "b")),
    (
        {"role": "tool", "content": "rain", "tool_call_id": "1", "tool_calls": [ASKED]},
        Turn("tool", "rain", None, (), "1"),
    ),
]
"""Messages of chat completions, and the turns that they become."""


class EarlierCalls:
    """Rows of `model_calls` as the baseline had them, and what each call was in full."""

    def __init__(self, random: Random) -> None:
        self.rows: list[dict[str, Any]] = []
        self.full: dict[str, tuple[list[Turn], list[Any], bytes, Turn | None]] = {}
        for number in range(200):
            self._add(random, f"c{number}", random.choice([None, *self.rows[-6:]]))

    def _add(self, random: Random, name: str, parent: dict[str, Any] | None) -> None:
        turns, tools, ids = list[Turn](), random.choice([[], [{"name": "f"}]]), b""
        kept_messages = kept_tokens = None
        if parent is not None:
            turns, tools, ids, _ = self.full[parent["id"]]
            ids += parent["sampled_ids"]
            if random.random() < 0.5:
                kept_messages, kept_tokens = random.randint(0, len(turns)), random.randint(0, len(ids) // 4)
                turns, ids = turns[:kept_messages], ids[: 4 * kept_tokens]
        own = random.choices(MESSAGES, k=random.randint(0, 3))
        own_ids, sampled = (np.asarray([random.randrange(9) for _ in range(4)], "<i4").tobytes() for _ in range(2))
        response, answer = random.choice([(None, None), *MESSAGES[4:7]])
        messages: dict[str, Any] = {"messages": [message for message, _ in own]}
        if parent is None:
            messages["tools"] = tools or random.choice([None, []])
        self.full[name] = ([*turns, *(turn for _, turn in own)], tools, ids + own_ids, answer)
        values = {"id": name, "continues": parent and parent["id"], "kept_messages": kept_messages}
        values |= {
            "kept_tokens": kept_tokens,
            "messages": Jsonb(messages),
            "prompt_ids": own_ids,
            "sampled_ids": sampled,
        }
        values |= {"response": response and Jsonb(response), "prompt_tokens": len(ids + own_ids) // 4}
        self.rows.append(values | {"completion_tokens": 4, "sequence": len(self.rows)})


@pytest.mark.parametrize("seed", range(3))
async def test_calls_of_an_earlier_schema_are_the_same_in_full_after_the_migration(
    empty_postgres_dsn: str, seed: int
) -> None:
    earlier = EarlierCalls(Random(seed))
    migrate(empty_postgres_dsn, BASELINE)
    same = {
        "run_id": "run-a", "rollout_id": "run-a.0.0", "attempt": 1, "request_id": "c0", "choice": 0,
        "status": "completed", "trainable": True, "request_sha256": b"", "request": Jsonb({"model": "m"}),
        "generator_logprobs": b"", "policy_versions": b"", "cached_tokens": 0, "temperature": 1.0,
        "queued_seconds": 0, "total_seconds": 0,
    }  # fmt: skip
    with psycopg.connect(empty_postgres_dsn) as connection:
        connection.execute("CREATE TABLE part PARTITION OF model_calls FOR VALUES IN ('run-a')")
        for row in earlier.rows:
            values = same | row
            names = sql.SQL(", ").join(map(sql.Identifier, values))
            places = sql.SQL(", ").join(map(sql.Placeholder, values))
            connection.execute(sql.SQL("INSERT INTO model_calls ({}) VALUES ({})").format(names, places), values)
    migrate(empty_postgres_dsn)
    database = Database(empty_postgres_dsn)
    async with database.read() as session:
        calls = (await session.scalars(select(tables.ModelCall).order_by(tables.ModelCall.sequence))).all()
        found = await full_calls(session, calls)
    await database.close()
    assert len(calls) == len(earlier.rows)
    for call, full in zip(calls, found, strict=True):
        assert isinstance(full, FullCall)
        answer = None if call.answer is None else parse_turn(call.answer)
        assert (list(full.turns), list(full.tools), full.prompt_ids, answer) == earlier.full[call.id]
        assert [turn_json(turn) for turn in parse_turns(call.turns)] == call.turns
        assert (call.dialect, call.tools is None) == (Dialect.CHAT_COMPLETIONS, call.parent_call_id is not None)
    with pytest.raises(psycopg.errors.RestrictViolation), psycopg.connect(empty_postgres_dsn) as connection:
        connection.execute("UPDATE model_calls SET attempt = 2")
    with pytest.raises(RuntimeError, match="prune their runs first"):
        downgrade(empty_postgres_dsn, BASELINE)


async def test_runs_of_an_earlier_schema_stay_with_the_model_with_which_they_began(empty_postgres_dsn: str) -> None:
    migrate(empty_postgres_dsn)
    database = Database(empty_postgres_dsn)
    first = await builders.add_run(database)
    await builders.add_policy_version(database, first, 0, path="/models/a")
    lineage = [first.id]
    # The last one's parent is deleted.
    for parent in (0, 1, None):
        columns = {} if parent is None else {"parent_run_id": lineage[parent], "parent_version": 0}
        run = await builders.add_run(database, dataset_id=first.dataset_id, **columns)
        await builders.add_policy_version(database, run, 0, path=f"/weights/{run.id}/versions/0")
        lineage.append(run.id)
    async with database.session() as session:
        await session.execute(text("DELETE FROM base_models"))
        await session.execute(text(ScriptDirectory(str(MIGRATIONS)).get_revision("20261129_0098").module.BEGAN))
    async with database.read() as session:
        assert await base_models(session, lineage) == dict.fromkeys(lineage[:3], "/models/a")
    await database.close()


def test_several_services_may_migrate_at_once(empty_postgres_dsn: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(migrate, [empty_postgres_dsn] * 4))
    with connect(empty_postgres_dsn) as connection:
        assert connection.scalar(text("SELECT version_num FROM alembic_version")) == newest_revision()


def test_the_newest_revision_by_name_is_the_last_by_order() -> None:
    assert newest_revision() == ScriptDirectory(str(MIGRATIONS)).get_current_head()


async def test_readiness_reports_an_outdated_schema(empty_postgres_dsn: str) -> None:
    database = Database(empty_postgres_dsn)
    with pytest.raises(SchemaOutdated, match=r"schema None.*run python -m leyden\.libs\.store\.migrate"):
        await check_schema(database)
    await asyncio.to_thread(migrate, empty_postgres_dsn, BASELINE)
    with pytest.raises(SchemaOutdated, match=f"schema {BASELINE}"):
        await check_schema(database)
    migrate(empty_postgres_dsn)
    await check_schema(database)
    await database.close()


async def test_wait_returns_once_the_schema_is_there(
    empty_postgres_dsn: str, capsys: pytest.CaptureFixture[str]
) -> None:
    waiting = asyncio.create_task(wait_for(empty_postgres_dsn, "schema", 60))
    await wait_for(empty_postgres_dsn, "server", 60)
    assert not waiting.done()
    await asyncio.to_thread(migrate, empty_postgres_dsn)
    await waiting
    assert "waiting: the database is at schema None" in capsys.readouterr().err


async def test_wait_gives_up_with_the_cause(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TimeoutError):
        await wait_for("postgresql://leyden@127.0.0.1:1/leyden", "server", 0.5)
    assert "waiting: " in capsys.readouterr().err


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
