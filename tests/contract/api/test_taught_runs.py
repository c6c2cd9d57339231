"""Runs with a teacher over HTTP: a teacher that is none is refused by the field that names it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from leyden.libs.store.database import Database
from leyden.libs.store.engines import Pool, write_pools
from leyden.services.api.settings import Settings
from tests.contract.api.test_runs import api_with, create, row_of, set_phase
from tests.support import builders
from tests.support.shared import ROOT


def document(distillation: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return builders.run_document(algorithm={"type": "reinforce", "distillation": distillation}, **changes)


async def refusal(http: httpx.AsyncClient, body: dict[str, Any]) -> tuple[str, str]:
    refused = await http.post("/v1/runs", json=body)
    assert refused.status_code == 422, refused.text
    (error,) = refused.json()["errors"]
    return error["path"], error["message"]


@pytest.fixture
async def teacher(api_http: httpx.AsyncClient, database: Database, tiny_model: Path) -> str:
    """An ended run of a pool with the tiny model: version 1 has files, those of version 2 are removed."""
    async with database.session() as session:
        await write_pools(session, [Pool("default", model_path=str(tiny_model))])
    run_id: str = (await create(api_http))["id"]
    row = await row_of(database, run_id)
    await builders.add_policy_version(database, row, 0)
    await builders.add_policy_version(database, row, 1, path=str(tiny_model))
    await builders.add_policy_version(database, row, 2, pruned_at=row.created_at)
    await set_phase(database, run_id, "completed")
    return run_id


async def test_a_version_teaches_and_its_run_stays(api_http: httpx.AsyncClient, teacher: str) -> None:
    made = await api_http.post("/v1/runs", json=document({"run": teacher, "version": 1}))
    assert made.status_code == 201, made.text
    refused = await api_http.delete(f"/v1/runs/{teacher}")
    assert refused.status_code == 409
    assert f"its version teaches run {made.json()['id']}; wait, or cancel that one" in refused.json()["detail"]


async def test_a_teacher_counts_with_its_own_size(
    api_http: httpx.AsyncClient,
    database: Database,
    postgres_dsn: str,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large = tmp_path / "large"
    shutil.copytree(tiny_model, large)
    config = json.loads((large / "config.json").read_text())
    (large / "config.json").write_text(json.dumps({**config, "intermediate_size": 50_000_000}))
    async with database.session() as session:
        await write_pools(session, [Pool("default", model_path=str(tiny_model))])
    run_id = (await create(api_http))["id"]
    await builders.add_policy_version(database, await row_of(database, run_id), 0, path=str(large))
    monkeypatch.setenv("API_MACHINE", '{"gpus": 1, "gpu_bytes": "3GB"}')
    async with api_with(Settings(database_url=postgres_dsn)) as http:
        assert (await http.post("/v1/runs", json=builders.run_document())).status_code == 201
        for named in ({"run": run_id, "version": 0}, {"model": str(large)}):
            path, words = await refusal(http, document(named))
            assert (path, "teacher " in words) == ("training", True)


async def test_the_document_of_the_how_to_makes_a_run(api_http: httpx.AsyncClient, teacher: str) -> None:
    page = (ROOT / "docs" / "how-to" / "algorithms.md").read_text().partition("## Learn from a teacher")[2]
    shown: dict[str, Any] = json.loads(page.partition("```json")[2].partition("```")[0])
    shown["algorithm"]["distillation"] |= {"run": teacher, "version": 1}
    made = await api_http.post("/v1/runs", json=builders.run_document(**shown))
    assert made.status_code == 201, made.text


async def test_a_teacher_that_does_not_exist_is_refused(api_http: httpx.AsyncClient, teacher: str) -> None:
    path, words = await refusal(api_http, document({"run": "run-unknown", "version": 1}))
    assert (path, words) == ("algorithm.distillation.run", "no run has the id 'run-unknown': list runs to find it")
    for version, state in ((2, "has removed the files of its version 2"), (3, "has no version 3")):
        path, words = await refusal(api_http, document({"run": teacher, "version": version}))
        assert (path, state in words) == ("algorithm.distillation.version", True)
    path, words = await refusal(api_http, document({"model": "org/large"}))
    assert (path, "is no absolute path" in words) == ("algorithm.distillation.model", True)


async def test_a_teacher_with_another_tokenizer_is_refused_with_the_token(
    api_http: httpx.AsyncClient, teacher: str, tiny_model: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_model, tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    file.write_text(file.read_text().replace('"a"', '"another"', 1))
    path, words = await refusal(api_http, document({"model": str(tmp_path / "other")}))
    assert path == "algorithm.distillation.model"
    assert f"name a teacher with the tokenizer of {tiny_model}" in words


@pytest.fixture
async def answers(database: Database, teacher: str) -> str:
    """A dataset of which one task has no answer and one has null, beside the pool of `teacher`."""
    rows = [{"answer": 4}, {"question": "2+3"}, {"answer": None, "choices": ["a"]}]
    return (await builders.add_dataset(database, rows, name="answers")).name


async def test_a_hint_that_some_tasks_cannot_fill_warns(api_http: httpx.AsyncClient, answers: str) -> None:
    made = await api_http.post("/v1/runs", json=document({"hint": "It is {task.answer}."}, dataset=answers))
    assert made.status_code == 201, made.text
    (alarm,) = [one for one in made.json()["alarms"] if one["subject"] == "algorithm.distillation.hint"]
    assert alarm["reason"] == (
        "task 1 of dataset 'answers' has no value for {task.answer}, and such tasks do not train"
    )
    assert alarm["remedy"] == "give every task the field, or name another one"


async def test_a_hint_that_no_task_fills_is_refused(api_http: httpx.AsyncClient, answers: str) -> None:
    path, words = await refusal(api_http, document({"hint": "{task.solution}"}, dataset=answers))
    assert path == "algorithm.distillation.hint"
    assert "has a value for {task.solution}, so that no group would train: name a field of the tasks" in words
    path, words = await refusal(api_http, document({"hint": "{task.choices.-1}"}, dataset=answers))
    assert words == "{task.choices.-1}: items of a list count from 0"


async def test_a_hint_without_fields_fits_every_task(api_http: httpx.AsyncClient, answers: str) -> None:
    made = await api_http.post("/v1/runs", json=document({"hint": "Answer in one word."}, dataset=answers))
    assert made.status_code == 201, made.text
    assert [one for one in made.json()["alarms"] if "distillation" in one["subject"]] == []


async def test_the_hint_of_the_how_to_makes_a_run(api_http: httpx.AsyncClient, answers: str) -> None:
    page = (ROOT / "docs" / "how-to" / "warm-start.md").read_text().partition("## Learn from a hint")[2]
    shown: dict[str, Any] = json.loads(page.partition("```json")[2].partition("```")[0])
    made = await api_http.post("/v1/runs", json=builders.run_document(**shown, dataset=answers))
    assert made.status_code == 201, made.text
