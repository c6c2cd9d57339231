"""The address of the store, for commands that belong to no service."""

from pydantic_settings import BaseSettings, SettingsConfigDict


class StoreSettings(BaseSettings):
    """Read from the environment: LEYDEN_DATABASE_URL."""

    model_config = SettingsConfigDict(env_prefix="LEYDEN_", frozen=True)

    database_url: str = ""
    """`postgresql://user:password@host:port/name`."""
