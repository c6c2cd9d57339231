"""The grader `sql_result`: results compared, everything but reading refused, limits, and broken references."""

from __future__ import annotations

import doctest
import time
from pathlib import Path
from typing import Any

import pytest

from leyden.libs.contracts.config import Component, Reward
from leyden.libs.contracts.states import ComponentState
from leyden.libs.grading import queries
from leyden.libs.grading.facts import AttemptFacts
from leyden.libs.grading.grade import Grade, grade
from leyden.libs.grading.pool import Pool

DATABASE = """
CREATE TABLE track (id INTEGER, genre TEXT, price REAL);
INSERT INTO track VALUES (1, 'Rock', 0.1), (2, 'Jazz', 0.2), (3, 'Jazz', 0.3), (4, NULL, 1);
"""
ENDLESS = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r)"


def component(**grader: Any) -> Component:
    fields = {"type": "sql_result", "reference": "{task.sql}", "database": "{task.database}"}
    return Component.model_validate({"name": "rows", "grader": fields | grader})


def facts(output: str, reference: str, database: str = DATABASE) -> AttemptFacts:
    return AttemptFacts({"sql": reference, "database": database}, output)


def graded(text: str, reference: str, database: str = DATABASE, **grader: Any) -> Grade:
    return grade(component(**grader), facts(text, reference, database))


def test_the_worked_values_of_docstrings_hold() -> None:
    assert doctest.testmod(queries).failed == 0


@pytest.mark.parametrize(
    ("query", "reference", "value", "explanation"),
    [
        ("SELECT id FROM track ORDER BY id DESC", "SELECT id FROM track", 1.0, "the rows of the reference, 4"),
        (
            *("SELECT id FROM track ORDER BY id DESC", "SELECT id FROM track ORDER BY id"),
            *(0.0, "the rows of the reference in another order"),
        ),
        ("SELECT genre AS g FROM track;", "SELECT genre FROM track", 1.0, "the rows of the reference, 4"),
        ("SELECT SUM(price) FROM track", "SELECT 1.6", 1.0, "the rows of the reference, 1"),
        ("SELECT COUNT(*) FROM track", "SELECT 4.0", 1.0, "the rows of the reference, 1"),
        ("SELECT DISTINCT genre FROM track", "SELECT genre FROM track", 0.0, "3 rows, and the reference has 4"),
        ("SELECT id FROM track", "SELECT 1", 0.0, "more rows than the reference, which has 1"),
        ("SELECT '1'", "SELECT 1", 0.0, "a row that the reference lacks: ('1',)"),
        ("SELECT id FROM track WHERE id > 9", "SELECT id FROM track WHERE id > 8", 1.0, "the rows of the reference, 0"),
    ],
)
def test_results_are_compared(query: str, reference: str, value: float, explanation: str) -> None:
    found = graded(query, reference)
    assert (found.state, found.value, found.explanation) == (ComponentState.SCORED, value, explanation)


def test_the_query_comes_from_a_field_or_from_the_last_fenced_block() -> None:
    fenced = "First ```SELECT 2``` and now:\n```sql\nSELECT 1;\n```\nDone."
    assert graded(fenced, "SELECT 1").extracted == "SELECT 1"
    assert graded('{"sql": "SELECT 1"}', "SELECT 1", output="{output.sql}").value == 1.0
    assert graded("no JSON", "SELECT 1", output="{output.sql}").value == 0.0


@pytest.mark.parametrize(
    ("query", "cause"),
    [
        ("", "it is no query: it returns no columns"),
        ("SELECT id FROM", "incomplete input"),
        ("SELECT missing FROM track", "no such column: missing"),
        ("SELECT id FROM t2", "no such table: t2"),
        ("SELECT 1; SELECT 2", "You can only execute one statement at a time."),
        ("DELETE FROM track", "it may read alone"),
        ("INSERT INTO track VALUES (5, 'x', 1) RETURNING id", "it may read alone"),
        ("ATTACH '{file}' AS other", "it may read alone"),
        ("VACUUM INTO '{file}'", "it may read alone"),
        ("PRAGMA writable_schema = 1", "it may read alone"),
        ("PRAGMA foreign_keys = 0", "it may read alone"),
        ("SELECT load_extension('{file}')", "it may read alone"),
        ("SELECT readfile('/etc/passwd')", "no such function: readfile"),
        ("SELECT randomblob(1000000000)", "string or blob too big"),
        (f"{ENDLESS} SELECT max(n) FROM r", "it takes longer than 0.2 s"),
        # Each row takes milliseconds: the clock counts, and no number of instructions.
        (
            f"{ENDLESS} SELECT max(instr(hex(zeroblob(49000 + n % 2)), hex(zeroblob(24000)) || '1')) FROM r",
            "it takes longer than 0.2 s",
        ),
    ],
)
def test_a_query_that_fails_earns_0_and_says_why(query: str, cause: str, tmp_path: Path) -> None:
    file = tmp_path / "made.sqlite"
    found = graded(query.replace("{file}", str(file)), "SELECT 1", seconds=0.2)
    assert (found.state, found.value, found.explanation) == (ComponentState.SCORED, 0.0, cause)
    assert not file.exists()


