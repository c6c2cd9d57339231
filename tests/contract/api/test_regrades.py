"""Regrades: a new revision of the ledger; evaluations take it, and what trained keeps its numbers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select
from typer.testing import CliRunner

from leyden.libs.cli.__main__ import app
from leyden.libs.grading.pool import Pool
from leyden.libs.store import tables
from leyden.libs.store.alarms.gradings import of_rewards
from leyden.libs.store.database import Database
from leyden.libs.store.runs.retention import prune_run
from leyden.libs.store.runs.trials import Trial, answer_trial, lease_trials
from tests.support import builders
from tests.support.waiting import eventually

OUTPUT = '{"answer": "the tall Eiffel Tower"}'
OLD = {"name": "answer", "grader": {"type": "string_check", "output": "{output.answer}", "reference": "{task.answer}"}}
NEW = {"name": "answer", "grader": {"type": "token_f1", "output": "{output.answer}", "reference": "{task.answer}"}}
BRIEF = {"name": "brief", "weight": 0.1, "grader": {"type": "length", "at_most": 50}}
LENIENT = {"reward": {"components": [NEW, BRIEF]}}


async def graded(
    database: Database, *, evaluated: bool, total: float | None = 0.0, lost: str = "ungraded"
) -> tables.Rollout:
    """A rollout whose grading gave it `total`; without one it is excluded, for the reason `lost`."""
    dataset = await builders.add_dataset(database, [{"answer": "Eiffel Tower"}], name=f"d{evaluated}{total}")
    config = builders.run_document(reward={"components": [OLD]})
    run = await builders.add_run(database, dataset_id=dataset.id, config=config)
    evaluation = f"{run.id}.e1" if evaluated else None
    if evaluated:
        columns: dict[str, Any] = {"dataset_id": dataset.id, "policy_version": 0, "rollouts_per_task": 1}
        async with database.session() as session:
            session.add(tables.Evaluation(id=evaluation, run_id=run.id, number=1, **columns))
    _, [rollout] = await builders.add_group(database, run, size=1, evaluation_id=evaluation)
    if total is None:
        await builders.add_attempt(database, rollout, state="settled", finished_at=datetime.now(tz=UTC))
        await builders.add_outcome(database, rollout, reward=None, stdout_tail=OUTPUT)
    else:
        await builders.finish_rollout(database, rollout, reward=total, stdout_tail=OUTPUT)
    keys: dict[str, Any] = {"rollout_id": rollout.id, "attempt": 1, "run_id": run.id}
    async with database.session() as session:
        if total is None:
            row = await session.get_one(tables.Rollout, rollout.id)
            row.state, row.attempt, row.reason = "excluded", None, lost
        now = (await session.execute(select(func.now()))).scalar_one()
        lease = {"tries": 1, "lease_id": rollout.id, "owner": "test", "lease_expires_at": now, "settled_at": now}
        session.add(tables.Grading(**keys, **lease, total=total, reason=None if total is not None else "lost"))
        await session.flush()
        state = "failed" if total is None else "scored"
        component = {"component": "answer", "position": 0, "state": state, "weight": 1.0, "value": total}
        row = {**component, "explanation": "eq", "source": "string_check", "duration_seconds": 0.0}
        session.add(tables.RolloutReward(**keys, **row, contribution=total))
    return rollout


async def shown(api_http: httpx.AsyncClient, rollout: tables.Rollout) -> dict[str, Any]:
    found: dict[str, Any] = (await api_http.get(f"/v1/rollouts/{rollout.id}")).json()
    return found


@pytest.mark.parametrize(("evaluated", "reward"), [(True, 0.9), (False, 0.0)])
async def test_a_regrade_is_a_revision_and_only_evaluations_take_it(
    api_http: httpx.AsyncClient, database: Database, evaluated: bool, reward: float
) -> None:
    rollout = await graded(database, evaluated=evaluated)
    path = f"/v1/rollouts/{rollout.id}/regrades"
    first = await api_http.post(path, json=LENIENT)
    assert first.status_code == 201, first.text
    made = first.json()
    assert (made["attempt"], made["revision"], made["total"]) == (1, 2, pytest.approx(0.9, abs=1e-9))
    assert made["given_by"] == "first-admin"
    again = await api_http.post(path, json=LENIENT)
    assert (again.status_code, again.json()) == (200, made)
    found = await shown(api_http, rollout)
    assert found["reward"] == pytest.approx(reward)
    components = [(one["component"], one["revision"], one["value"]) for one in found["components"]]
    assert components == [("answer", 2, pytest.approx(0.8)), ("brief", 2, 1.0)]
    third = (await api_http.post(path, json={"reward": {"components": [OLD]}})).json()
    assert (third["revision"], third["total"]) == (3, 0.0)
    found = await shown(api_http, rollout)
    assert [one["revision"] for one in found["regrades"]] == [2, 3]
    assert [one["component"] for one in found["components"]] == ["answer"]
    earlier = [(one["component"], one["revision"]) for one in found["earlier_components"]]
    assert earlier == [("answer", 1), ("answer", 2), ("brief", 2)]
    assert [len(one["reward"]["components"]) for one in found["regrades"]] == [2, 1]
    async with database.read() as session:
        stored = (await session.scalars(select(tables.RolloutReward).order_by(tables.RolloutReward.revision))).all()
        assert [(one.revision, one.value) for one in stored if one.component == "answer"] == [(1, 0), (2, 0.8), (3, 0)]
        # The controller's row stays: credit had this number.
        kept = await session.get_one(tables.Rollout, rollout.id)
        assert kept.reward == 0.0
    entries = (await api_http.get("/v1/audit", params={"action": "create_regrade"})).json()["items"]
    assert [(one["token_name"], one["subject"], one["detail"]["revision"]) for one in entries] == [
        ("first-admin", rollout.id, 3),
        ("first-admin", rollout.id, 2),
    ]


async def test_a_repeated_key_gets_the_first_answer_and_grades_nothing(
    api_http: httpx.AsyncClient, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = await graded(database, evaluated=True)
    path, key = f"/v1/rollouts/{rollout.id}/regrades", {"idempotency-key": "k"}
    first = await api_http.post(path, json=LENIENT, headers=key)
    asked: list[object] = []
    monkeypatch.setattr(Pool, "grade", lambda _, *given: asked.append(given))
    again = await api_http.post(path, json=LENIENT, headers=key)
    assert (again.status_code, again.json(), asked) == (201, first.json(), [])
    assert again.headers["idempotency-replayed"] == "true"
    other = await api_http.post(path, json={"reward": {"components": [OLD]}}, headers=key)
    assert (other.status_code, asked) == (422, [])
    entries = (await api_http.get("/v1/audit", params={"action": "create_regrade"})).json()["items"]
    assert len(entries) == 1


async def test_a_result_of_an_evaluation_is_the_newest_total(api_http: httpx.AsyncClient, database: Database) -> None:
    rollout = await graded(database, evaluated=True)
    evaluations = f"/v1/runs/{rollout.run_id}/evaluations"
    assert (await api_http.get(evaluations)).json()["items"][0]["results"]["reward"]["mean"] == 0.0
    await api_http.post(f"/v1/rollouts/{rollout.id}/regrades", json=LENIENT)
    mean = (await api_http.get(evaluations)).json()["items"][0]["results"]["reward"]["mean"]
    assert mean == pytest.approx(0.9)


@pytest.mark.parametrize(("evaluated", "reward"), [(True, 0.9), (False, None)])
async def test_a_rollout_that_was_excluded_without_a_grade_gets_its_first_total(
    api_http: httpx.AsyncClient, database: Database, evaluated: bool, reward: float | None
) -> None:
    rollout = await graded(database, evaluated=evaluated, total=None)
    made = await api_http.post(f"/v1/rollouts/{rollout.id}/regrades", json=LENIENT)
    assert (made.status_code, made.json()["revision"], made.json()["total"]) == (201, 2, pytest.approx(0.9)), made.text
    found = await shown(api_http, rollout)
    assert (found["state"], found["reward"]) == ("excluded", reward and pytest.approx(reward))
    assert [(one["component"], one["revision"]) for one in found["components"]] == [("answer", 2), ("brief", 2)]
    if evaluated:
        path = f"/v1/runs/{rollout.run_id}/evaluations"
        results = (await api_http.get(path)).json()["items"][0]["results"]
        assert (results["rollouts"], results["reward"]["mean"]) == ({"finished": 1}, pytest.approx(0.9))


async def test_two_regrades_at_once_have_two_revisions(api_http: httpx.AsyncClient, database: Database) -> None:
    rollout = await graded(database, evaluated=True)
    bodies = [LENIENT, {"reward": {"components": [OLD]}}, {"reward": {"components": [NEW]}}]
    path = f"/v1/rollouts/{rollout.id}/regrades"
    answers = await asyncio.gather(*(api_http.post(path, json=one) for one in bodies))
    assert sorted(one.json()["revision"] for one in answers) == [2, 3, 4]


JUDGED = {"name": "judge", "grader": {"type": "score_model", "provider": "p", "model": "m", "rubric": "good?"}}


async def answered_by_grader(database: Database, asking: Awaitable[httpx.Response], **grade: Any) -> httpx.Response:
    """The answer to a regrade whose judge gives this grade, as the service grader leaves it."""
    asked = asyncio.ensure_future(asking)
    (trial,) = await eventually(lambda: leased(database))
    assert trial.reward.components[1].name == "judge"
    one = {"component": "judge", "weight": 1.0, "extracted": None, "source": "score_model", "duration_seconds": 0.1}
    value = grade.get("value")
    answer = {"attempt": 1, "total": value, "reason": None, "components": [{**one, "contribution": value, **grade}]}
    async with database.session() as session:
        await answer_trial(session, trial.lease_id, answer)
    return await asked


async def leased(database: Database) -> list[Trial]:
    async with database.session() as session:
        return await lease_trials(session, 5, 30.0)


async def test_a_judge_and_code_grade_again_by_the_service_grader(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    rollout = await graded(database, evaluated=True)
    reward = {"components": [NEW, JUDGED, {"name": "code", "grader": {"type": "command", "command": ["true"]}}]}
    asking = api_http.post(f"/v1/rollouts/{rollout.id}/regrades", json={"reward": reward})
    answer = await answered_by_grader(database, asking, state="scored", value=0.75, explanation="m gave 4 of 5")
    assert (answer.status_code, answer.json()["revision"], answer.json()["total"]) == (201, 2, 0.75)
    found = await shown(api_http, rollout)
    assert found["reward"] == 0.75
    assert [(one["component"], one["value"], one["source"]) for one in found["components"]] == [
        ("judge", 0.75, "score_model")
    ]


async def test_a_grading_that_fails_changes_nothing(api_http: httpx.AsyncClient, database: Database) -> None:
    rollout = await graded(database, evaluated=True)
    path = f"/v1/rollouts/{rollout.id}/regrades"
    for missing in ("exclude", "zero", "renormalise"):
        reward = {"components": [NEW, JUDGED], "missing": missing}
        asking = api_http.post(path, json={"reward": reward})
        refused = await answered_by_grader(database, asking, state="failed", value=None, explanation="p answers 500")
        assert refused.status_code == 409 and "judge: p answers 500" in refused.json()["detail"]
    assert (await shown(api_http, rollout))["regrades"] == []
    lost = await graded(database, evaluated=False, total=None, lost="lease_lost")
    refused = await api_http.post(f"/v1/rollouts/{lost.id}/regrades", json=LENIENT)
    assert refused.status_code == 409 and "has no reward of components" in refused.json()["detail"]
    assert (await api_http.post("/v1/rollouts/none/regrades", json=LENIENT)).status_code == 404


async def test_rollouts_of_a_pruned_run_keep_their_grades(api_http: httpx.AsyncClient, database: Database) -> None:
    rollout, other = [await graded(database, evaluated=True, total=total) for total in (0.9, 0.8)]
    async with database.read() as session:
        run = await session.get_one(tables.Run, rollout.run_id)
    await builders.end_run(database, run, "cancelled")
    before = await shown(api_http, rollout)
    assert await prune_run(database, run.id) > 0
    judge = {"type": "relative_model", "provider": "p", "model": "m", "rubric": "Which is best?"}
    duel = {"reward": {"components": [{"name": "better", "grader": judge}]}, "against": rollout.id}
    for path, body in (
        (f"{rollout.id}/regrades", LENIENT),
        (f"{rollout.id}/grades", LENIENT),
        (f"{other.id}/grades", duel),
    ):
        refused = await api_http.post(f"/v1/rollouts/{path}", json=body)
        assert (refused.status_code, "its run was pruned" in refused.json()["detail"]) == (409, True), refused.text
    found = await shown(api_http, rollout)
    assert [found[key] == before[key] for key in ("reward", "components", "regrades")] == [True] * 3
    results = (await api_http.get(f"/v1/runs/{run.id}/evaluations")).json()["items"][0]["results"]
    assert (found["reward"], results["reward"]["mean"]) == (0.9, 0.9)


async def test_the_command_stores_nothing_without_apply(api_url: str, database: Database, tmp_path: Path) -> None:
    rollout = await graded(database, evaluated=True)
    file = tmp_path / "run.json"
    file.write_text(json.dumps(LENIENT))
    words = ["--home", str(tmp_path), "--url", api_url, "--token", "secret-of-tests", "rollout", "regrade", str(file)]

    def said(*more: str) -> str:
        result = CliRunner().invoke(app, [*words, *more], env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        return result.output

    assert "nothing is stored without --apply" in said("--run", rollout.run_id)
    async with database.read() as session:
        assert (await session.scalars(select(tables.Regrade))).all() == []
    assert "1 of 1 rollouts have a new total" in said("--run", rollout.run_id, "--apply")
    assert "1 of 1 rollouts have a new total" in said("--rollout", rollout.id, "--apply")
    async with database.read() as session:
        [row] = (await session.scalars(select(tables.Regrade))).all()
    assert (row.revision, row.token_name) == (2, "first-admin")
    assert CliRunner().invoke(app, words).exit_code == 2


async def test_an_evaluation_that_a_regrade_repaired_is_no_longer_ungraded(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    async def ungraded(run: str) -> list[str]:
        async with database.read() as session:
            return [found.reason async for found in of_rewards(session, run) if found.name == "ungraded"]

    rollout = await graded(database, evaluated=True, total=None)
    assert await ungraded(rollout.run_id) == ["1 attempts have no reward and were excluded; the last: lost"]
    assert (await api_http.post(f"/v1/rollouts/{rollout.id}/regrades", json=LENIENT)).status_code == 201
    assert await ungraded(rollout.run_id) == []
