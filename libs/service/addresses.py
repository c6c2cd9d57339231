"""Addresses in settings: what is no address is refused at the start, not at the first connection.

A message of theirs never shows the address, which may hold a password.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

_ACCOUNT = r"([^@\s]*@)?"
_HOST = r"(\[[0-9A-Fa-f:.%]+\]|[^\s:/?#@\[\]]+)"
_PORT = r"(:(?P<port>\d{1,5}))?"
_REST = r"(/[^\s?#]*)?(\?\S*)?"


def _like(pattern: str, example: str) -> AfterValidator:
    compiled = re.compile(pattern, re.ASCII)

    def check(address: str) -> str:
        found = compiled.fullmatch(address)
        if found is None or int(found.groupdict().get("port") or 0) > 65535:
            raise ValueError(f"should be an address such as {example}")
        return address

    return AfterValidator(check)


HttpAddress = Annotated[str, _like(rf"https?://{_ACCOUNT}{_HOST}{_PORT}(/\S*)?", "http://host:4318")]
PostgresAddress = Annotated[
    str,
    _like(
        rf"postgres(ql)?(\+psycopg)?://{_ACCOUNT}{_HOST}?{_PORT}{_REST}", "postgresql://user:password@host:5432/name"
    ),
]
RedisAddress = Annotated[
    str, _like(rf"rediss?://{_ACCOUNT}{_HOST}?{_PORT}(/\d*)?(\?\S*)?|unix://{_ACCOUNT}/\S+", "redis://host:6379/0")
]
