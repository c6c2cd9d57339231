"""The address of the store, for commands that belong to no service."""

from pydantic_settings import BaseSettings, SettingsConfigDict

from leyden.libs.contracts.addresses import PostgresServer


class StoreSettings(BaseSettings, PostgresServer):
    """Read from the environment: LEYDEN_DATABASE_URL, or LEYDEN_DATABASE_HOST and the other parts."""

    model_config = SettingsConfigDict(frozen=True, extra="ignore", populate_by_name=True, env_ignore_empty=True)

    def is_set(self) -> bool:
        """Whether the environment names a server."""
        return bool({"database_url", "database_host"} & self.model_fields_set)
