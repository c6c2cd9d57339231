"""The base of all tables, and parts of columns that several of them have."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any, ClassVar

from sqlalchemy import (
    ARRAY,
    CheckConstraint,
    Computed,
    DateTime,
    Double,
    LargeBinary,
    MetaData,
    Text,
    func,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

Json = dict[str, Any]


class Base(DeclarativeBase):
    """Names every constraint, so that migrations can name them too."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        str: Text,
        bytes: LargeBinary,
        datetime: DateTime(timezone=True),
        float: Double,
        Json: JSONB,
        list[str]: ARRAY(Text),
    }


def one_of(column: str, states: type[Any]) -> CheckConstraint:
    allowed = ", ".join(f"'{state}'" for state in states)
    return CheckConstraint(f"{column} IN ({allowed})", name=f"{column}_known")


def transitions(table: Mapping[Any, Collection[Any]]) -> str:
    """A life cycle as one line of a column's comment: `open → cancelled, complete; …`."""
    return "; ".join(f"{old} → {', '.join(sorted(new)) or 'nothing'}" for old, new in table.items())


def of_document(expression: str, comment: str) -> Mapped[Any]:
    """A column that Postgres computes from the run's document, in whose expression `{a,b}` is the text at a path.

    The expression has the form in which Postgres prints it, so that a test can compare it with the migrations.
    """
    computed = Computed(re.sub(r"\{([\w,]+)\}", r"config #>> '{\1}'::text[]", expression), persisted=True)
    return mapped_column(computed, comment=f"Of the document: {comment}.")


def created() -> Mapped[datetime]:
    return mapped_column(server_default=func.now(), comment="The start of the transaction that wrote the row.")
