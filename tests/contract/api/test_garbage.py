"""The API refuses malformed requests with the path, the error and the remedy, and changes nothing."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select

from leyden.libs.store import tables
from leyden.libs.store.database import Database
from tests.support import builders

JSON = {"content-type": "application/json"}
PLAIN = json.dumps(builders.run_document())


def run_with(section: str, field: str, text: str) -> str:
    """A run document with one field spelled as given."""
    extra = {"algorithm": {"type": "ppo_clip", "weighting": "rollout_sum_const", "sum_constant": 1}}
    extra["evaluation"] = {"dataset": "questions"}
    document = builders.run_document()
    document[section] = {**document.get(section, {}), **extra.get(section, {}), field: "@@"}
    return json.dumps(document).replace('"@@"', text)


async def rows(database: Database) -> list[int]:
    async with database.read() as session:
        kinds = (tables.Run, tables.Dataset, tables.Task, tables.Evaluation, tables.ApiToken, tables.IdempotencyKey)
        return [await session.scalar(select(func.count()).select_from(kind)) or 0 for kind in kinds]


UNREADABLE: list[tuple[str | bytes, str]] = [
    ("{", "not JSON: Expecting property name enclosed in double quotes at column 2"),
    (PLAIN + "x", "not JSON: Extra data"),
    (PLAIN.encode("utf-16"), "the body is not UTF-8 (UTF-16): encode it as UTF-8"),
    (PLAIN.replace("test", "\xe9").encode("latin-1"), "the body is not UTF-8 (invalid continuation byte at byte"),
    ("[" * 100_000, "nested deeper than 64 levels: flatten it"),
    ('{"a":' * 65 + "1" + "}" * 65, "nested deeper than 64 levels: flatten it"),
    ('{"name": "a", "name": "b"}', "key 'name' appears twice in one object: keep one"),
    (run_with("optimizer", "learning_rate", "NaN"), "NaN is not JSON: write null or a number"),
    (run_with("optimizer", "weight_decay", "1e999"), "1e999 is too large for a number"),
    (run_with("sampling", "seed", "9" * 5000), "a number has too many digits: write it as a text"),
    (run_with("sampling", "seed", "9" * 400), "sampling.seed: the number exceeds 64 bits: write a smaller one"),
    (run_with("agent", "directory", '"\\ud800"'), "agent.directory: the text holds half of a surrogate pair"),
    (run_with("agent", "environment", '{"A": "\\u0000"}'), "agent.environment.A: the text holds the character U+0000"),
    ('{"\\ud800": 1}', "body: the text holds half of a surrogate pair"),
]


@pytest.mark.parametrize(("body", "words"), UNREADABLE, ids=[words for _, words in UNREADABLE])
async def test_a_body_that_cannot_be_stored_is_refused_with_the_path_of_the_error(
    api_http: httpx.AsyncClient, database: Database, body: str | bytes, words: str
) -> None:
    await builders.add_dataset(database)
    before = await rows(database)
    answer = await api_http.post("/v1/runs", content=body, headers={**JSON, "idempotency-key": "one"})
    assert (answer.status_code, answer.json()["cause"]) == (400, "json"), answer.text
    assert words in answer.json()["detail"]
    assert await rows(database) == before


@pytest.mark.parametrize(
    ("section", "field", "text", "words"),
    [
        ("runner", "memory_bytes", "9000000000000000000", "less than or equal to 1152921504606846976"),
        ("runner", "memory_bytes", "true", "valid integer"),
        ("training", "steps", '"10"', "valid integer"),
        ("training", "steps", "1.0", "valid integer"),
        ("algorithm", "sum_constant", "10000000000", "less than or equal to 1000000000"),
        ("evaluation", "max_tasks", "3000000000", "less than or equal to 2147483647"),
        ("agent", "environment", '{"A=B": "x"}', "pattern"),
        ("agent", "environment", '{"": "x"}', "at least 1 character"),
        ("agent", "directory", '"here"', "pattern"),
        ("agent", "command", f'["{"x" * 100_001}"]', "at most 100000 characters"),
        ("agent", "command", '["x", 5]', "valid string"),
    ],
)
async def test_a_field_out_of_its_bounds_is_named(
    api_http: httpx.AsyncClient, database: Database, section: str, field: str, text: str, words: str
) -> None:
    await builders.add_dataset(database)
    before = await rows(database)
    answer = await api_http.post("/v1/runs", content=run_with(section, field, text), headers=JSON)
    assert answer.status_code == 422, answer.text
    [problem] = answer.json()["errors"]
    assert problem["path"].startswith(f"{section}.{field}")
    assert words in problem["message"]
    assert await rows(database) == before


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"content-type": "text/plain"}, "the content type is 'text/plain': send `content-type: application/json`"),
        ({}, "the content type is ''"),
        ({**JSON, "content-encoding": "gzip"}, "content-encoding 'gzip': send the body as it is"),
        ({"content-type": "application/json; charset=utf-16"}, "the charset is utf-16: encode the body as UTF-8"),
    ],
)
async def test_a_body_of_another_kind_is_415(api_http: httpx.AsyncClient, headers: dict[str, str], words: str) -> None:
    answer = await api_http.post("/v1/runs", content=PLAIN.encode(), headers=headers)
    assert answer.status_code == 415
    assert words in answer.json()["detail"]


@pytest.mark.parametrize(
    "inside",
    [
        b"[",
        b"[" * 700,
        b"9" * 700,
        b"{}",
        b"null",
        b"[true, null]",
        b'["runs", true, null]',
        b'["runs newest", "0.0", "9999-99-99", "x"]',
        b'["runs newest", "0.0", "2020-01-01T00:00:00+00:00", "\\ud800"]',
        b'["runs newest", "x", "2020-01-01T00:00:00+00:00", "x"]',
        b"\xff",
    ],
)
async def test_a_foreign_cursor_is_refused(api_http: httpx.AsyncClient, inside: bytes) -> None:
    cursor = base64.urlsafe_b64encode(inside).decode().rstrip("=")
    answer = await api_http.get("/v1/runs", params={"cursor": cursor})
    assert (answer.status_code, answer.json()["cause"]) == (400, "cursor"), answer.text


@pytest.mark.parametrize("name", ["-x", " x", "a/b", "x\n", "a" * 201, "\0"])
async def test_a_form_names_its_dataset_like_an_address(
    api_http: httpx.AsyncClient, database: Database, name: str
) -> None:
    form: Any = {"file": ("rows.jsonl", b'{"a": 1}'), "name": (None, name)}
    answer = await api_http.post("/v1/datasets", files=form)
    assert (answer.status_code, "begin with a letter or digit" in answer.json()["detail"]) == (422, True)
    assert await rows(database) == [0] * 6


async def test_every_accepted_row_is_read_back_unchanged(api_http: httpx.AsyncClient) -> None:
    row = {"big": 10**399, "tiny": 5e-324, "deep": json.loads("[" * 60 + "]" * 60), "text": "\U0001f600\uffff\x7f"}
    made = await api_http.post("/v1/datasets", params={"name": "odd"}, content=json.dumps(row))
    assert made.status_code == 201, made.text
    answer = await api_http.get("/v1/datasets/odd/tasks")
    assert [task["payload"] for task in answer.json()["items"]] == [row]


@pytest.mark.parametrize("row", ['{"a":' + "[" * 64 + "]" * 64 + "}", '{"a":' + "[" * 100_000])
async def test_a_row_too_deep_to_be_handed_on_is_refused(api_http: httpx.AsyncClient, row: str) -> None:
    for body in (row, f"[{row}"):
        answer = await api_http.post("/v1/datasets", params={"name": "deep"}, content=body)
        assert answer.status_code in (413, 422), answer.text


async def test_a_key_twice_among_many_is_found_without_comparing_all_with_all(api_http: httpx.AsyncClient) -> None:
    many = ",".join(f'"{number}":0' for number in range(90_000))
    answer = await api_http.post("/v1/runs", content=f'{{{many},"89999":0}}', headers=JSON)
    assert (answer.status_code, "'89999' appears twice" in answer.json()["detail"]) == (400, True)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        (
            "nmae=x",
            "unknown parameter 'nmae': remove it; parameters here: name, phase, dataset, sort, count, cursor, limit",
        ),
        ("=0", "unknown parameter ''"),
        ("limit=1&limit=2", "parameter 'limit' comes 2 times: send it once"),
    ],
)
async def test_a_parameter_that_would_be_ignored_is_refused(
    api_http: httpx.AsyncClient, query: str, words: str
) -> None:
    answer = await api_http.get(f"/v1/runs?{query}")
    assert answer.status_code == 422
    assert words in answer.json()["detail"]
