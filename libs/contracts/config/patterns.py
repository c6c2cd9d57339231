"""Regular expressions over texts of agents, matched in linear time, so that no text can stop a service.

The engine is Rust's `regex`, which pydantic has: without look-around and back-references.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import SchemaError, SchemaValidator, ValidationError, core_schema


def matches(pattern: str, text: str) -> bool:
    """Whether the pattern is found anywhere in the text."""
    try:
        _validator(pattern).validate_python(text)
    except ValidationError:
        return False
    return True


@lru_cache(1_000)
def _validator(pattern: str) -> SchemaValidator:
    return SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex"))


def _compiles(pattern: str) -> str:
    try:
        _validator(pattern)
    except SchemaError as error:
        cause = str(error).split("error: ")[-1].splitlines()[0]
        raise ValueError(f"the pattern cannot be matched in linear time: {cause}") from error
    return pattern


LinearPattern = Annotated[str, Field(min_length=1, max_length=1_000), AfterValidator(_compiles)]
