"""Servers of OpenAI's chat completions that the operator names, with keys in files."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from leyden.libs.contracts.addresses import HttpAddress


class Provider(BaseModel):
    """A server of OpenAI's chat completions, and the file with its key.

    Args: max_tokens_name: the parameter that limits an answer, where the platform writes it. OpenAI's reasoning models
        refuse `max_tokens`, and some other servers know that name alone.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    url: HttpAddress
    api_key_file: Path | None = None
    max_tokens_name: Literal["max_completion_tokens", "max_tokens"] = "max_completion_tokens"
