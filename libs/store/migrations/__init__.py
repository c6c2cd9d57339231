"""Alembic's folder: one dated file per change of the schema, applied by `libs.store.migrate`."""
