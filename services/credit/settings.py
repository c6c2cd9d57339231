"""Settings of the credit worker, read from `CREDIT_…` and the shared `LEYDEN_…`."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from leyden.libs.service import ServiceSettings


class Settings(ServiceSettings):
    """The rate at which the worker polls for groups, and the largest group."""

    model_config = SettingsConfigDict(env_prefix="CREDIT_")

    poll_seconds: float = Field(default=2.0, gt=0)
    """Seconds between polls for complete groups without a wake-up."""
    max_group_records: int = Field(default=50_000, ge=1)
    """Model calls, tool spans and rewards of a group together; a larger group is excluded with this reason."""
    max_group_tokens: int = Field(default=2**27, ge=1)
    """Prompt tokens of a group's calls together, which take 4 bytes each in memory; a larger group is excluded."""
    database_pool_size: int = Field(default=2, ge=1)
    """Connections to Postgres; the worker uses two at a time."""
