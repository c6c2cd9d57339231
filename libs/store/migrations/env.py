"""Alembic's entry: runs on the connection that `leyden.libs.store.migrate` opened, inside its transaction."""

from alembic import context

from leyden.libs.store.tables import PARTITIONED, Base


def _is_ours(name: str | None, kind: str, parents: object) -> bool:
    """Partitions come and go with runs; everything else is the schema."""
    partitions = tuple(f"{table.__tablename__}__" for table in PARTITIONED)
    return not (kind == "table" and name is not None and name.startswith(partitions))


context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    include_name=_is_ours,
    compare_server_default=True,
)
context.run_migrations()
