"""Settings of the credit worker, read from `CREDIT_…` and the shared `LEYDEN_…`."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from leyden.libs.service import ServiceSettings


class Settings(ServiceSettings):
    """How the worker looks for groups and how many it takes at once."""

    model_config = SettingsConfigDict(env_prefix="CREDIT_")

    poll_seconds: float = Field(default=2.0, gt=0)
    """How often complete groups are looked for when no wake-up comes."""
    groups_per_transaction: int = Field(default=8, ge=1, le=1024)
    """Complete groups that are loaded, computed and written together."""
    database_pool_size: int = Field(default=2, ge=1)
    """Connections to Postgres; one is used at a time."""
