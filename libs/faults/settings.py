"""The setting that arms fault points. Points stand where no service's settings are at hand, so they read their own."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

VARIABLE = "LEYDEN_FAULTS"


class FaultSettings(BaseSettings):
    """Read once, when a process loads `leyden.libs.faults`."""

    model_config = SettingsConfigDict(frozen=True, use_attribute_docstrings=True, env_ignore_empty=True)

    folder: Path | None = Field(default=None, validation_alias=VARIABLE)
    """Folder of the files that arm fault points; unset in production."""
