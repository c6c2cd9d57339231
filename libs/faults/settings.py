"""The setting of fault points, separate from the services' settings because libraries contain points, too."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

VARIABLE = "LEYDEN_FAULTS"


class FaultSettings(BaseSettings):
    """Settings of fault points, read once, at a process's first fault point."""

    model_config = SettingsConfigDict(frozen=True, use_attribute_docstrings=True, env_ignore_empty=True)

    folder: Path | None = Field(default=None, validation_alias=VARIABLE)
    """Folder of the files that arm fault points; unset in production."""
