"""Invariants of a run's record after any kill: `python -m tests.invariants DSN RUN` checks them.

Each row of a statement is a violation. With `--received`, the answers in the agents' own log are compared with their
records, byte for byte. Exit status 1 on any violation; `--sql` prints the statements for psql instead.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import psycopg

_Rows = list[tuple[object, ...]]

STATEMENTS = Path(__file__).with_name("invariants.sql")
# As in leyden.libs.store.records.calls: Postgres stores no NUL in JSON.
_NUL = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".pth")

# What an agent received against what was recorded of it; float32 log-probabilities are exact as JSON numbers.
_DIFFERENCES = """
    SELECT x.id, d.what FROM received x
    LEFT JOIN model_calls c ON c.run_id = %(run)s AND c.status = 'completed' AND c.choice = 0
        AND 'chatcmpl-' || c.request_id = x.id
    CROSS JOIN LATERAL (VALUES
        ('has no record', c.id IS NULL),
        ('is another attempt''s', (c.rollout_id, c.attempt) <> (x.rollout_id, x.attempt)),
        ('has another message', x.turn <> c.answer),
        ('ended otherwise', x.answer #>> '{choices,0,finish_reason}' <> c.finish_reason),
        ('counts other tokens', (x.answer #>> '{usage,prompt_tokens}', x.answer #>> '{usage,completion_tokens}',
                                 x.answer #>> '{usage,prompt_tokens_details,cached_tokens}')
            <> (c.prompt_tokens::text, c.completion_tokens::text, c.cached_tokens::text)),
        ('names another policy', x.answer ->> 'system_fingerprint' <> c.run_id || ':' || c.max_policy_version),
        ('has other log-probabilities', c.id IS NOT NULL
            AND jsonb_typeof(x.answer #> '{choices,0,logprobs,content}') = 'array' AND
            ARRAY(SELECT (token ->> 'logprob')::real
                  FROM jsonb_array_elements(x.answer #> '{choices,0,logprobs,content}') AS token)
            <> pg_temp.float32s(c.generator_logprobs)::real[])
    ) AS d (what, is_so) WHERE d.is_so"""

_SAMPLED_AGAIN = """
    SELECT c.rollout_id, c.attempt, count(DISTINCT c.request_id), a.times FROM model_calls c
    JOIN asked a ON a.rollout_id = c.rollout_id AND a.attempt = c.attempt
    WHERE c.run_id = %(run)s AND c.status = 'completed'
    GROUP BY c.rollout_id, c.attempt, a.times HAVING count(DISTINCT c.request_id) > a.times"""


_UNTOLD = """
    SELECT t.* FROM told t LEFT JOIN spans s ON s.run_id = %(run)s
        AND (s.rollout_id, s.attempt, s.span_id) = (t.rollout_id, t.attempt, t.span_id)
    WHERE s.span_id IS NULL"""


def questions() -> tuple[str, dict[str, str]]:
    """The functions that questions use, and each question's statement by its words."""
    functions, *parts = STATEMENTS.read_text().split("\\echo question: ")
    asked = dict(part.split("\n", 1) for part in parts)
    return functions, {words: statement.strip().rstrip(";") for words, statement in asked.items()}


def violations(dsn: str, run_id: str) -> dict[str, list[Any]]:
    """Every question that has an answer, with the rows; empty when all promises hold."""
    functions, asked = questions()
    found: dict[str, list[Any]] = {}
    with psycopg.connect(dsn) as connection:
        connection.execute(functions)
        for words, statement in asked.items():
            # psql's :'run' as psycopg's parameter.
            rows = connection.execute(statement.replace("%", "%%").replace(":'run'", "%(run)s"), {"run": run_id})
            found[words] = rows.fetchall()
        found["versions whose files are not what was recorded"] = _damaged(connection, run_id)
    return {words: rows for words, rows in found.items() if rows}


def lost_calls(dsn: str, run_id: str, received: Path) -> list[str]:
    """Answers that agents of this run received and the store does not have, one line each.

    Args: received: lines as agents wrote them: a bare `chatcmpl-<request_id>`, or an object with `rollout`, `attempt`
        and one of: the whole `answer`; `asked`, written before a question was sent for the first time; the id of a
        `span` that the collector has taken
    """
    answers, asked, told = _read(received, run_id)
    with psycopg.connect(dsn) as connection:
        connection.execute(questions()[0])
        connection.execute(
            "CREATE TEMP TABLE received (id text, rollout_id text, attempt int, answer jsonb, turn jsonb)"
        )
        connection.execute("CREATE TEMP TABLE asked (rollout_id text, attempt int, times bigint)")
        connection.execute("CREATE TEMP TABLE told (rollout_id text, attempt int, span_id text)")
        with connection.cursor() as cursor:
            cursor.executemany("INSERT INTO received VALUES (%s, %s, %s, %s, %s)", answers)
            cursor.executemany("INSERT INTO asked VALUES (%s, %s, %s)", asked)
            cursor.executemany("INSERT INTO told VALUES (%s, %s, %s)", told)
        lost = connection.execute(_DIFFERENCES, {"run": run_id}).fetchall()
        again = connection.execute(_SAMPLED_AGAIN, {"run": run_id}).fetchall()
        spans = connection.execute(_UNTOLD, {"run": run_id}).fetchall()
    return sorted(
        [f"the answer {answer} {what}" for answer, what in lost]
        + [
            f"{rollout}/{attempt} asked {times} times and {calls} calls were sampled"
            for rollout, attempt, calls, times in again
        ]
        + [f"{rollout}/{attempt} was told that span {span} is stored" for rollout, attempt, span in spans]
    )


def _read(received: Path, run_id: str) -> tuple[_Rows, _Rows, _Rows]:
    """Answers, questions and spans of the run."""
    answers: _Rows = []
    spans: _Rows = []
    asked: dict[tuple[str, int], int] = {}
    for line in received.read_text().splitlines():
        if not line.startswith("{"):
            answers.append((line.strip(), None, None, None, None))
            continue
        told = json.loads(line)
        place = (told["rollout"], int(told["attempt"]))
        if not told["rollout"].startswith(f"{run_id}."):
            continue
        if "answer" in told:
            answer = told["answer"]
            # The log of a streamed answer holds no message.
            message = answer["choices"][0].get("message")
            turn = None if message is None else _storable(_turn(message))
            answers.append((answer["id"], *place, _storable(answer), turn))
        elif "span" in told:
            spans.append((*place, told["span"]))
        else:
            asked[place] = asked.get(place, 0) + 1
    return answers, [(*place, times) for place, times in asked.items()], spans


def _turn(message: dict[str, Any]) -> dict[str, Any]:
    """The turn that `model_calls.answer` holds for a chat completion's message."""
    turn = {"role": message["role"], "content": message.get("content") or ""}
    calls = [{"id": call["id"], **call["function"]} for call in message.get("tool_calls") or ()]
    return {**turn, "tool_calls": calls} if calls else turn


def _storable(document: object) -> str:
    return _NUL.sub(r"\1\\ufffd", json.dumps(document))


def _damaged(connection: psycopg.Connection[Any], run_id: str) -> list[Any]:
    """Versions that were not pruned and whose folder, where this machine has it at all, holds other weights."""
    rows = connection.execute(
        "SELECT version, path, content_sha256 FROM policy_versions WHERE run_id = %s AND pruned_at IS NULL", (run_id,)
    ).fetchall()
    return [
        (version, path, found)
        for version, path, recorded in rows
        if Path(path).parent.parent.exists() and (found := content_sha256(Path(path))) != recorded
    ]


def content_sha256(folder: Path) -> str | None:
    """The hash of a folder's weights as `policy_versions` defines it; None without any."""
    files = [*folder.glob("*"), *folder.glob("adapter/*")]
    weights = sorted(file for file in files if file.suffix in WEIGHT_SUFFIXES)
    lines = "".join(f"{file.relative_to(folder)} {hashlib.sha256(file.read_bytes()).hexdigest()}\n" for file in weights)
    return hashlib.sha256(lines.encode()).hexdigest() if weights else None


def main() -> int:
    """Exit status 1 when a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dsn", help="of the store: `database_url` in the home's platform.json")
    parser.add_argument("run")
    parser.add_argument("--received", type=Path, help="what the agents wrote of what they got")
    parser.add_argument("--sql", action="store_true", help="print the statements with the run filled in")
    arguments = parser.parse_args()
    if not re.fullmatch(r"run-[a-z0-9]+", arguments.run):
        parser.error(f"{arguments.run!r} is no run's id")
    if arguments.sql:
        print(STATEMENTS.read_text().replace("\\echo", "--").replace(":'run'", f"'{arguments.run}'"))
        return 0
    found = violations(arguments.dsn, arguments.run)
    lost = lost_calls(arguments.dsn, arguments.run, arguments.received) if arguments.received else []
    for words in [*questions()[1], *(found.keys() - questions()[1].keys())]:
        rows = found.get(words, [])
        print(f"{len(rows):6}  {words}", *(f"          {row}" for row in rows), sep="\n")
    if arguments.received:
        print(
            f"{len(lost):6}  answers that agents received and the store cannot account for", *lost, sep="\n          "
        )
    return 1 if found or lost else 0


if __name__ == "__main__":
    sys.exit(main())
