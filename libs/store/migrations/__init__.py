"""Alembic's folder: `baseline.sql`, then one dated file per change; `leyden.libs.store.migrate` applies them."""
