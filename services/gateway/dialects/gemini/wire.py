"""The form of Gemini's bodies: Google reads each field by its JSON name and by its proto name, as `topP` and `top_p`.

Google's own clients mix both in one body.
"""

from __future__ import annotations

from pydantic import AliasChoices, AliasGenerator, ConfigDict
from pydantic.alias_generators import to_camel

from leyden.services.gateway.dialects.body import Wire


def _names(name: str) -> AliasChoices:
    return AliasChoices(to_camel(name), name)


class Proto(Wire):
    """A body or a part of one, with both names of each field."""

    model_config = ConfigDict(alias_generator=AliasGenerator(validation_alias=_names))
