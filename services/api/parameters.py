"""Parameters that every list takes, and the database that every route reads."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import Depends, Query, Request

from leyden.libs.store.database import Database

Cursor = Annotated[str | None, Query(max_length=1000, description="`next_cursor` of the page before.")]
MAX_NUMBER = 2**31 - 1
"""The largest step, version or task number that the store has room for."""

Limit = Annotated[int, Query(ge=1, le=1000, description="Items on a page.")]

PolicyName = Annotated[
    str | None, Query(description="A further policy of the run; when left out, the run's own model.")
]


def _database(request: Request) -> Database:
    return cast(Database, request.app.state.database)


Store = Annotated[Database, Depends(_database)]
