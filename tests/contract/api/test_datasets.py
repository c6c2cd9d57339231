"""A dataset is stored completely or not at all, once, and within the limits."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import pytest

from leyden.libs.store.database import Database
from leyden.libs.store.datasets import first_fault, list_tasks, stage_rows, store_dataset
from leyden.services.api.app import create_app
from leyden.services.api.settings import Settings
from leyden.services.api.upload import Limits, read_rows
from tests.support.long import long_only


async def upload(http: httpx.AsyncClient, body: str | bytes, name: str = "questions", **headers: str) -> httpx.Response:
    return await http.post("/v1/datasets", params={"name": name}, content=body, headers=headers)


async def test_an_uploaded_dataset_can_be_listed_with_its_tasks_in_order(api_http: httpx.AsyncClient) -> None:
    made = (await upload(api_http, '{"b": 1, "a": "é"}\n\n{"n": 2}\n')).json()
    assert (made["name"], made["task_count"]) == ("questions", 2)
    assert (await api_http.get("/v1/datasets/questions")).json() == made
    tasks = (await api_http.get(f"/v1/datasets/{made['id']}/tasks")).json()["items"]
    assert [task["payload"] for task in tasks] == [{"a": "é", "b": 1}, {"n": 2}]


async def test_an_equal_upload_is_a_repeat_and_another_under_its_name_a_conflict(api_http: httpx.AsyncClient) -> None:
    first = await upload(api_http, '{"a": 1, "b": 2}')
    repeat = await upload(api_http, '[{"b": 2, "a": 1}]')
    other = await upload(api_http, '{"a": 2}')
    assert (first.status_code, repeat.status_code, other.status_code) == (201, 200, 409)
    assert first.json() == repeat.json()
    assert "upload under another name" in other.json()["detail"]


async def test_two_equal_uploads_at_once_make_one_dataset(api_http: httpx.AsyncClient) -> None:
    answers = await asyncio.gather(*(upload(api_http, '{"a": 1}') for _ in range(4)))
    assert sorted(answer.status_code for answer in answers) == [200, 200, 200, 201]
    assert len({answer.json()["id"] for answer in answers}) == 1


async def test_a_check_reads_rows_in_parts_up_to_the_first_fault_or_its_bounds(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    made = (await upload(api_http, "\n".join(json.dumps({"n": number}) for number in range(50)))).json()

    async def checked(bad: int, first: int = 1000, size_bytes: int = 2**20) -> tuple[int, object]:
        seen: list[object] = []

        def fault(row: Mapping[str, Any]) -> str | None:
            seen.append(row["n"])
            return "bad" if row["n"] == bad else None

        async with database.read() as session:
            found = await first_fault(session, made["id"], fault, first=first, size_bytes=size_bytes)
        assert seen == list(range(len(seen)))
        return len(seen), found

    assert await checked(45) == (46, (45, "bad"))
    assert await checked(50) == (50, None)
    assert await checked(45, first=30) == (30, None)
    # A part is read whole: the bound ends the reading after the first.
    assert await checked(45, size_bytes=1) == (20, None)


async def test_bad_rows_are_reported_by_line_and_nothing_is_stored(api_http: httpx.AsyncClient) -> None:
    rows = ['{"a": 1}', "[1]", '{"a": NaN}', '{"a": 1, "a": 2}', '{"a": "\\u0000"}', "{oops", '{"a": 1e999}']
    response = await upload(api_http, "\n".join(rows))
    assert response.status_code == 422
    assert response.headers["content-type"] == "application/problem+json"
    problems = {problem["path"]: problem["message"] for problem in response.json()["errors"]}
    assert list(problems) == [f"line {number}" for number in range(2, 8)]
    assert "JSON object" in problems["line 2"]
    assert "appears twice" in problems["line 4"]
    assert (await api_http.get("/v1/datasets")).json() == {"items": [], "next_cursor": None}


async def test_an_upload_beyond_the_limit_is_413(api_http: httpx.AsyncClient) -> None:
    declared = await upload(api_http, json.dumps({"a": "x" * 80_000}))
    counted = await upload(api_http, json.dumps({"a": "x" * 5_000}))
    assert (declared.status_code, counted.status_code) == (413, 413)
    assert "split it" in counted.json()["detail"]


async def test_a_multipart_upload_is_named_after_its_file(api_http: httpx.AsyncClient) -> None:
    response = await api_http.post("/v1/datasets", files={"file": ("train.jsonl", b'{"a": 1}')})
    assert (response.status_code, response.json()["name"]) == (201, "train")
    without = await api_http.post("/v1/datasets", files={"other": ("train.jsonl", b'{"a": 1}')})
    assert (without.status_code, "named `file`" in without.json()["detail"]) == (422, True)


async def test_an_idempotency_key_with_another_upload_is_refused_and_stores_nothing(
    api_http: httpx.AsyncClient,
) -> None:
    first = await upload(api_http, '{"a": 1}', **{"idempotency-key": "k"})
    again = await upload(api_http, '{"a": 1}', **{"idempotency-key": "k"})
    other = await upload(api_http, '{"a": 2}', name="others", **{"idempotency-key": "k"})
    assert (first.status_code, again.status_code, other.status_code) == (201, 201, 422)
    assert again.json() == first.json()
    assert (await api_http.get("/v1/datasets/others")).status_code == 404


async def test_a_keyed_upload_repeated_after_its_dataset_was_deleted_makes_no_other(
    api_http: httpx.AsyncClient,
) -> None:
    first = await upload(api_http, '{"a": 1}', **{"idempotency-key": "k"})
    assert (await api_http.delete(f"/v1/datasets/{first.json()['id']}")).status_code == 204
    again = await upload(api_http, '{"a": 1}', **{"idempotency-key": "k"})
    assert (again.status_code, again.json()) == (201, first.json())
    assert again.headers["idempotency-replayed"] == "true"
    assert (await api_http.get("/v1/datasets")).json()["items"] == []


async def test_a_keyed_upload_repeated_after_its_name_went_to_other_rows_has_its_first_answer(
    api_http: httpx.AsyncClient,
) -> None:
    first = await upload(api_http, '{"a": 1}', **{"idempotency-key": "k"})
    assert (await api_http.delete(f"/v1/datasets/{first.json()['id']}")).status_code == 204
    other = await upload(api_http, '{"a": 2}')
    again = await upload(api_http, '{"a": 1}', **{"idempotency-key": "k"})
    assert (again.status_code, again.json()) == (201, first.json())
    assert again.headers["idempotency-replayed"] == "true"
    assert (await api_http.get("/v1/datasets")).json()["items"] == [other.json()]


@pytest.mark.parametrize("is_form", [False, True])
async def test_an_upload_without_progress_is_aborted(postgres_dsn: str, is_form: bool) -> None:
    app = create_app(Settings(database_url=postgres_dsn, admin_token="t", upload_silence_seconds=0.05))

    head = b'--b\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n' if is_form else b""
    kind = "multipart/form-data; boundary=b" if is_form else "application/jsonl"

    async def body() -> AsyncIterator[bytes]:
        yield head + b'{"a": 1}\n'
        await asyncio.sleep(5)
        yield b""

    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://api") as http:
            headers = {"authorization": "Bearer t", "content-type": kind}
            response = await http.post("/v1/datasets", params={"name": "a"}, content=body(), headers=headers)
    assert response.status_code == 408


@long_only
async def test_an_upload_takes_no_more_memory_for_more_rows(database: Database) -> None:
    async def chunks(count: int) -> AsyncIterator[bytes]:
        for start in range(0, count, 500):
            rows = (json.dumps({"number": number, "text": "x" * 80}) for number in range(start, start + 500))
            yield ("\n".join(rows) + "\n").encode()

    async def peak_bytes(count: int) -> int:
        tracemalloc.start()
        try:
            async with database.session() as session:
                rows = await stage_rows(session, read_rows(chunks(count), limits))
                stored = await store_dataset(session, f"{count} rows", rows)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        async with database.read() as session:
            first = await list_tasks(session, stored.dataset.id, cursor=None, limit=1)
        assert (stored.dataset.task_count, first.items[0].payload["number"]) == (count, 0)
        return peak

    limits = Limits(upload_bytes=2**30)
    fewer, more = [await peak_bytes(count) for count in (5_000, 20_000)]
    # 17 bytes for each further row: less than a reference to it and its number take.
    assert (more < 4 * 2**20, more - fewer < 15_000 * 17) == (True, True), (fewer, more)


@pytest.mark.parametrize("cursor", ["nonsense", "WzFd", "bnVsbA"])
async def test_a_cursor_of_another_list_is_refused_with_the_remedy(api_http: httpx.AsyncClient, cursor: str) -> None:
    response = await api_http.get("/v1/datasets", params={"cursor": cursor})
    assert (response.status_code, "leave it out" in response.json()["detail"]) == (400, True)


async def test_pages_follow_each_other_without_gaps_or_repeats(api_http: httpx.AsyncClient) -> None:
    made = [(await upload(api_http, '{"a": 1}', name=f"d{number}")).json()["id"] for number in range(5)]
    seen, cursor = [], None
    while True:
        query = {"limit": 2} | ({"cursor": cursor} if cursor else {})
        page = (await api_http.get("/v1/datasets", params=query)).json()
        seen += [item["id"] for item in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert seen == made[::-1]