def test_a_sort_of_gigabytes_ends_by_its_limits() -> None:
    rows = "SELECT 1, hex(randomblob(49000)) UNION ALL SELECT n + 1, hex(randomblob(49000)) FROM r"
    began = time.monotonic()
    found = graded(f"WITH RECURSIVE r(n, s) AS ({rows}) SELECT n FROM r ORDER BY s", "SELECT 1", seconds=2.0)
    assert found.value == 0.0
    assert found.explanation in ("it needs too much memory", "it takes longer than 2 s")
    assert time.monotonic() - began < 60


WIDE = """
WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r WHERE n < {rows}),
    c(b) AS (SELECT char(131072) || printf('%.*c', 90000, char(1)))
SELECT {columns} FROM c, r
"""
NUMBERS = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r WHERE n < 900) SELECT n FROM r"


@pytest.mark.parametrize(
    ("columns", "rows", "reference"), [(1999, 1, "SELECT 1"), (20, 1, "SELECT 1"), (4, 900, NUMBERS)]
)
async def test_a_result_of_gigabytes_earns_0_and_is_no_failure_of_the_grader(
    columns: int, rows: int, reference: str
) -> None:
    query = WIDE.format(columns=", ".join(["b"] * columns), rows=rows)
    pool = Pool(1, component_seconds=60.0)
    try:
        [found] = await pool.grade([component(seconds=2.0)], facts(query, reference))
    finally:
        await pool.close()
    assert (found.grade.state, found.grade.value) == (ComponentState.SCORED, 0.0)
    assert len(found.grade.explanation) < 400


def test_a_value_that_the_reference_lacks_is_shown_by_its_beginning() -> None:
    found = graded("SELECT printf('%.*c', 90000, 'x')", "SELECT 1")
    assert found.explanation == "a row that the reference lacks: ('" + "x" * 198


@pytest.mark.parametrize(
    ("reference", "database", "cause"),
    [
        ("SELECT missing FROM track", DATABASE, "the reference has no result: no such column: missing"),
        ("DROP TABLE track", DATABASE, "the reference has no result: it may read alone"),
        ("SELECT id FROM track", DATABASE, "the reference has more than 3 rows: raise `rows`, or narrow its query"),
        ("SELECT 1", "CREATE TABLE", "`database` is no SQL text that makes a database: incomplete input"),
        ("SELECT 1", "ATTACH '/tmp/x' AS y", "`database` is no SQL text that makes a database: not authorized"),
    ],
)
def test_a_broken_reference_raises_and_is_no_0(reference: str, database: str, cause: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        graded("SELECT 1", reference, database, rows=3)
    assert str(caught.value) == cause


async def test_a_broken_reference_is_a_failed_component() -> None:
    pool = Pool(1, component_seconds=60.0)
    try:
        right, broken = [
            (await pool.grade([component()], facts("SELECT 1", reference)))[0] for reference in ("SELECT 1", "SELECT x")
        ]
    finally:
        await pool.close()
    assert (right.grade.value, right.crashed) == (1.0, False)
    assert (broken.grade.state, broken.grade.value, broken.crashed) == (ComponentState.FAILED, None, False)
    assert broken.grade.explanation == "ValueError: the reference has no result: no such column: x"


def test_a_dump_makes_a_database() -> None:
    dump = (
        "PRAGMA foreign_keys=OFF;\nBEGIN TRANSACTION;\nCREATE TABLE t(a INTEGER PRIMARY KEY AUTOINCREMENT, b TEXT);\n"
        "INSERT INTO t VALUES(1,'x');\nDELETE FROM sqlite_sequence;\nINSERT INTO sqlite_sequence VALUES('t',1);\n"
        "COMMIT;"
    )
    assert graded("SELECT b FROM t", "SELECT 'x'", dump).value == 1.0


def test_a_task_without_a_database_is_not_applicable() -> None:
    found = grade(component(), AttemptFacts({"sql": "SELECT 1"}, "SELECT 1"))
    assert (found.state, found.value) == (ComponentState.NOT_APPLICABLE, None)


def test_the_api_asks_tasks_for_the_database() -> None:
    reward = Reward(components=[component(output="{output.sql}")])
    assert ("reward.components.0.grader.database", ("database",)) in reward.task_fields()


@pytest.mark.parametrize(
    ("query", "ordered"),
    [
        ("SELECT a FROM t ORDER BY a", True),
        ("select a from t order\n by a limit 3", True),
        ("SELECT 'order by' FROM t -- order by a", False),
        ('SELECT "order by", [order by] FROM t /* order by */', False),
        ("SELECT rank() OVER (ORDER BY a) FROM t", False),
        ("SELECT ')' FROM (SELECT a FROM t ORDER BY a)", False),
        ("WITH x AS (SELECT a FROM t ORDER BY a) SELECT a FROM x ORDER BY a", True),
    ],
)
def test_the_reference_says_whether_order_counts(query: str, ordered: bool) -> None:
    assert queries.is_ordered(query) is ordered
