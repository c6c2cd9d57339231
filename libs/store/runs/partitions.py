"""Each run has its own partitions of the big tables: `create_run` makes them, `retention` drops them."""

from psycopg import sql
from sqlalchemy import text

from leyden.libs.store.database import Session, raw_connection
from leyden.libs.store.tables import PARTITIONED


def partition_of(table: str, run_id: str) -> str:
    """The partition's name, `model_calls__run-abc`; ids are short enough for Postgres' 63 bytes."""
    return f"{table}__{run_id}"


async def create_run_partitions(session: Session, run_id: str) -> None:
    """Makes the run's partitions in the transaction that inserts the run; a repeat changes nothing."""
    # A second caller for the run waits here and then sees the partitions of the first.
    await session.execute(
        text("SELECT pg_advisory_xact_lock(hashtextextended('partitions:' || :run, 0))"), {"run": run_id}
    )
    names = {partition_of(table.__tablename__, run_id): table.__tablename__ for table in PARTITIONED}
    existing = set(
        await session.scalars(text("SELECT relname FROM pg_class WHERE relname = ANY(:names)"), {"names": list(names)})
    )
    connection = await raw_connection(session)
    for name, parent in names.items():
        if name not in existing:
            # ATTACH: CREATE … PARTITION OF would block the writes of every other run until the commit.
            await connection.execute(
                sql.SQL(
                    "CREATE TABLE {0} (LIKE {1} INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING STORAGE"
                    " INCLUDING COMPRESSION); ALTER TABLE {1} ATTACH PARTITION {0} FOR VALUES IN ({2})"
                ).format(sql.Identifier(name), sql.Identifier(parent), sql.Literal(run_id))
            )
