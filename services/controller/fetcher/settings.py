"""Settings of the fetcher, read from `FETCHER_` variables."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import SettingsConfigDict

from leyden.libs.service import HttpSettings
from leyden.libs.weights import StoreSettings


class Settings(HttpSettings, StoreSettings):
    """The fetcher's port, key and cache."""

    model_config = SettingsConfigDict(env_prefix="FETCHER_")

    port: int = Field(default=30001, ge=0, le=65535)
    """HTTP port; 0 takes a free one."""
    folder: Path = Path("versions")
    """Folder of the cache, which engines of this node see under the same path. Fetchers of one node may share it."""
    folder_bytes: int = Field(default=200 * 2**30, gt=0)
    """Beyond this size the versions that were asked for longest ago go; those that fetchers gave last stay."""
    key: SecretStr | None = None
    """Bearer key that the controller sends, the engines' admin key; unset: none is asked for."""
    key_file: Path | None = None
    """File that holds the key, instead of `key`."""

    @model_validator(mode="after")
    def _has_a_store(self) -> Settings:
        if self.weight_store is None:
            raise ValueError("the fetcher needs LEYDEN_WEIGHT_STORE, the store that the trainers publish to")
        return self
