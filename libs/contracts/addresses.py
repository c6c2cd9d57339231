"""The addresses of Postgres and Redis, as one URL or as parts.

A settings class inherits `PostgresServer` or `RedisServer` and reads `database_url` or `redis_url`. Parts need no
escaping: `p@ss/w:rd%2#x` is a password like any other. A URL is read in one way alone, so that no client takes a piece
of a password for a host and names it in an error. No message shows an address.
"""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import quote

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, ValidationInfo, field_validator

_ESCAPED = r"([^@\s%/?#]|%[0-9A-Fa-f]{2})*"
_ACCOUNT = rf"({_ESCAPED}@)?"
_HOST = r"(\[[0-9A-Fa-f:.%]+\]|[^\s:/?#@\[\]]+)"
_PORT = r"(:(?P<port>\d{1,5}))?"
_REST = r"(/([^@\s?#%]|%[0-9A-Fa-f]{2})*)?(\?([^\s#%]|%[0-9A-Fa-f]{2})*)?"


def address(pattern: str, example: str) -> AfterValidator:
    """Refuses what the pattern does not match; its group `port` is a TCP port."""
    compiled = re.compile(pattern, re.ASCII)

    def check(text: str) -> str:
        found = compiled.fullmatch(text)
        if found is None or int(found.groupdict().get("port") or 0) > 65535:
            raise ValueError(f"should be an address such as {example}")
        return text

    return AfterValidator(check)


HttpAddress = Annotated[str, address(rf"https?://([^@\s]*@)?{_HOST}{_PORT}(/[^\s?#]*)?", "http://host:4318")]
EngineAddress = Annotated[
    str,
    address(
        rf"https?://{_HOST}{_PORT}(/[^\s?#]*)?",
        "http://engine:30000, without user and password, which alarms and metrics would show: engines have an API key",
    ),
]
PostgresAddress = Annotated[
    str,
    address(
        rf"postgres(ql)?(\+psycopg)?://{_ACCOUNT}{_HOST}?{_PORT}{_REST}", "postgresql://user:password@host:5432/name"
    ),
]
RedisAddress = Annotated[
    str, address(rf"rediss?://{_ACCOUNT}{_HOST}?{_PORT}(/\d*)?(\?\S*)?|unix://{_ACCOUNT}/\S+", "redis://host:6379/0")
]

POSTGRES = "postgresql://leyden@127.0.0.1:5432/leyden"
REDIS = "redis://127.0.0.1:6379/0"


class PostgresServer(BaseModel):
    """Settings: where Postgres is. `database_url` is complete once they are read."""

    model_config = ConfigDict(use_attribute_docstrings=True, populate_by_name=True)

    database_host: str = Field(default="", validation_alias="LEYDEN_DATABASE_HOST")
    """Postgres' host, where its parts stand in the place of `LEYDEN_DATABASE_URL`; a URL that is set wins."""
    database_port: int = Field(default=5432, ge=1, le=65535, validation_alias="LEYDEN_DATABASE_PORT")
    """Postgres' port."""
    database_user: str = Field(default="leyden", validation_alias="LEYDEN_DATABASE_USER")
    """The account at Postgres."""
    database_password: SecretStr = Field(default=SecretStr(""), validation_alias="LEYDEN_DATABASE_PASSWORD")
    """The password of the account at Postgres, with any characters."""
    database_name: str = Field(default="leyden", validation_alias="LEYDEN_DATABASE_NAME")
    """The database at Postgres."""
    database_parameters: str = Field(default="", validation_alias="LEYDEN_DATABASE_PARAMETERS")
    """Settings of libpq, as `sslmode=require&connect_timeout=3`."""
    database_url: PostgresAddress = Field(
        default=POSTGRES, validation_alias="LEYDEN_DATABASE_URL", repr=False, validate_default=True
    )
    """Postgres, as `postgresql://user:password@host:port/name`, URL characters escaped; settings of libpq may follow:
    `?connect_timeout=3`."""

    @field_validator("database_url", mode="before")
    @classmethod
    def _postgres_of_parts(cls, url: object, info: ValidationInfo) -> object:
        parts = info.data
        if url != POSTGRES or not parts.get("database_host"):
            return url
        account = _account(parts.get("database_user", ""), parts.get("database_password"))
        parameters = f"?{parts['database_parameters']}" if parts.get("database_parameters") else ""
        place = f"{_host(parts['database_host'])}:{parts.get('database_port', 5432)}"
        return f"postgresql://{account}{place}/{quote(parts.get('database_name', ''), safe='')}{parameters}"


class RedisServer(BaseModel):
    """Settings: where Redis is. `redis_url` is complete once they are read."""

    model_config = ConfigDict(use_attribute_docstrings=True, populate_by_name=True)

    redis_host: str = Field(default="", validation_alias="LEYDEN_REDIS_HOST")
    """Redis' host, where its parts stand in the place of `LEYDEN_REDIS_URL`; a URL that is set wins."""
    redis_port: int = Field(default=6379, ge=1, le=65535, validation_alias="LEYDEN_REDIS_PORT")
    """Redis' port."""
    redis_number: int = Field(default=0, ge=0, validation_alias="LEYDEN_REDIS_NUMBER")
    """Number of the database at Redis; it must be this platform's alone."""
    redis_password: SecretStr = Field(default=SecretStr(""), validation_alias="LEYDEN_REDIS_PASSWORD")
    """The password of Redis, with any characters."""
    redis_url: RedisAddress = Field(
        default=REDIS, validation_alias="LEYDEN_REDIS_URL", repr=False, validate_default=True
    )
    """Redis, as `redis://host:port/number` or `unix:///path`; the number must be this platform's alone."""

    @field_validator("redis_url", mode="before")
    @classmethod
    def _redis_of_parts(cls, url: object, info: ValidationInfo) -> object:
        parts = info.data
        if url != REDIS or not parts.get("redis_host"):
            return url
        place = f"{_host(parts['redis_host'])}:{parts.get('redis_port', 6379)}"
        return f"redis://{_account('', parts.get('redis_password'))}{place}/{parts.get('redis_number', 0)}"


def _account(user: str, password: SecretStr | None) -> str:
    secret = password.get_secret_value() if password else ""
    if not user and not secret:
        return ""
    return f"{quote(user, safe='')}{':' + quote(secret, safe='') if secret else ''}@"


def _host(name: str) -> str:
    return f"[{name}]" if ":" in name and not name.startswith("[") else name
