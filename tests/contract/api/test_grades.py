"""Grades of stored rollouts by a document's components: the numbers, and no rows."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select, update
from typer.testing import CliRunner

from leyden.libs.cli.__main__ import app
from leyden.libs.contracts.agent_rules import AgentRules
from leyden.libs.contracts.config import Reward
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.store.runs.trials import (
    NoGrader,
    Trial,
    answer_trial,
    ask_trial,
    end_trial,
    fail_trial,
    graded_by_trial,
    lease_trials,
    trial_state,
)
from leyden.services.api import rollouts
from leyden.services.api.app import create_app
from leyden.services.api.settings import Settings
from tests.fakes.served import served
from tests.support import builders
from tests.support.waiting import eventually

F1 = {"type": "token_f1", "output": "{output.answer}", "reference": "{task.answer}"}
REWARD: dict[str, Any] = {
    "components": [
        {"name": "answer", "weight": 0.9, "grader": F1},
        {"name": "format", "weight": 0.1, "grader": {"type": "regex", "pattern": "^answer: "}},
        {"name": "calls", "weight": 0.0, "grader": {"type": "call_budget", "at_most": 1}},
    ]
}


async def finished(database: Database, begin: str = "answer: it is") -> tables.Rollout:
    dataset = await builders.add_dataset(database, [{"answer": "Eiffel Tower"}])
    run = await builders.add_run(database, dataset_id=dataset.id)
    _, [rollout] = await builders.add_group(database, run, size=1)
    output = begin + '\n{"answer": "the tall Eiffel Tower"}'
    await builders.finish_rollout(database, rollout, stdout_tail=output)
    for _ in range(2):
        await builders.add_call(database, rollout)
    return rollout


async def test_a_stored_rollout_is_graded_and_nothing_is_stored(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    rollout = await finished(database)
    answer = await api_http.post(f"/v1/rollouts/{rollout.id}/grades", json={"reward": REWARD})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert (found["attempt"], round(found["total"], 9), found["reason"]) == (1, 0.82, None)
    shown = [(one["component"], one["value"], one["extracted"]) for one in found["components"]]
    assert shown == [("answer", 0.8, "the tall Eiffel Tower"), ("format", 1.0, "answer: "), ("calls", 0.0, None)]
    async with database.read() as session:
        for table in (tables.Grading, tables.RolloutReward, tables.AuditEntry):
            assert await session.scalar(select(func.count()).select_from(table)) == 0


@pytest.mark.parametrize("path", ["grades", "regrades"])
async def test_a_schema_that_is_to_be_fetched_is_refused(
    api_http: httpx.AsyncClient, database: Database, path: str
) -> None:
    rollout = await finished(database)
    schema = {"properties": {"a": {"$schema": "http://169.254.169.254/latest"}}}
    reward = {"components": [{"name": "form", "grader": {"type": "json_schema", "json_schema": schema}}]}
    answer = await api_http.post(f"/v1/rollouts/{rollout.id}/{path}", json={"reward": reward})
    assert answer.status_code == 422 and "169.254.169.254/latest' is none of the drafts" in answer.text


async def test_a_search_that_hangs_earns_0_and_the_next_one_works(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    rollout = await finished(database, "answer: \n" + "a" * 64 + "!")
    hangs = {"name": "hangs", "grader": {"type": "regex", "pattern": "^(a+)+$"}}
    reward = {"components": [hangs, *REWARD["components"]], "missing": "zero"}
    found = (await api_http.post(f"/v1/rollouts/{rollout.id}/grades", json={"reward": reward})).json()
    assert [one["state"] for one in found["components"]] == ["scored"] * 4
    hung = found["components"][0]
    assert (hung["value"], hung["explanation"]) == (
        0.0,
        "the grading of this output took longer than 5 s: it counts as 0, the worst",
    )


JUDGED = {
    "components": [{"name": "a", "grader": {"type": "score_model", "provider": "p", "model": "m", "rubric": "r"}}]
}


async def test_judges_and_code_wait_for_the_service_grader(
    api_http: httpx.AsyncClient, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = await finished(database)
    asking = asyncio.create_task(api_http.post(f"/v1/rollouts/{rollout.id}/grades", json={"reward": JUDGED}))
    (trial,) = await eventually(lambda: leased(database))
    assert (trial.rollout_id, trial.reward.components[0].name) == (rollout.id, "a")
    given = {"attempt": 1, "total": None, "reason": "a: no", "components": []}
    async with database.session() as session:
        await answer_trial(session, trial.lease_id, given)
    assert (await asking).json() == given
    asking = asyncio.create_task(api_http.post(f"/v1/rollouts/{rollout.id}/grades", json={"reward": JUDGED}))
    (trial,) = await eventually(lambda: leased(database))
    async with database.session() as session:
        await fail_trial(session, trial.lease_id, "Broken: why")
    failed = await asking
    assert (failed.status_code, failed.json()["cause"]) == (500, "grader_failed")
    assert failed.json()["detail"] == f"the grader could not grade rollout {rollout.id}: Broken: why"
    monkeypatch.setattr(rollouts, "BEGIN_SECONDS", 0.0)
    nobody = await api_http.post(f"/v1/rollouts/{rollout.id}/grades", json={"reward": JUDGED})
    assert (nobody.status_code, nobody.json()["cause"]) == (503, "no_grader")
    async with database.read() as session:
        assert await session.scalar(select(func.count()).select_from(tables.GradingTrial)) == 0


async def test_a_trial_waits_while_graders_work_on_others(database: Database) -> None:
    rollout, reward = await finished(database), Reward.model_validate(JUDGED)
    async with database.session() as session:
        await ask_trial(session, rollout.id, reward, 60.0)
    [other] = await leased(database)
    asking = asyncio.create_task(graded_by_trial(database, rollout.id, reward, begin_seconds=0.5, seconds=60.0))
    await asyncio.sleep(1.5)
    assert not asking.done()
    async with database.session() as session:
        await answer_trial(session, other.lease_id, {})
    with pytest.raises(NoGrader, match="does the service grader run"):
        await asking
    async with database.session() as session:
        await ask_trial(session, rollout.id, reward, 60.0)
    await leased(database)
    with pytest.raises(NoGrader, match=r"all graders were busy for 0\.5 s"):
        await graded_by_trial(database, rollout.id, reward, begin_seconds=0.1, seconds=0.5)


async def leased(database: Database) -> list[Trial]:
    async with database.session() as session:
        return await lease_trials(session, 5, 30.0)


async def test_a_trial_whose_time_is_over_goes(database: Database) -> None:
    for seconds in (0.0, 60.0):
        async with database.session() as session:
            asked = await ask_trial(session, "run-1.0.0", Reward.model_validate(JUDGED), seconds)
    assert [one.id for one in await leased(database)] == [asked]
    assert await leased(database) == []
    async with database.session() as session:
        await end_trial(session, asked)
        assert await trial_state(session, asked) is None


async def test_a_trial_that_does_not_parse_fails_alone(database: Database) -> None:
    asked = []
    for _ in range(3):
        async with database.session() as session:
            asked.append(await ask_trial(session, "run-1.0.0", Reward.model_validate(JUDGED), 60.0))
    broken = {"components": [{"name": "a", "grader": {"type": "of another version"}}]}
    async with database.session() as session:
        table = tables.GradingTrial
        await session.execute(update(table).where(table.id == asked[1]).values(reward=broken))
    assert {one.id for one in await leased(database)} == {asked[0], asked[2]}
    async with database.session() as session:
        state = await trial_state(session, asked[1])
        assert state is not None and state.answer is not None
        assert state.answer["failed"].startswith("the stored document does not parse: reward.components.0.grader: ")


async def test_what_cannot_be_graded_is_refused(api_http: httpx.AsyncClient, database: Database) -> None:
    unknown = await api_http.post("/v1/rollouts/none/grades", json={"reward": REWARD})
    assert (unknown.status_code, unknown.json()["cause"]) == (404, "unknown")
    run = await builders.add_run(database)
    _, [queued] = await builders.add_group(database, run, size=1)
    early = await api_http.post(f"/v1/rollouts/{queued.id}/grades", json={"reward": REWARD})
    assert early.status_code == 404 and "an attempt that has ended" in early.json()["detail"]
    wrong = await api_http.post(f"/v1/rollouts/{queued.id}/grades", json={"reward": {"components": []}})
    assert wrong.status_code == 422 and "reward.components" in wrong.text


@pytest.mark.parametrize("grader", [{"type": "python", "function": "a:f"}, {"type": "command", "command": ["true"]}])
async def test_a_platform_whose_graders_run_no_code_refuses_it_with_the_remedy(
    database: Database, grader: dict[str, Any]
) -> None:
    rollout = await finished(database)
    reward = {"components": [*REWARD["components"], {"name": "mine", "grader": grader}]}
    settings = Settings(database_url=database.dsn, admin_token="secret-of-tests", code_graders=False)
    with served(create_app(settings)) as url:
        async with httpx.AsyncClient(base_url=url, headers={"authorization": "Bearer secret-of-tests"}) as http:
            asked = [
                await http.post(f"/v1/rollouts/{rollout.id}/grades", json={"reward": reward}),
                await http.post("/v1/runs", json=builders.run_document(reward=reward)),
            ]
    for answer in asked:
        assert answer.status_code == 422, answer.text
        assert "reward.components.3.grader.type" in answer.text and "take its reward line by from: agent" in answer.text


@pytest.mark.parametrize(
    "grader", [{"type": "container", "image": "tests:1"}, {"type": "command", "command": ["true"]}]
)
@pytest.mark.parametrize("path", ["grades", "regrades"])
async def test_a_grader_that_may_take_longer_than_the_request_waits_is_refused(
    database: Database, grader: dict[str, Any], path: str
) -> None:
    settings = Settings(database_url=database.dsn, admin_token="secret-of-tests", container_graders=True)
    reward = {"components": [{"name": "tests", "grader": {**grader, "timeout_seconds": 601}}]}
    with served(create_app(settings)) as url:
        async with httpx.AsyncClient(base_url=url, headers={"authorization": "Bearer secret-of-tests"}) as http:
            answer = await http.post(f"/v1/rollouts/run-1.0.0/{path}", json={"reward": reward})
    assert answer.status_code == 422, answer.text
    assert "reward.components.0.grader.timeout_seconds" in answer.text and "write at most 600 here" in answer.text


async def refused(database: Database, grader: dict[str, Any], **settings: Any) -> str:
    """The refusal of a run with such a grader."""
    reward = {"components": [*REWARD["components"], {"name": "tests", "grader": {"type": "container", **grader}}]}
    made = Settings(database_url=database.dsn, admin_token="secret-of-tests", **settings)
    with served(create_app(made)) as url:
        async with httpx.AsyncClient(base_url=url, headers={"authorization": "Bearer secret-of-tests"}) as http:
            answer = await http.post("/v1/runs", json=builders.run_document(reward=reward))
    assert answer.status_code == 422, answer.text
    return answer.text


async def test_a_container_is_refused_where_graders_start_none_and_beyond_an_operators_rules(
    database: Database,
) -> None:
    said = await refused(database, {"image": "tests/sort:1"})
    assert "reward.components.3.grader.type" in said and "write type: command with the tests' folder" in said
    said = await refused(database, {"image": "tests/sort:1", "network": True}, container_graders=True)
    assert "reward.components.3.grader.network" in said and "grader.containers.allowInternet" in said
    rules = AgentRules(images=("registry.example/*",), limits={"cpu": "2"})
    fields = {"image": "tests/sort:1", "resources": {"limits": {"cpu": "4"}}}
    said = await refused(database, fields, container_graders=True, agent_rules=rules)
    assert "tests/sort:1 is not among the images that runs may name" in said
    assert "reward.components.3.grader.resources.limits: 4 of cpu is above 2" in said


async def test_the_command_prints_values_answers_and_the_total(
    api_url: str, database: Database, tmp_path: Path
) -> None:
    rollout = await finished(database)
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"reward": REWARD}))
    words = ["--home", str(tmp_path), "--url", api_url, "--token", "secret-of-tests", "reward", "test", str(file)]
    shown = CliRunner().invoke(app, [*words, "--rollout", rollout.id], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    assert "the tall Eiffel Tower" in shown.output and "F1 0.8 with 'Eiffel Tower'" in shown.output
    assert "reward of attempt 1: 0.82" in shown.output
    file.write_text(json.dumps({"reward": {"components": [{"name": "a", "grader": {"type": "regex"}}]}}))
    wrong = CliRunner().invoke(app, [*words, "--rollout", rollout.id], env={"COLUMNS": "200"})
    assert wrong.exit_code == 2 and "reward.components.0.grader" in wrong.output


async def test_two_rollouts_are_compared_by_a_judge_and_over_one_task(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    first = await finished(database)
    async with database.read() as session:
        run = await session.get_one(tables.Run, first.run_id)
    _, [other] = await builders.add_group(database, run, 1, size=1)
    await builders.finish_rollout(database, other)
    judge = {"type": "relative_model", "provider": "judge", "model": "m", "rubric": "Which is best?"}
    compared = {"components": [{"name": "better", "grader": judge}]}
    path = f"/v1/rollouts/{first.id}/grades"
    asking = asyncio.create_task(api_http.post(path, json={"reward": compared, "against": other.id}))
    (trial,) = await eventually(lambda: leased(database))
    assert (trial.rollout_id, trial.against) == (first.id, other.id)
    given = {"attempt": 1, "total": 1.0, "reason": None, "components": []}
    async with database.session() as session:
        await answer_trial(session, trial.lease_id, given)
    assert (await asking).json() == given

    dataset = await builders.add_dataset(database, [{"answer": "Louvre"}], name="others")
    _, [stranger] = await builders.add_group(database, await builders.add_run(database, dataset_id=dataset.id), size=1)
    await builders.finish_rollout(database, stranger)
    refusals: list[tuple[dict[str, Any], int, str]] = [
        ({"reward": REWARD, "against": other.id}, 422, "no component is a relative_model"),
        ({"reward": compared, "against": stranger.id}, 422, "has another task"),
        ({"reward": compared, "against": "run-none.0.0"}, 404, "there is no rollout 'run-none.0.0'"),
    ]
    for body, status, words in refusals:
        refused = await api_http.post(path, json=body)
        assert (refused.status_code, words in refused.json()["detail"]) == (status, True), refused.text
    again = await api_http.post(f"/v1/rollouts/{first.id}/regrades", json={"reward": compared, "against": other.id})
    assert again.status_code == 422
