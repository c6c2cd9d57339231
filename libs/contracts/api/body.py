"""Bases of bodies, and pages of lists."""

from __future__ import annotations

from typing import Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field

Item = TypeVar("Item")


class Body(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class RequestBody(BaseModel):
    # Strict: no text in place of a number, and no boolean either.
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, strict=True, allow_inf_nan=False
    )


# Why without docstrings of fields: pydantic would look for them in the source again for each kind of item, which took
# 0.7 s of the API's start.
class Page(Body, Generic[Item], use_attribute_docstrings=False):
    """One page of a list."""

    items: list[Item]
    next_cursor: str | None = Field(
        default=None, description="Opaque; send it as `cursor` for the next page. Null on the last page."
    )
