"""The base of every part of a run's document, and the texts that several parts share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Word = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00]+$")]
FolderPath = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")]

PoolName = Annotated[str, Field(max_length=30, pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")]
"""A pool of engines. Objects of Kubernetes have it in their names."""
DEFAULT_POOL = "default"


class Document(BaseModel):
    # Strict: no text in place of a number, and no boolean either.
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, strict=True, allow_inf_nan=False
    )
