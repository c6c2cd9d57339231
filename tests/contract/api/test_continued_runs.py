"""Continued runs over HTTP: the new run of an ended one with its policies, and refusals."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from leyden.libs.contracts.api.runs import Run
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.store.engines import Pool, write_pools
from tests.contract.api.test_runs import create, row_of, set_phase
from tests.support import builders

NOW = datetime.now(tz=UTC)
ROLES = [
    {"name": "writer", "agent_name": "w"},
    {"name": "checker", "agent_name": "c", "policy": "checker"},
    {"name": "judge", "policy": "judge"},
]


async def ended_run(http: httpx.AsyncClient, database: Database, phase: str = "failed") -> dict[str, Any]:
    run = await create(http, training={"steps": 100})
    for version in range(3):
        await builders.add_policy_version(
            database, await row_of(database, run["id"]), version, pruned_at=NOW if version == 1 else None
        )
    if phase == "cancelled":
        await http.post(f"/v1/runs/{run['id']}/cancel")
    await set_phase(database, run["id"], phase)
    return run


@pytest.mark.parametrize("phase", ["completed", "failed", "cancelled"])
async def test_an_ended_run_continues_with_an_amended_document(
    api_http: httpx.AsyncClient, database: Database, phase: str
) -> None:
    run = await ended_run(api_http, database, phase)
    others = {"completed": ["evaluate"], "failed": ["cancel"], "cancelled": []}[phase]
    allowed = [*others, "continue"]
    assert (await api_http.get(f"/v1/runs/{run['id']}")).json()["allowed_actions"] == allowed
    unsaid = await api_http.post(f"/v1/runs/{run['id']}/resume")
    assert (unsaid.status_code, unsaid.json()["allowed_actions"]) == (409, allowed)
    assert "a request with a body, continues it as a new run" in unsaid.json()["detail"]
    path, headers = f"/v1/runs/{run['id']}/resume", {"idempotency-key": "k"}
    body = {"changes": {"optimizer": {"learning_rate": 5e-7}, "name": "second try"}}
    made = await api_http.post(path, json=body, headers=headers)
    assert made.status_code == 201, made.text
    new = made.json()
    assert (new["name"], new["parent"]) == ("second try", {"run_id": run["id"], "version": 2})
    # The steps that the first run did not make.
    assert (new["config"]["optimizer"]["learning_rate"], new["progress"]["steps"]) == (5e-7, 98)
    assert (await api_http.post(path, json=body, headers=headers)).json()["id"] == new["id"]
    chosen = await api_http.post(path, json={"changes": {"training": {"steps": 7}}, "from_version": 0})
    assert (chosen.json()["parent"]["version"], chosen.json()["progress"]["steps"]) == (0, 7)
    # The child has no checkpoint of its own yet.
    refused = await api_http.delete(f"/v1/runs/{run['id']}")
    assert (refused.status_code, "needs its checkpoint" in refused.json()["detail"]) == (409, True)


@pytest.mark.parametrize(
    ("changes", "skipped"),
    [({}, 4), ({"sampling": {"seed": 9}}, 0), ({"sampling": {"skip_groups": 1}}, 1)],
    ids=["same order", "another order", "as asked"],
)
async def test_a_continued_run_goes_on_in_the_order_of_tasks(
    api_http: httpx.AsyncClient, database: Database, changes: dict[str, Any], skipped: int
) -> None:
    """Step 1 had a group without variance and one more in its place; the third group samples the first one's task
    again, and the sixth waits."""
    run = await create(api_http, training={"steps": 9}, sampling={"groups_per_step": 1})
    parent = await row_of(database, run["id"])
    groups = [(await builders.add_group(database, parent, number))[0] for number in range(6)]
    async with database.session() as session:
        (await session.get_one(tables.Group, groups[2].id)).replaces = groups[0].id
        for number in (1, 2):
            session.add(tables.Step(run_id=parent.id, number=number, metrics={}, checkpoint="", started_at=NOW))
        used = {1: "no_variance", 3: "trained", 4: "trained"}
        for number, verdict in used.items():
            step = 2 if number == 4 else 1
            session.add(tables.StepGroup(group_id=groups[number].id, run_id=parent.id, step=step, verdict=verdict))
    for version in range(3):
        await builders.add_policy_version(database, parent, version)
    await set_phase(database, run["id"], "failed")
    made = await resumed(api_http, run, changes=changes)
    assert made["config"]["sampling"]["skip_groups"] == skipped
    earlier = await resumed(api_http, run, changes=changes, from_version=1)
    assert earlier["config"]["sampling"]["skip_groups"] == (3 if skipped == 4 else skipped)


async def test_null_drops_a_key_of_a_map_and_is_the_value_of_a_field(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    environment = {"A": "1", "B.b": "2", "type": "x"}
    agent = {"command": ["true"], "environment": environment}
    air = {"weights": {"db.find": 1.0, "book": 0.5}, "tool_seconds": 9.0}
    run = await create(api_http, training={"steps": 9}, agent=agent, credit={"air": air})
    await builders.add_policy_version(database, await row_of(database, run["id"]), 0)
    await set_phase(database, run["id"], "failed")
    changes = {
        "agent": {"environment": {"A": None, "gone": None, "type": None, "B.b": "3"}},
        "credit": {"air": {"weights": {"db.find": None}, "tool_seconds": None}},
    }
    made = (await resumed(api_http, run, changes=changes))["config"]
    assert made["agent"]["environment"] == {"B.b": "3"}
    assert (made["credit"]["air"]["weights"], made["credit"]["air"]["tool_seconds"]) == ({"book": 0.5}, None)
    path = f"/v1/runs/{run['id']}/resume"
    refused = await api_http.post(path, json={"changes": {"optimizer": {"schedule": None}}})
    assert (refused.status_code, "changes.optimizer.schedule: " in refused.json()["detail"]) == (422, True)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"from_version": 1}, 409, "no weights of version 1 (there are 0, 2)"),
        ({"changes": {"model": "/other"}}, 422, "changes.model: "),
        (
            {
                "changes": {
                    "algorithm": {"critic": {"trunk": "own", "model": "/other"}},
                    "credit": {"baseline": {"type": "value"}},
                }
            },
            422,
            "changes.algorithm.critic.model: ",
        ),
        ({"changes": {"training": {"lora": {"rank": 4}}}}, 422, "changes.training.lora: "),
        ({"changes": {"optimizer": {"learning_rat": 1}}}, 422, "changes.optimizer.learning_rat: "),
        ({"changes": {"sampling": {"min_siblings": 9}}}, 422, "changes.sampling: min_siblings 9 exceeds"),
        ({"changes": {"sampling": {"temperature": 0.0}}}, 422, "changes.sampling.temperature: calls at temperature 0"),
        ({"changes": {"pool": "huge"}}, 422, "there is no pool 'huge'"),
        (
            {
                "changes": {
                    "reward": {"components": [{"name": "a", "grader": {"type": "container", "image": "a:1"}}]},
                    "runner": {"stdout_reward": False},
                }
            },
            422,
            "this platform's graders start no containers",
        ),
        ({"changes": {"recipe": "lora-1gpu"}}, 422, "changes.recipe: a recipe only begins a document"),
    ],
)
async def test_what_cannot_continue_a_run_is_refused_with_its_path(
    api_http: httpx.AsyncClient, database: Database, body: dict[str, Any], status: int, words: str
) -> None:
    run = await ended_run(api_http, database)
    refused = await api_http.post(f"/v1/runs/{run['id']}/resume", json=body)
    assert (refused.status_code, words in refused.json()["detail"]) == (status, True), refused.text


async def test_a_run_goes_on_with_the_model_with_which_it_began(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    run = await ended_run(api_http, database, "completed")
    path = f"/v1/runs/{run['id']}"
    async with database.session() as session:
        session.add(tables.RunBase(run_id=run["id"], path="/m/a"))
        # The platform has another model by now.
        await write_pools(session, [Pool("default", "/m/b"), Pool("first", "/m/a")])
    assert (await api_http.get(path)).json()["model"] == "/m/a"
    assert (
        await api_http.post(f"{path}/evaluations", json={"policy_version": 2, "dataset": "questions"})
    ).status_code == 201
    made = await resumed(api_http, run, changes={"pool": "first", "model": "/m/a"})
    assert (made["config"]["pool"], made["model"]) == ("first", "/m/a")
    async with database.session() as session:
        await write_pools(session, [Pool("default", "/m/b", adapters=2)])
    refused = await api_http.post(f"{path}/evaluations", json={"policy_version": 2, "dataset": "questions"})
    words = f"run {run['id']} began with /m/a, and the engines of pool 'default' add its adapters to /m/b: start"
    assert (refused.status_code, words in refused.json()["detail"]) == (409, True), refused.text


async def test_a_run_without_a_recorded_model_stays_in_pools_of_its_own(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    run = await ended_run(api_http, database, "completed")
    async with database.session() as session:
        await write_pools(session, [Pool("default", "/m/a"), Pool("second")])
    answer = await api_http.post(
        f"/v1/runs/{run['id']}/resume", json={"changes": {"pool": "second", "training": {"steps": 4}}}
    )
    assert (answer.status_code, "keeps its model" in answer.text) == (422, True), answer.text


async def test_a_run_that_has_not_ended_or_made_all_steps_needs_more_to_continue(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    going = await create(api_http)
    refused = await api_http.post(f"/v1/runs/{going['id']}/resume", json={})
    assert (refused.status_code, "cancel it first" in refused.json()["detail"]) == (409, True)
    done = await create(api_http, training={"steps": 0})
    await builders.add_policy_version(database, await row_of(database, done["id"]), 0)
    await set_phase(database, done["id"], "completed")
    refused = await api_http.post(f"/v1/runs/{done['id']}/resume", json={})
    assert (refused.status_code, "(--steps)" in refused.json()["detail"]) == (422, True)


async def ended_team(http: httpx.AsyncClient, database: Database, **judge: Any) -> dict[str, Any]:
    """An ended run with versions 0, 3 and 4, a checker with 0, 2, 3 and 5, and a frozen judge with 0."""
    await create(http)
    async with database.session() as session:
        pools = [Pool("default", "/m/a"), Pool("second", "/m/b"), Pool("third", "/m/c"), Pool("twin", "/m/b")]
        await write_pools(session, [*pools, Pool("shared", "/m/b", adapters=2), Pool("fourth", "/m/d")])
    policies = {"checker": {"pool": "second"}, "judge": {"pool": "third", "frozen": True, **judge}}
    lead = await create(http, training={"steps": 10}, roles=ROLES, policies=policies)
    versions = {"": range(5), "checker": range(6), "judge": range(1)}
    for policy, run_id in ids_of(lead).items():
        gone = {"": {1, 2}, "checker": {1, 4}}.get(policy, set())
        run = await row_of(database, run_id)
        for version in versions[policy]:
            await builders.add_policy_version(database, run, version, pruned_at=NOW if version in gone else None)
        await set_phase(database, run_id, "failed")
    return lead


def ids_of(run: dict[str, Any]) -> dict[str, str]:
    """The ids of a run's policies by name, its own model's without a name."""
    return {"": run["id"], **{name: one["id"] for name, one in run["policies"].items()}}


async def resumed(http: httpx.AsyncClient, run: dict[str, Any], **body: Any) -> dict[str, Any]:
    answer = await http.post(f"/v1/runs/{run['id']}/resume", json=body)
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


@pytest.mark.parametrize(
    ("body", "lead", "checker"),
    [
        ({"from_version": 3}, 3, 3),
        # The checker's version 4 is gone.
        ({}, 4, 5),
        ({"from_version": 4, "policy_versions": {"checker": 2}}, 4, 2),
        ({"from_version": 0}, 0, 0),
    ],
)
async def test_each_policy_continues_from_the_same_version_or_its_newest(
    api_http: httpx.AsyncClient, database: Database, body: dict[str, Any], lead: int, checker: int
) -> None:
    team = await ended_team(api_http, database)
    made = await resumed(api_http, team, **body)
    assert made["parent"] == {"run_id": team["id"], "version": lead}
    policies = Run.model_validate((await api_http.get(f"/v1/runs/{made['id']}")).json()).policies
    assert {name: one.steps for name, one in policies.items()} == {"checker": 10 - lead, "judge": 0}
    assert {name: one.parent and one.parent.model_dump() for name, one in policies.items()} == {
        "checker": {"run_id": team["id"], "version": checker},
        "judge": {"run_id": team["id"], "version": 0},
    }


async def test_equal_requests_with_one_key_continue_a_team_once(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    team = await ended_team(api_http, database)
    path, headers = f"/v1/runs/{team['id']}/resume", {"idempotency-key": "k"}
    answers = await asyncio.gather(*(api_http.post(path, json={}, headers=headers) for _ in range(3)))
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.json()["id"] for answer in answers}) == 1
    runs = (await api_http.get("/v1/runs")).json()["items"]
    (made,) = (one for one in runs if one["parent"] is not None)
    assert [made["policies"][name]["parent"] is not None for name in ("checker", "judge")] == [True, True]


async def test_policies_are_added_removed_and_frozen_in_a_continued_run(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    team = await ended_team(api_http, database)
    roles = [ROLES[0], ROLES[1], {"name": "critic", "policy": "critic"}]
    policies = {"judge": None, "critic": {"pool": "fourth"}, "checker": {"pool": "twin", "frozen": True}}
    made = await resumed(api_http, team, changes={"roles": roles, "policies": policies}, from_version=3)
    run = Run.model_validate(made)
    assert sorted(run.policies) == ["checker", "critic"]
    critic, checker = run.policies["critic"], run.policies["checker"]
    assert (critic.parent, critic.steps, critic.trains) == (None, 7, True)
    assert checker.parent is not None
    assert (checker.parent.version, checker.steps, checker.trains) == (3, 0, False)
    assert run.config.policies["checker"].pool == "twin"


async def test_a_policy_with_adapters_is_frozen_and_trains_again(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    run = await ended_team(api_http, database, pool="shared", frozen=False, lora={"rank": 4})
    for is_frozen, steps in ((True, 0), (False, 10)):
        changes = {"policies": {"judge": {"frozen": is_frozen}}, "training": {"steps": 10}}
        made = await resumed(api_http, run, changes=changes, from_version=0)
        continued = Run.model_validate(made)
        judge, config = continued.policies["judge"], continued.config.policies["judge"]
        assert config.lora is not None
        assert (config.pool, judge.steps, judge.parent and judge.parent.version) == ("shared", steps, 0)
        for run_id in ids_of(made).values():
            await builders.add_policy_version(database, await row_of(database, run_id), 0)
            await set_phase(database, run_id, "failed")
        run = made


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"from_version": 2}, 409, "no weights of version 2 (there are 0, 3, 4)"),
        ({"policy_versions": {"checker": 1}}, 409, "no weights of version 1 (there are 0, 2, 3, 5)"),
        ({"policy_versions": {"writer": 1}}, 422, "policy_versions.writer: no such policy continues: write one of che"),
        ({"policy_versions": {"checker": -1}}, 422, "policy_versions.checker: "),
        ({"changes": {"policies": {"checker": {"model": "/m/x"}}}}, 422, "changes.policies.checker.model: "),
        ({"changes": {"policies": {"checker": {"lora": {"rank": 4}}}}}, 422, "changes.policies.checker.lora: "),
        ({"changes": {"policies": {"checker": {"pool": "fourth"}}}}, 422, "changes.policies.checker.pool: a continued"),
        (
            {"changes": {"policies": {"checker": {"pool": "shared", "frozen": True}}}},
            422,
            "changes.policies.checker.pool: this pool serves adapters",
        ),
        (
            {
                "changes": {
                    "roles": [*ROLES[:2], {"name": "critic", "policy": "critic"}],
                    "policies": {"judge": None, "critic": {"pool": "fourth", "frozen": True, "lora": {}}},
                }
            },
            422,
            "policies.critic.lora: a frozen policy that is new has no adapters",
        ),
        ({"changes": {"policies": {"judge": None}}}, 422, "roles: ['judge'] are none of the policies ['checker']"),
        ({"changes": {"roles": ROLES[:2]}}, 422, "policies: no role names ['judge']"),
        ({"changes": {"policies": None}}, 422, "changes.policies: "),
        ({"changes": {"policies": {"checker": {"frozen": True}}, "train": ["checker"]}}, 422, "['checker'] does not"),
    ],
)
async def test_what_cannot_continue_a_team_is_refused_with_its_path(
    api_http: httpx.AsyncClient, database: Database, body: dict[str, Any], status: int, words: str
) -> None:
    team = await ended_team(api_http, database)
    before = len((await api_http.get("/v1/runs")).json()["items"])
    refused = await api_http.post(f"/v1/runs/{team['id']}/resume", json=body)
    assert (refused.status_code, words in refused.json()["detail"]) == (status, True), refused.text
    assert len((await api_http.get("/v1/runs")).json()["items"]) == before


async def test_a_policy_alone_or_one_without_versions_does_not_continue(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    team = await ended_team(api_http, database)
    checker = team["policies"]["checker"]["id"]
    refused = await api_http.post(f"/v1/runs/{checker}/resume", json={})
    words = f"'{checker}' is policy 'checker' of run {team['id']}: name that run and the policy"
    assert (refused.status_code, words in refused.json()["detail"]) == (404, True)
    made = await resumed(api_http, team)
    await builders.add_policy_version(database, await row_of(database, made["id"]), 0)
    await set_phase(database, made["id"], "cancelled")
    refused = await api_http.post(f"/v1/runs/{made['id']}/resume", json={})
    words = f"of run {made['id']}: it has no version; remove it, or create a run"
    assert (refused.status_code, words in refused.json()["detail"]) == (409, True)


async def test_a_team_is_deleted_once_every_policy_of_the_next_has_a_checkpoint(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    team = await ended_team(api_http, database)
    made = await resumed(api_http, team)
    for run_id in ids_of(made).values():
        refused = await api_http.delete(f"/v1/runs/{team['id']}")
        assert (refused.status_code, "needs its checkpoint" in refused.json()["detail"]) == (409, True)
        row = await row_of(database, run_id)
        await builders.add_policy_version(database, row, 0)
        for number in (1, 2) if row.steps else ():
            assert (await api_http.delete(f"/v1/runs/{team['id']}")).status_code == 409
            async with database.session() as session:
                made_at = row.created_at
                session.add(tables.Step(run_id=run_id, number=number, metrics={}, checkpoint="", started_at=made_at))
    assert (await api_http.delete(f"/v1/runs/{team['id']}")).status_code == 202
    refused = await api_http.post(f"/v1/runs/{team['id']}/resume", json={})
    assert (refused.status_code, "being deleted" in refused.json()["detail"]) == (409, True)
