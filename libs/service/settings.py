"""Settings that every service has: its own carry its prefix (`GATEWAY_PORT`), the shared ones `LEYDEN_`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class ServiceSettings(BaseSettings):
    """Base of the settings classes: a service adds its fields and `SettingsConfigDict(env_prefix="GATEWAY_")`.

    A shared field is read from its `LEYDEN_` name; in code it is given by its field name.
    """

    model_config = SettingsConfigDict(
        frozen=True, extra="ignore", populate_by_name=True, use_attribute_docstrings=True, env_ignore_empty=True
    )

    host: str = "127.0.0.1"
    """Address that the HTTP port binds; 0.0.0.0 in a container."""
    port: int = Field(default=0, ge=0, le=65535)
    """HTTP port of the service, health and metrics included; 0 takes a free one."""
    shutdown_seconds: float = Field(default=20.0, gt=0)
    """After SIGTERM: how long work in hand may take to finish before it is cancelled."""
    database_url: str = Field(
        default="postgresql://leyden@127.0.0.1:5432/leyden", validation_alias="LEYDEN_DATABASE_URL", repr=False
    )
    """Postgres, as `postgresql://user:password@host:port/name`; settings of libpq may follow: `?connect_timeout=3`."""
    database_answer_seconds: float = Field(default=30.0, gt=0, validation_alias="LEYDEN_DATABASE_ANSWER_SECONDS")
    """Bound on one statement. A Postgres that is silent for longer counts as away, and its connection is closed."""
    redis_url: str = Field(default="redis://127.0.0.1:6379/0", validation_alias="LEYDEN_REDIS_URL", repr=False)
    """Redis, as `redis://host:port/number` or `unix:///path`."""
    capability_keys_file: Path = Field(
        default=Path("capability-keys.json"), validation_alias="LEYDEN_CAPABILITY_KEYS_FILE"
    )
    """JSON file `{kid: secret}` with the keys that sign agents' capabilities; the first signs, all verify."""
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", validation_alias="LEYDEN_LOG_LEVEL")
    """Lines below this level are not written."""
    otlp_endpoint: str | None = Field(default=None, validation_alias="LEYDEN_OTLP_ENDPOINT")
    """Where the platform's own traces go, as `http://host:4318`; unset: nowhere."""
