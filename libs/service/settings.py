"""The settings of every service: its own have its prefix (`GATEWAY_PORT`), shared ones have `LEYDEN_`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from leyden.libs.contracts.addresses import HttpAddress, PostgresServer, RedisServer
from leyden.libs.service.limits import Limits


class ServiceSettings(BaseSettings, PostgresServer, RedisServer):
    """Base of the settings classes: a service adds its fields and `SettingsConfigDict(env_prefix="GATEWAY_")`.

    The environment names a shared field `LEYDEN_…`; code names it as the class does.
    """

    model_config = SettingsConfigDict(
        frozen=True,
        extra="ignore",
        populate_by_name=True,
        use_attribute_docstrings=True,
        env_ignore_empty=True,
        # NaN bounds nothing, and infinity breaks the sum of a time and a duration.
        allow_inf_nan=False,
    )

    internal_host: str = "127.0.0.1"
    """Address of the internal port; in a container 0.0.0.0, behind a network policy."""
    internal_port: int = Field(default=0, ge=0, le=65535)
    """HTTP port of health, readiness and metrics, which show the inside of the process; 0 means any free one."""
    internal_fd: int | None = Field(default=None, ge=3)
    """Descriptor of a listening socket to use as the internal port; a supervisor sets it."""
    ready_fd: int | None = Field(default=None, ge=3)
    """Descriptor of a pipe on which the process reports its readiness; a supervisor sets it."""
    shutdown_seconds: float = Field(default=20.0, gt=0)
    """After SIGTERM: time for work in progress to finish. Then, or at a second SIGTERM, the process cancels it."""
    database_answer_seconds: float = Field(default=30.0, gt=0, validation_alias="LEYDEN_DATABASE_ANSWER_SECONDS")
    """Bound on one statement. The process closes the connection of a Postgres that is silent for longer."""
    redis_answer_seconds: float = Field(default=5.0, gt=0, validation_alias="LEYDEN_REDIS_ANSWER_SECONDS")
    """Bound on one command to the task queue. A Redis that is silent for longer counts as away."""
    capability_keys_file: Path = Field(
        default=Path("capability-keys.json"), validation_alias="LEYDEN_CAPABILITY_KEYS_FILE"
    )
    """JSON file `{kid: secret}` of the secrets that sign agents' capabilities; the first signs, all verify."""
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", validation_alias="LEYDEN_LOG_LEVEL")
    """The lowest level of the log."""
    otlp_endpoint: HttpAddress | None = Field(default=None, validation_alias="LEYDEN_OTLP_ENDPOINT")
    """Receiver of the platform's own traces, as `http://host:4318`; unset: none."""


class HttpSettings(ServiceSettings, Limits):
    """Base of the settings of services with an HTTP port, with the bounds on its clients."""

    model_config = ServiceSettings.model_config

    host: str = "127.0.0.1"
    """Address of the HTTP port; 0.0.0.0 in a container."""
    port: int = Field(default=0, ge=0, le=65535)
    """HTTP port; 0 means any free one."""
    listen_fd: int | None = Field(default=None, ge=3)
    """Descriptor of a listening socket to use as the HTTP port; a supervisor sets it."""
