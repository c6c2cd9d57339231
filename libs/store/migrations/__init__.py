"""Alembic's folder: one dated file per change of the schema, applied by `leyden.libs.store.migrate`."""
