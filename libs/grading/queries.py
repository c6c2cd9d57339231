"""The grader of SQL: runs the agent's query and the reference's on a small database, and compares the results.

The database is made in memory from SQL text for each grade, so that there is no file to protect and nothing to share.
SQLite's authorizer refuses everything but reading, a progress handler ends slow queries, and its heap has a limit.
"""

from __future__ import annotations

import re
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import islice

from leyden.libs.contracts.config import graders
from leyden.libs.grading.facts import AttemptFacts, Scored, text_of

HEAP_BYTES = 256 * 2**20
"""Memory of SQLite in one process of the pool."""
VALUE_BYTES = 100_000
"""Length of a value that a query may make or read: the functions of a text take at most seconds for it."""
RESULT_BYTES = 256 * 2**20
"""Memory of a result's values: two results and SQLite's own memory stay below that of the process."""
SHOWN = 200
"""Characters of a row that an explanation shows."""
CHECK_EVERY = 100
"""Instructions of SQLite between two looks at the clock."""

_BUILDS = frozenset(
    {
        *(sqlite3.SQLITE_CREATE_TABLE, sqlite3.SQLITE_CREATE_INDEX, sqlite3.SQLITE_CREATE_VIEW),
        *(sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE, sqlite3.SQLITE_REINDEX),
        sqlite3.SQLITE_TRANSACTION,
    }
)
_READS = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})
_FENCE = re.compile(r"```(?:\w*\n)?(.*?)```", re.DOTALL)
_TOKEN = re.compile(
    r"""'(?:[^']|'')*' | "(?:[^"]|"")*" | `[^`]*` | \[[^\]]*\] | --[^\n]* | /\*.*?\*/ | [()] | \border\s+by\b""",
    re.DOTALL | re.VERBOSE | re.IGNORECASE,
)

Row = tuple[object, ...]


class QueryFailed(Exception):
    """A query has no result within the limits; the words say why."""


def sql_result(grader: graders.SqlResult, facts: AttemptFacts) -> Scored:
    """The reference decides whether the order of rows counts; names of columns never do.

    Raises: ValueError: the database or the reference is broken, which is no answer's fault
    """
    reference, script = text_of(grader.reference, facts), text_of(grader.database, facts)
    with closing(_built(script)) as database:
        try:
            expected = _rows(database, reference, grader.seconds, grader.rows + 1)
        except QueryFailed as error:
            raise ValueError(f"the reference has no result: {error}") from error
        if len(expected) > grader.rows:
            raise ValueError(f"the reference has more than {grader.rows} rows: raise `rows`, or narrow its query")
        query = query_of(text_of(grader.output, facts))
        try:
            found = _rows(database, query, grader.seconds, len(expected) + 1)
        except QueryFailed as error:
            return 0.0, query, str(error)
    ordered = is_ordered(reference)
    is_equal = found == expected if ordered else Counter(found) == Counter(expected)
    return float(is_equal), query, _explained(found, expected, ordered=ordered)


def query_of(text: str) -> str:
    """Returns the query in a text: the last fenced block, or the whole text, without spaces and semicolon at its end.

    >>> query_of("Here it is:\\n```sql\\nSELECT 1;\\n```")
    'SELECT 1'
    """
    blocks = _FENCE.findall(text)
    return (blocks[-1] if blocks else text).strip().rstrip(";").rstrip()


def is_ordered(query: str) -> bool:
    """Tells whether a query orders its own rows: an ORDER BY in brackets orders those of a part.

    >>> is_ordered("SELECT a FROM t ORDER BY a"), is_ordered("SELECT * FROM (SELECT a FROM t ORDER BY a LIMIT 3)")
    (True, False)
    """
    depth = 0
    for token in _TOKEN.findall(query):
        depth += {"(": 1, ")": -1}.get(token, 0)
        if depth == 0 and token[0] in "oO":
            return True
    return False


def _built(script: str) -> sqlite3.Connection:
    """Raises: ValueError: the text makes no database"""
    database = sqlite3.connect(":memory:", isolation_level=None, cached_statements=0)
    try:
        database.execute(f"PRAGMA hard_heap_limit = {HEAP_BYTES}")
        # A sort that does not fit must fail, and not write files.
        database.execute("PRAGMA temp_store = MEMORY")
        database.set_authorizer(_allows(_READS | _BUILDS))
        with _limited(database, seconds=5.0):
            database.executescript(script)
    except (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError, QueryFailed) as error:
        database.close()
        raise ValueError(f"`database` is no SQL text that makes a database: {error or 'out of memory'}") from error
    database.set_authorizer(_allows(_READS))
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, VALUE_BYTES)
    # Patterns of LIKE and GLOB take exponential time in their length.
    database.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 100)
    return database


def _allows(actions: frozenset[int]) -> Callable[..., int]:
    def decide(action: int, subject: str | None, *_: object) -> int:
        # SQLite's own dumps begin with it.
        is_of_dumps = action == sqlite3.SQLITE_PRAGMA and subject == "foreign_keys" and actions > _READS
        return sqlite3.SQLITE_OK if action in actions or is_of_dumps else sqlite3.SQLITE_DENY

    return decide


@contextmanager
def _limited(database: sqlite3.Connection, seconds: float) -> Iterator[None]:
    """Ends the statements inside after so many seconds."""
    end = time.monotonic() + seconds
    database.set_progress_handler(lambda: time.monotonic() > end, CHECK_EVERY)
    try:
        yield
    except sqlite3.OperationalError as error:
        if str(error) == "interrupted":
            raise QueryFailed(f"it takes longer than {seconds:g} s") from error
        raise
    finally:
        database.set_progress_handler(None, 0)


def _rows(database: sqlite3.Connection, query: str, seconds: float, most: int) -> list[Row]:
    """Returns at most so many rows, with numbers that compare as people see them.

    Raises: QueryFailed
    """
    try:
        with _limited(database, seconds), closing(database.execute(query)) as cursor:
            if cursor.description is None:
                raise QueryFailed("it is no query: it returns no columns")
            rows, size = list[Row](), 0
            for row in islice(cursor, most):
                size += sum(map(sys.getsizeof, row))
                if size > RESULT_BYTES:
                    raise QueryFailed(f"its result is larger than {RESULT_BYTES >> 20} MiB")
                rows.append(tuple(map(_comparable, row)))
            return rows
    except MemoryError as error:
        raise QueryFailed("it needs too much memory") from error
    # Two statements are a warning, and a null character is a value's error.
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        cause = "it may read alone" if "authoriz" in str(error) else str(error)
        raise QueryFailed(cause) from error


def _comparable(value: object) -> object:
    """Sums in another order differ in their last digits: 12 count, and 3.0 equals 3."""
    return float(f"{value:.12g}") if isinstance(value, float) else value


def _explained(found: list[Row], expected: list[Row], *, ordered: bool) -> str:
    if found == expected or (not ordered and Counter(found) == Counter(expected)):
        return f"the rows of the reference, {len(expected)}"
    if len(found) > len(expected):
        return f"more rows than the reference, which has {len(expected)}"
    if len(found) < len(expected):
        return f"{len(found)} rows, and the reference has {len(expected)}"
    if Counter(found) == Counter(expected):
        return "the rows of the reference in another order"
    first = next(iter((Counter(found) - Counter(expected)).keys()))
    # Each value is cut first: the text of a whole row may need more memory than the process has.
    shown = tuple(value[:SHOWN] if isinstance(value, str | bytes) else value for value in first)
    return f"a row that the reference lacks: {shown!r:.{SHOWN}}"
