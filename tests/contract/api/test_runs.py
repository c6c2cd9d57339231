"""Runs over HTTP: validation, creation, and changes of the intent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr
from sqlalchemy import select, update

from docs.shapes import PUBLISHED
from leyden.libs.contracts.agent_rules import AgentRules
from leyden.libs.contracts.config import CPU, Device, RunConfig
from leyden.libs.contracts.states import EngineState
from leyden.libs.store import tables, training
from leyden.libs.store.database import Database
from leyden.libs.store.engines import Assignment, EngineStatus, Pool, write_assignments, write_engines, write_pools
from leyden.services.api.app import create_app
from leyden.services.api.settings import Settings
from tests.contract.api.test_comparison import trained_step
from tests.fakes.chat_model import CHATML_WITH_TOOLS, make_chat_model
from tests.support import builders
from tests.support.alarms import alarms

NOW = datetime.now(tz=UTC)


async def create(http: httpx.AsyncClient, **changes: object) -> dict[str, Any]:
    await http.post("/v1/datasets", params={"name": "questions"}, content='{"question": 1}\n{"question": 2}')
    response = await http.post("/v1/runs", json=builders.run_document(**changes))
    assert response.status_code == 201, response.text
    made: dict[str, Any] = response.json()
    return made


@asynccontextmanager
async def api_with(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(settings.model_copy(update={"admin_token": SecretStr("secret-of-tests")}))
    headers = {"authorization": "Bearer secret-of-tests"}
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://api", headers=headers) as http:
            yield http


async def row_of(database: Database, run_id: str) -> tables.Run:
    async with database.read() as session:
        return await session.get_one(tables.Run, run_id)


async def set_phase(database: Database, run_id: str, phase: str) -> None:
    async with database.session() as session:
        session.add(tables.RunStatus(run_id=run_id, phase=phase))


async def test_a_run_for_runners_that_the_platform_lacks_is_refused(api_http: httpx.AsyncClient) -> None:
    await create(api_http)
    document = builders.run_document(runner={"type": "kubernetes", "image": "agents/flight:3"})
    refused = await api_http.post("/v1/runs", json=document)
    assert (refused.status_code, refused.json()["cause"]) == (422, "runner_type")
    assert "on one machine write runner.type 'container'" in refused.json()["detail"]
    assert "execute process and not kubernetes" in refused.json()["detail"]


async def test_a_run_that_names_a_secret_without_leave_is_refused(postgres_dsn: str) -> None:
    async with api_with(Settings(database_url=postgres_dsn)) as http:
        await create(http)
        secrets = {"TOOL_KEY": {"name": "leyden-secrets", "key": "admin-token"}}
        runner = {"type": "kubernetes", "image": "agents/flight:3", "secrets": secrets}
        refused = await http.post("/v1/runs", json=builders.run_document(runner=runner))
    assert (refused.status_code, refused.json()["cause"]) == (422, "agent_rules")
    assert "leyden-secrets is not among the secrets that runs may name" in refused.json()["detail"]


async def test_a_container_of_an_image_without_leave_is_refused(postgres_dsn: str) -> None:
    rules = AgentRules(images=("registry.example/*",))
    async with api_with(Settings(database_url=postgres_dsn, agent_rules=rules)) as http:
        await create(http)
        runner = {"type": "container", "image": "docker.io/agent:3"}
        refused = await http.post("/v1/runs", json=builders.run_document(runner=runner))
        allowed = builders.run_document(runner={**runner, "image": "registry.example/agent:3"})
        assert (await http.post("/v1/runs", json=allowed)).status_code == 201
    assert (refused.status_code, refused.json()["cause"]) == (422, "agent_rules")
    assert "docker.io/agent:3 is not among the images that runs may name" in refused.json()["detail"]


async def test_a_run_of_an_unknown_pool_or_of_another_model_is_refused(
    api_http: httpx.AsyncClient, database: Database, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    async with database.session() as session:
        await write_pools(session, [Pool("default"), Pool("large", "/models/large"), Pool("small", str(tmp_path))])

    async def errors(**changes: object) -> list[dict[str, str]]:
        refused = await api_http.post("/v1/runs", json=builders.run_document(**changes))
        assert refused.status_code == 422, refused.text
        found: list[dict[str, str]] = refused.json()["errors"]
        return found

    unknown = "there is no pool 'huge': write one of default, large, small"
    assert await errors(pool="huge") == [{"path": "pool", "message": unknown}]
    other = "the engines of pool 'large' serve /models/large: write pool 'small'"
    assert await errors(pool="large", model=str(tmp_path)) == [{"path": "model", "message": other}]
    none = "the engines of pool 'large' serve /models/large: leave `model` out"
    assert await errors(pool="large", model="/models/else") == [{"path": "model", "message": none}]
    assert (await create(api_http, pool="small", model=f"{tmp_path}/"))["config"]["pool"] == "small"
    # A document from before pools, and a pool whose model only the other services know.
    assert (await create(api_http, model=str(tmp_path)))["config"]["pool"] == "default"


async def test_a_model_that_the_engines_of_its_pool_cannot_serve_is_refused(
    api_http: httpx.AsyncClient, database: Database, tmp_path: Path
) -> None:
    base, tuned = make_chat_model(tmp_path / "base"), make_chat_model(tmp_path / "tuned", CHATML_WITH_TOOLS)
    other = make_chat_model(tmp_path / "other", more_marks=["<tool>"])
    async with database.session() as session:
        await write_pools(session, [Pool("default", str(base)), Pool("shared", str(base), adapters=2)])
    assert (await create(api_http, model=str(tuned)))["config"]["model"] == str(tuned)
    refused = await api_http.post("/v1/runs", json=builders.run_document(model=str(other)))
    assert refused.status_code == 422
    assert "other tokens (261, theirs 260): '<tool>' is 260, theirs none: leave `model` out" in refused.text
    lora = builders.run_document(model=str(tuned), pool="shared", training={"steps": 1, "lora": {"rank": 8}})
    assert (await api_http.post("/v1/runs", json=lora)).status_code == 422


async def test_pools_show_their_engines_and_runs(api_http: httpx.AsyncClient, database: Database) -> None:
    engine = EngineStatus("http://a", EngineState.SERVING, "run-a", 3)
    async with database.session() as session:
        await write_pools(session, [Pool("default"), Pool("small", "/models/small", 4096)])
        await write_engines(session, [engine], "small")
        await write_assignments(session, {"small": Assignment(("run-a",), ("run-b", "run-c"))})
    default, small = (await api_http.get("/v1/pools")).json()["items"]
    assert default == {
        **{"name": "default", "model_path": None, "context_length": None},
        **{
            "adapters": None,
            "max_adapter_rank": None,
            "embeddings": False,
            "run_ids": [],
            "waiting": [],
            "engines": [],
        },
    }
    assert (small["model_path"], small["context_length"]) == ("/models/small", 4096)
    assert (small["run_ids"], small["waiting"]) == (["run-a"], ["run-b", "run-c"])
    assert [(one["url"], one["state"], one["policy_version"]) for one in small["engines"]] == [
        ("http://a", "serving", 3)
    ]


async def test_an_engine_that_no_run_has_is_idle_until_one_has_its_pool(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    async with database.session() as session:
        await write_pools(session, [Pool("default")])
        nothing = EngineStatus("http://a", EngineState.UPDATING, detail="serves 'default', which no run gave it")
        await write_engines(session, [nothing])
    [engine] = (await api_http.get("/v1/engines")).json()["items"]
    assert (engine["state"], engine["detail"]) == ("idle", None)
    async with database.session() as session:
        await write_assignments(session, {"default": Assignment(("run-a",), ())})
    [engine] = (await api_http.get("/v1/engines")).json()["items"]
    assert (engine["state"], engine["detail"]) == ("updating", "serves 'default', which no run gave it")


async def test_a_pool_of_adapters_takes_runs_that_train_them(api_http: httpx.AsyncClient, database: Database) -> None:
    async with database.session() as session:
        await write_pools(session, [Pool("default"), Pool("shared", adapters=4, max_adapter_rank=16)])

    async def refused(**changes: Any) -> str:
        answer = await api_http.post("/v1/runs", json=builders.run_document(pool="shared", **changes))
        assert answer.status_code == 422
        return str(answer.json()["detail"])

    assert "set training.lora, or choose another pool" in await refused()
    assert "ranks up to 16: lower the rank" in await refused(training={"lora": {"rank": 32}})
    created = await create(api_http, pool="shared", training={"lora": {"rank": 16}})
    assert created["config"]["training"]["lora"]["rank"] == 16


async def test_a_run_whose_tasks_lack_a_field_of_its_command_is_refused(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    tasks = [{"question": "2+2", "hints": [{"text": None}]}, {"question": "2+3"}]
    await builders.add_dataset(database, tasks, name="hinted")
    await builders.add_dataset(database, name="plain")

    async def posted(word: str, **changes: object) -> httpx.Response:
        agent = {"command": ["solve", word], "environment": {"Q": "{task.question}"}}
        document = builders.run_document(**{"dataset": "hinted", "agent": agent, **changes})
        return await api_http.post("/v1/runs", json=document)

    accepted = [await posted(word) for word in ("{task}", "{task.question}", "{{task.other}}", "{other}")]
    assert [response.status_code for response in accepted] == [201] * 4
    refused = await posted("{task.hints.0.text}")
    message = "task 1 of dataset 'hinted' has no field for {task.hints.0.text}"
    assert (refused.status_code, refused.json()["errors"]) == (422, [{"path": "agent", "message": message}])
    assert "task 0 of dataset 'hinted'" in (await posted("{task.nothing}")).json()["detail"]
    assert "count from 0" in (await posted("{task.hints.-1}")).json()["detail"]
    evaluated = await posted("{task.hints}", evaluation={"dataset": "plain"})
    assert "dataset 'hinted'" in evaluated.json()["detail"]
    for agent, runner, words in (
        ({"task_file": "../input.json"}, {}, "such as input.json"),
        ({"task_file": "input.json"}, {"type": "kubernetes", "image": "agents/flight:3"}, "/app/input.json"),
    ):
        refused = await posted("{task}", agent={"command": ["solve"], **agent}, runner=runner)
        assert (refused.status_code, words in refused.json()["detail"]) == (422, True), refused.text


async def test_a_run_whose_graders_read_what_no_task_has_is_refused(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    tasks = [{"question": "2+2", "answers": None}, {"question": "2+3", "answers": {"best": ["5"]}}]
    await builders.add_dataset(database, tasks, name="answered")

    async def posted(reference: str) -> httpx.Response:
        grader = {"type": "token_f1", "reference": reference}
        components = [{"name": "outcome", "from": "agent"}, {"name": "answer", "grader": grader}]
        document = builders.run_document(dataset="answered", reward={"components": components})
        return await api_http.post("/v1/runs", json=document)

    accepted = [await posted(word) for word in ("{task.answers.best.0}", "{task.answers}", "4", "{output.answer}")]
    assert [response.status_code for response in accepted] == [201] * 4
    refused = await posted("{task.answers.worst}")
    [problem] = refused.json()["errors"]
    assert (refused.status_code, problem["path"]) == (422, "reward.components.1.grader.reference")
    assert (
        "none of the first 1000 tasks of dataset 'answered' has a value for {task.answers.worst}" in problem["message"]
    )


async def test_a_run_whose_graders_read_what_no_task_of_its_evaluation_has_is_refused(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    await builders.add_dataset(database, [{"question": "2+2", "answer": "4"}], name="answered")
    await builders.add_dataset(database, [{"question": "2+2", "solution": "4"}], name="held-out")
    grader = {"type": "token_f1", "reference": "{task.answer}"}
    refused = await api_http.post(
        "/v1/runs",
        json=builders.run_document(
            dataset="answered",
            evaluation={"dataset": "held-out"},
            reward={"components": [{"name": "answer", "grader": grader}]},
        ),
    )
    [problem] = refused.json()["errors"]
    assert (refused.status_code, problem["path"]) == (422, "reward.components.0.grader.reference")
    assert "none of the first 1000 tasks of dataset 'held-out' has a value for {task.answer}" in problem["message"]


LARGE = [{"name": "large", "agent_name": "large", "policy": "large"}, {"name": "own"}]
JUDGE = {"type": "score_model", "provider": "other", "model": "m", "rubric": "good?"}
PYTHON = {"type": "python", "function": "grade.py:score", "directory": "GRADERS"}


@pytest.mark.parametrize(
    ("document", "path", "words"),
    [
        ({"grader": JUDGE}, "reward.components.0.grader.provider", "GRADER_PROVIDERS names judge, and no 'other'"),
        (
            {"policies": {"large": {"provider": "other"}}, "roles": LARGE},
            "policies.large.provider",
            "GATEWAY_PROVIDERS names none, and no 'other'",
        ),
        ({"embeddings": {"provider": "other"}}, "embeddings.provider", "or start the platform with this one"),
        (
            {"grader": {**PYTHON, "directory": "/elsewhere"}},
            "reward.components.0.grader.directory",
            "lies in no folder of GRADER_CODE_ROOTS",
        ),
        (
            {"grader": {**PYTHON, "directory": "GRADERS/missing"}},
            "reward.components.0.grader.directory",
            "missing: write the one that holds the grader's files",
        ),
        ({"grader": PYTHON}, "reward.components.0.grader.function", "grade.py: write its path below"),
    ],
    ids=["judge", "policy", "embeddings", "root", "folder", "file"],
)
async def test_a_run_that_names_what_its_services_lack_is_refused_with_the_remedy(
    postgres_dsn: str, database: Database, tmp_path: Path, document: dict[str, Any], path: str, words: str
) -> None:
    await builders.add_dataset(database)
    (tmp_path / "score.py").touch()
    known = {"judges": {"judge"}, "providers": set(), "grader_roots": (tmp_path,), "one_machine": True}
    changes = json.loads(json.dumps(document).replace("GRADERS", str(tmp_path)))
    if (grader := changes.pop("grader", None)) is not None:
        changes["reward"] = {"components": [{"name": "mine", "grader": grader}]}
    async with api_with(Settings(database_url=postgres_dsn, **known)) as http:
        refused = await http.post("/v1/runs", json=builders.run_document(**changes))
        [problem] = refused.json()["errors"]
        assert (refused.status_code, problem["path"], words in problem["message"]) == (422, path, True), refused.text
    # An API that was not told leaves it to the services.
    async with api_with(Settings(database_url=postgres_dsn)) as http:
        assert (await http.post("/v1/runs", json=builders.run_document(**changes))).status_code == 201


async def test_a_run_names_a_pool_that_embeds(api_http: httpx.AsyncClient, database: Database) -> None:
    await builders.add_dataset(database)
    async with database.session() as session:
        await write_pools(session, [Pool("default"), Pool("small", "/m"), Pool("embedder", embeddings=True)])

    async def posted(**changes: Any) -> httpx.Response:
        return await api_http.post("/v1/runs", json=builders.run_document(**changes))

    refusals = [
        ({"embeddings": {"pool": "other"}}, "embeddings.pool", "there is no pool 'other': write one of embedder"),
        ({"embeddings": {"pool": "small"}}, "embeddings.pool", "the engines of pool 'small' sample text"),
        ({"pool": "embedder"}, "pool", "name it under `embeddings`, and another pool here"),
        ({"policies": {"large": {"pool": "embedder"}}, "roles": LARGE}, "policies.large.pool", "make embeddings"),
        ({"embeddings": {"pool": "embedder", "provider": "p"}}, "embeddings", "either provider or pool"),
        ({"embeddings": {"pool": "embedder", "provider_model": "m"}}, "embeddings", "provider_model needs provider"),
    ]
    for changes, path, words in refusals:
        refused = await posted(**changes)
        [problem] = refused.json()["errors"]
        assert (refused.status_code, problem["path"], words in problem["message"]) == (422, path, True), refused.text
    # Nobody has seen an engine yet; then one with another model; then the right one.
    samples = EngineStatus("http://e:1", EngineState.UNREACHABLE, detail="it samples")
    embeds = EngineStatus("http://e:1", EngineState.SERVING)
    for seen, words in ((None, "none has been seen"), (samples, "http://e:1: it samples"), (embeds, None)):
        if seen is not None:
            async with database.session() as session:
                await write_engines(session, [seen], "embedder")
        made = (await posted(embeddings={"pool": "embedder"})).json()
        warned = [one["reason"] + one["remedy"] for one in made["alarms"] if one["subject"] == "embeddings.pool"]
        assert len(warned) == (words is not None), made["alarms"]
        assert words is None or (words in warned[0] and "--is-embedding" in warned[0])
    pools = {one["name"]: one["embeddings"] for one in (await api_http.get("/v1/pools")).json()["items"]}
    assert pools == {"default": False, "small": False, "embedder": True}


async def test_a_run_whose_grader_has_a_broken_schema_is_refused(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    await builders.add_dataset(database, [{"question": "2+2"}], name="schemas")
    grader = {"type": "json_schema", "json_schema": {"type": "objet"}}
    document = builders.run_document(dataset="schemas", reward={"components": [{"name": "form", "grader": grader}]})
    refused = await api_http.post("/v1/runs", json=document)
    [problem] = refused.json()["errors"]
    assert (refused.status_code, problem["path"]) == (422, "reward.components.0.grader.json_schema")
    assert "it is no JSON Schema" in problem["message"]


async def test_a_run_is_created_with_partitions_and_planned_evaluations(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    run = await create(api_http, evaluation={"dataset": "questions", "rollouts_per_task": 3})
    assert (run["intent"], run["phase"], run["progress"]["step"]) == ("running", "pending", 0)
    evaluations = (await api_http.get(f"/v1/runs/{run['id']}/evaluations")).json()["items"]
    assert [(e["id"], e["policy_version"]) for e in evaluations] == [(f"{run['id']}.e1", 0), (f"{run['id']}.e2", None)]
    assert evaluations[0]["results"] == {
        **{
            "rollouts": {},
            "pending": 0,
            "complete": False,
            "reward": None,
            "counted_tasks": 0,
            "agents": {},
            "pass_at": [],
            "facts": [],
        }
    }
    _, [rollout, _] = await builders.add_group(database, await row_of(database, run["id"]))
    call = await builders.add_call(database, rollout)
    found = (await api_http.get(f"/v1/rollouts/{rollout.id}/calls")).json()["items"]
    assert [item["id"] for item in found] == [call.id]


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        ({"algorithm": {"type": "ppo_clip", "clip_hi": 0.3}}, "algorithm.clip_hi", "write 'clip_high'"),
        ({"algorithm": {"type": "ppo"}}, "algorithm", "'ppo_clip'"),
        ({"credit": {"rule": {"type": "discounted", "gama": 1}}}, "credit.rule.gama", "write 'gamma'"),
        ({"sampling": {"group_size": 0}}, "sampling.group_size", "greater than or equal to 1"),
        ({"sampling": {"group_size": 2, "min_siblings": 3}}, "sampling", "no group could count"),
        ({"learning_rate": 1}, "learning_rate", "unknown field"),
        ({"agent": None, "agents": [{"name": "a", "comand": ["x"]}]}, "agents.0.command", "required"),
        ({"agents": [{"name": "a", "command": ["x"]}]}, "body", "write the agent into agents, with a name"),
        ({"agent": {"command": []}}, "agent.command", "at least 1 item"),
        ({"sampling": {"group_size": 1, "min_siblings": 1}}, "sampling.group_size", "write 2 or more"),
        ({"sampling": {"temperature": 0.0}}, "sampling.temperature", "write 1, or leave it out"),
        (
            {"reward": {"components": [{"name": "f1", "grader": {"type": "token_f1"}}]}},
            "reward.components.0.grader.reference",
            "required",
        ),
    ],
)
async def test_a_refused_run_config_names_the_field_and_the_remedy(
    api_http: httpx.AsyncClient, changes: dict[str, Any], path: str, words: str
) -> None:
    response = await api_http.post("/v1/runs", json=builders.run_document(**changes))
    problem = response.json()
    assert (response.status_code, response.headers["content-type"]) == (422, "application/problem+json")
    assert [error["path"] for error in problem["errors"]] == [path]
    assert words in problem["errors"][0]["message"]


async def test_the_path_of_an_error_in_a_choice_is_one_of_the_document(api_http: httpx.AsyncClient) -> None:
    document = builders.run_document(sampling={"override": {"temprature": 1}})
    errors = (await api_http.post("/v1/runs", json=document)).json()["errors"]
    assert [error["path"] for error in errors] == ["sampling.override.temprature", "sampling.override"]
    assert "write 'temperature'" in errors[0]["message"]


async def test_settings_that_do_not_mean_what_they_say_are_alarms_of_the_run(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    made = await create(api_http, algorithm={"type": "gspo", "correction": {"type": "bypass"}})
    [alarm] = made["alarms"]
    assert (alarm["name"], alarm["subject"]) == ("setting", "algorithm.correction")
    async with database.session() as session:
        session.add(tables.RunStatus(run_id=made["id"]))
    [stored] = (await alarms(database, made["id"])).values()
    shown = (await api_http.get(f"/v1/runs/{made['id']}")).json()["alarms"]
    assert shown == [stored.model_dump(mode="json")] == [{**alarm, "since": shown[0]["since"]}]
    [listed] = (await api_http.get(f"/v1/runs/{made['id']}/alarms")).json()["items"]
    assert listed == {**shown[0], "policy": None, "run_name": made["name"], "run_finished_at": None, "state": "active"}
    assert (await api_http.get("/v1/runs/run-none/alarms")).status_code == 404


async def test_a_run_shows_its_best_version_and_the_space_of_its_weights(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    run = await builders.add_run(database)
    for version in range(3):
        await builders.add_policy_version(database, run, version, size_bytes=10 + version)
    _, rollouts = await builders.add_group(database, run, admitted_version=1, state="complete")
    for rollout in rollouts:
        await builders.finish_rollout(database, rollout)
    shown = (await api_http.get(f"/v1/runs/{run.id}")).json()
    assert (shown["best_version"], shown["weights_bytes"]) == (1, 11 + 12)
    assert shown["best_version_reason"] == "by training, each version on other tasks: no evaluation measured one"
    lost = tables.Evaluation(
        id=f"{run.id}.e1", run_id=run.id, number=1, dataset_id=run.dataset_id, rollouts_per_task=1, max_tasks=1
    )
    async with database.session() as session:
        session.add(lost)
    _, (rollout,) = await builders.add_group(database, run, size=1, admitted_version=2, evaluation_id=lost.id)
    async with database.session() as session:
        (await session.get_one(tables.Rollout, rollout.id)).state = "excluded"
    for answer in (
        (await api_http.get(f"/v1/runs/{run.id}")).json(),
        (await api_http.get("/v1/comparison", params={"run": run.id})).json()["runs"][0],
    ):
        reason = "not compared: evaluation 1 (version 2; 0 of 1 tasks counted)"
        assert (answer["best_version"], answer["best_version_reason"]) == (None, reason)


async def test_a_run_shows_what_its_trainer_resolved_and_that_it_moved(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    made = await create(api_http)
    config = RunConfig.model_validate(made["config"])
    assert (made["computation"], config.training.precision) == (None, None)

    async def shown(device: Device) -> tuple[dict[str, Any], list[str]]:
        async with database.session() as session:
            await training.keep_computation(session, made["id"], config.computation(device))
        found = (await api_http.get(f"/v1/runs/{made['id']}")).json()
        return found["computation"], [one.reason for one in (await alarms(database, made["id"])).values()]

    async with database.session() as session:
        session.add(tables.RunStatus(run_id=made["id"]))
    first, reasons = await shown(Device("cuda", flex=True))
    assert (first["device"], first["precision"], first["attention"]) == ("cuda", "bfloat16", "flex")
    assert (first["export_dtype"], first["correction"]["type"], reasons) == ("bfloat16", "decoupled", [])
    moved, reasons = await shown(CPU)
    assert moved == {**first, "moved_to": "cpu"}
    [reason] = reasons
    assert reason.startswith("the trainer runs on cpu, and keeps the settings that it resolved on cuda")
    assert await shown(Device("cuda")) == (first, [])


async def test_a_model_that_is_no_folder_is_refused_with_the_remedy(
    api_http: httpx.AsyncClient, tiny_model: Path, tmp_path: Path
) -> None:
    await create(api_http, model=str(tiny_model))
    await create(api_http, model="/folder-of-another-machine/model")
    for model, words in (
        ("Qwen/Qwen2.5-0.5B", "huggingface-cli download Qwen/Qwen2.5-0.5B --local-dir"),
        (str(tmp_path), "holds no config.json"),
        ("/" + "n" * 300, "holds no config.json"),
    ):
        refused = await api_http.post("/v1/runs", json=builders.run_document(model=model))
        assert (refused.status_code, refused.json()["errors"][0]["path"]) == (422, "model")
        assert words in refused.json()["detail"]
    critic = {"trunk": "own", "model": str(tmp_path)}
    document = builders.run_document(
        algorithm={"type": "ppo_clip", "critic": critic}, credit={"baseline": {"type": "value"}}
    )
    refused = await api_http.post("/v1/runs", json=document)
    assert (refused.status_code, refused.json()["errors"][0]["path"]) == (422, "algorithm.critic.model")


async def test_a_model_that_the_trainers_machine_may_have_is_a_warning(
    api_http: httpx.AsyncClient, tmp_path: Path
) -> None:
    """As one mounted at /mnt/model in trainers and engines of a cluster, whose API mounts none."""
    run = await create(api_http, model=str(tmp_path / "model"))
    assert [(alarm["subject"], alarm["reason"]) for alarm in run["alarms"]] == [
        ("model", f"the API's machine has no folder {tmp_path}/model; the trainer's may have it")
    ]
    assert (await create(api_http, model="/model-of-another-machine"))["alarms"] == []


async def test_a_folder_that_the_runners_machine_may_have_is_a_warning(
    api_http: httpx.AsyncClient, tmp_path: Path
) -> None:
    async def warned(directory: Path) -> list[str]:
        run = await create(api_http, agent={"command": ["./agent"], "directory": str(directory)})
        return [alarm["reason"] for alarm in run["alarms"]]

    assert await warned(tmp_path) == []
    assert await warned(Path("/folder-of-another-machine/agent")) == []
    [reason] = await warned(tmp_path / "missing")
    assert reason == f"the API's machine has no folder {tmp_path}/missing; the runner's may have it"


@pytest.mark.parametrize(
    ("described", "words"),
    [
        ({"num_experts": 128}, "mixture of experts"),
        ({"layer_types": ["linear_attention"]}, "linear_attention"),
        (
            {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}},
            "use the model's bfloat16 weights",
        ),
    ],
)
async def test_a_model_that_trainers_refuse_is_refused_where_the_api_sees_it(
    api_http: httpx.AsyncClient, database: Database, tmp_path: Path, described: dict[str, object], words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(described))
    async with database.session() as session:
        await write_pools(session, [Pool("default", str(tmp_path))])
    for document in (builders.run_document(), builders.run_document(model=str(tmp_path))):
        refused = await api_http.post("/v1/runs", json=document)
        assert (refused.status_code, refused.json()["errors"][0]["path"]) == (422, "model")
        assert words in refused.json()["detail"]


async def test_a_run_that_cannot_fit_the_trainers_machine_is_refused_with_the_arithmetic(
    database: Database, postgres_dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Qwen3-8B"][0]))
    async with database.session() as session:
        await write_pools(session, [Pool("default", str(tmp_path))])
    monkeypatch.setenv("API_MACHINE", '{"gpus": 1, "gpu_bytes": "80GB", "host_bytes": "128Gi"}')
    async with api_with(Settings(database_url=postgres_dsn)) as http:
        await http.post("/v1/datasets", params={"name": "questions"}, content='{"question": 1}')
        refused = await http.post("/v1/runs", json=builders.run_document())
        assert refused.status_code == 422
        (problem,) = refused.json()["errors"]
        assert problem["path"] == "training"
        assert "weights 32.8 GB, gradients 32.8 GB, moments 65.5 GB" in problem["message"]
        # Adapters fit, but not with the activations of so many tokens.
        lora = {"lora": {}, "micro_batch_tokens": 8192}
        made = (await http.post("/v1/runs", json=builders.run_document(training=lora))).json()
        assert [one["subject"] for one in made["alarms"]] == ["training"]
        assert made["config"]["optimizer"]["learning_rate"] == 1e-5


async def test_a_mixture_of_experts_may_be_a_frozen_policy(
    api_http: httpx.AsyncClient, database: Database, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_experts": 128}))
    await builders.add_dataset(database)
    async with database.session() as session:
        await write_pools(session, [Pool("default"), Pool("judge", str(tmp_path))])
    roles = [{"name": "writer", "agent_name": "writer"}, {"name": "judge", "policy": "judge"}]
    for is_frozen, status in ((False, 422), (True, 201)):
        policies = {"judge": {"pool": "judge", "frozen": is_frozen}}
        answer = await api_http.post("/v1/runs", json=builders.run_document(roles=roles, policies=policies))
        assert answer.status_code == status, answer.text
    alone = builders.run_document(pool="judge", training={"steps": 0})
    assert (await api_http.post("/v1/runs", json=alone)).status_code == 201


async def test_a_run_on_an_unknown_dataset_is_404_with_the_remedy(api_http: httpx.AsyncClient) -> None:
    response = await api_http.post("/v1/runs", json=builders.run_document(dataset="nowhere"))
    assert (response.status_code, "upload it" in response.json()["detail"]) == (404, True)


async def test_equal_creates_with_one_key_make_one_run(api_http: httpx.AsyncClient) -> None:
    await create(api_http)
    headers = {"idempotency-key": "first"}
    sent = [api_http.post("/v1/runs", json=builders.run_document(name="keyed"), headers=headers) for _ in range(3)]
    answers = await asyncio.gather(*sent)
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.json()["id"] for answer in answers}) == 1
    other = await api_http.post("/v1/runs", json=builders.run_document(name="another"), headers=headers)
    assert (other.status_code, "send a new key" in other.json()["detail"]) == (422, True)
    assert len((await api_http.get("/v1/runs", params={"name": "keyed"})).json()["items"]) == 1


async def test_pause_resume_and_cancel_change_what_is_wanted_and_repeats_change_nothing(
    api_http: httpx.AsyncClient,
) -> None:
    run = await create(api_http)
    seen = []
    for action in ("pause", "pause", "resume", "cancel", "cancel"):
        answer = (await api_http.post(f"/v1/runs/{run['id']}/{action}")).json()
        seen.append((answer["intent"], answer["allowed_actions"]))
    running, paused = ["pause", "cancel", "evaluate"], ["resume", "cancel", "evaluate"]
    assert seen == [
        ("paused", paused),
        ("paused", paused),
        ("running", running),
        ("cancelled", []),
        ("cancelled", []),
    ]


@pytest.mark.parametrize(
    ("phase", "action", "allowed"),
    [("completed", "pause", ["evaluate"]), ("completed", "cancel", ["evaluate"]), ("failed", "resume", ["cancel"])],
)
async def test_what_a_run_cannot_do_is_409_with_what_it_can(
    api_http: httpx.AsyncClient, database: Database, phase: str, action: str, allowed: list[str]
) -> None:
    run = await create(api_http)
    await set_phase(database, run["id"], phase)
    response = await api_http.post(f"/v1/runs/{run['id']}/{action}")
    assert (response.status_code, response.json()["allowed_actions"]) == (409, allowed)


async def test_a_completed_run_may_be_evaluated_again(api_http: httpx.AsyncClient, database: Database) -> None:
    run = await create(api_http, evaluation={"dataset": "questions", "at_end": False, "rollouts_per_task": 2})
    await builders.add_policy_version(database, await row_of(database, run["id"]), 0)
    await set_phase(database, run["id"], "completed")
    path = f"/v1/runs/{run['id']}/evaluations"
    made = await api_http.post(path, json={"policy_version": 0, "max_tasks": 1})
    assert (made.status_code, made.json()["number"], made.json()["rollouts_per_task"]) == (201, 2, 2)
    refused = await api_http.post(path, json={"policy_version": 7})
    assert (refused.status_code, "there are 0" in refused.json()["detail"]) == (409, True)


async def test_training_tasks_are_not_held_out_unless_asked_for(api_http: httpx.AsyncClient) -> None:
    run = await create(api_http)
    path = f"/v1/runs/{run['id']}/evaluations"
    refused = await api_http.post(path, json={"policy_version": 0})
    assert (refused.status_code, "plans no evaluation: name the dataset" in refused.json()["detail"]) == (422, True)
    assert (await api_http.post(path, json={"policy_version": 0, "dataset": "questions"})).status_code == 201


async def test_runs_are_found_by_name_and_phase(api_http: httpx.AsyncClient, database: Database) -> None:
    first, second = await create(api_http, name="first"), await create(api_http, name="second")
    await set_phase(database, second["id"], "running")
    by_name = (await api_http.get("/v1/runs", params={"name": "first"})).json()["items"]
    pending = (await api_http.get("/v1/runs", params={"phase": "pending"})).json()["items"]
    running = (await api_http.get("/v1/runs", params={"phase": "running"})).json()["items"]
    assert [[run["id"] for run in found] for found in (by_name, pending, running)] == [
        [first["id"]],
        [first["id"]],
        [second["id"]],
    ]


SORTED = {
    "newest": "cba",
    "oldest": "abc",
    "highest": "acb",
    "lowest": "cab",
    "most_steps": "cab",
    "fewest_steps": "bac",
    "phase": "abc",
}


@pytest.mark.parametrize(("sort", "order"), SORTED.items())
async def test_runs_are_counted_and_sorted_page_by_page(
    api_http: httpx.AsyncClient, database: Database, sort: str, order: str
) -> None:
    made = {name: await builders.add_run(database) for name in "abc"}
    async with database.session() as session:
        for name, phase in (("b", "paused"), ("c", "failed")):
            (await session.get_one(tables.RunStatus, made[name].id)).phase = phase
    await trained_step(database, made["a"], 1, [1.0])
    for number, reward in enumerate((1.0, 0.5), start=1):
        await trained_step(database, made["c"], number, [reward])
    names, listed, cursor = {run.id: name for name, run in made.items()}, "", None
    for place in range(3):
        asked = {"sort": sort, "count": True, "limit": 1, **({"cursor": cursor} if cursor else {})}
        page = (await api_http.get("/v1/runs", params=asked)).json()
        listed, cursor = listed + names[page["items"][0]["id"]], page["next_cursor"]
        assert page["total"] == (None if place else 3)
    assert (listed, cursor) == (order, None)
    other = "newest" if sort == "oldest" else "oldest"
    first = (await api_http.get("/v1/runs", params={"sort": sort, "limit": 1})).json()["next_cursor"]
    stale = await api_http.get("/v1/runs", params={"sort": other, "cursor": first})
    assert (stale.status_code, stale.json()["cause"]) == (400, "cursor")
    failed = (await api_http.get("/v1/runs", params={"phase": "failed", "count": True, "sort": sort})).json()
    assert (failed["total"], [one["id"] for one in failed["items"]]) == (1, [made["c"].id])


@pytest.mark.parametrize("path", ["", "/steps", "/metrics", "/evaluations", "/policies", "/samples", "/evaluations/1"])
async def test_an_unknown_run_is_404(api_http: httpx.AsyncClient, path: str) -> None:
    assert (await api_http.get(f"/v1/runs/run-nobody{path}")).status_code == 404


async def test_the_character_zero_in_an_address_is_refused_and_not_an_error_of_ours(
    api_http: httpx.AsyncClient,
) -> None:
    response = await api_http.get("/v1/runs/run-%00")
    assert response.status_code == 422


async def test_the_agents_of_a_run_are_listed_with_their_names_and_shares(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    run = await builders.add_run(database)
    _, [rollout, other] = await builders.add_group(database, run)
    tools = [{"type": "function", "function": {"name": name}} for name in ("search", "clock")]
    first = await builders.add_call(database, rollout, agent="a" * 16, continuation="fresh", tools=tools, role="lead")
    for continuation, name in (("extend", None), ("extend", "planner"), ("fork", None)):
        await builders.add_call(
            *(database, rollout), agent="a" * 16, agent_name=name, continuation=continuation, parent_call_id=first.id
        )
    traced = await builders.add_call(
        database, other, agent="b" * 16, continuation="fresh", parent_span_id="cd" * 8, trace_id="ef" * 16
    )
    await builders.add_call(database, rollout)
    outer = {"trace_id": "ef" * 16, "span_id": "ab" * 8, "attributes": {"gen_ai.agent.name": "searcher"}}
    inner = {"trace_id": "ef" * 16, "span_id": "cd" * 8, "parent_span_id": "ab" * 8}
    await builders.add_tool_span(database, other, "a", kind="agent", **outer)
    await builders.add_tool_span(database, other, "http", kind="other", **inner)
    one = (await api_http.get(f"/v1/runs/{run.id}/agents", params={"limit": 1})).json()
    two = (await api_http.get(f"/v1/runs/{run.id}/agents", params={"limit": 1, "cursor": one["next_cursor"]})).json()
    [planner], [searcher] = one["items"], two["items"]
    times = [planner.pop(name) for name in ("first_seen_at", "last_seen_at")]
    assert times == sorted(times) and times[1] < searcher["first_seen_at"]
    assert planner == {
        **{"identity": "a" * 16, "name": "planner", "roles": ["lead"], "tools": ["clock", "search"], "calls": 4},
        **{"extend_share": 0.5, "fork_share": 0.25, "fresh_share": 0.25},
        **{"call_id": first.id, "rollout_id": rollout.id},
    }
    assert (searcher["name"], searcher["call_id"], two["next_cursor"]) == ("searcher", traced.id, None)
    shown = (await api_http.get(f"/v1/rollouts/{rollout.id}/calls")).json()["items"]
    assert [one["role"] for one in shown] == ["lead", None, None, None, None]
    assert [(one["agent"], one["continuation"]) for one in shown][::4] == [("a" * 16, "fresh"), (None, None)]
    assert (await api_http.get("/v1/runs/run-none/agents")).status_code == 404


async def test_a_run_has_its_policies_inside_and_each_has_the_routes_of_a_run(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    await create(api_http)
    async with database.session() as session:
        await write_pools(session, [Pool("default"), Pool("second"), Pool("shared", adapters=2)])
    roles = [{"name": "writer", "agent_name": "w"}, {"name": "checker", "policy": "judge"}]
    made = await create(api_http, roles=roles, policies={"judge": {"pool": "second"}})
    judge = made["policies"]["judge"]
    assert {name: judge[name] for name in ("trains", "step", "steps", "policy_version", "parent")} == {
        "trains": True,
        "step": 0,
        "steps": made["progress"]["steps"],
        "policy_version": None,
        "parent": None,
    }
    listed = (await api_http.get("/v1/runs")).json()["items"]
    assert [one["id"] for one in listed if one["policies"]] == [made["id"]]
    assert judge["id"] not in {one["id"] for one in listed}
    # A policy is no run: nothing steers it alone.
    path = f"/v1/runs/{judge['id']}"
    for method, of_run in (("GET", ""), ("GET", "/steps"), ("POST", "/pause"), ("POST", "/cancel"), ("DELETE", "")):
        refused = await api_http.request(method, f"{path}{of_run}")
        words = f"'{judge['id']}' is policy 'judge' of run {made['id']}: name that run and the policy"
        assert (refused.status_code, refused.json()["detail"]) == (404, words)
    await builders.add_policy_version(database, await row_of(database, judge["id"]), 0)
    for name, count in (("judge", 1), (None, 0)):
        parameters = {} if name is None else {"policy": name}
        answer = await api_http.get(f"/v1/runs/{made['id']}/policies", params=parameters)
        assert len(answer.json()["items"]) == count
        metrics = (await api_http.get(f"/v1/runs/{made['id']}/metrics", params=parameters)).json()
        assert (metrics["run_id"], metrics["policy"]) == (made["id"], name)
    for of_policy in ("steps", "metrics", "policies", "samples"):
        refused = await api_http.get(f"/v1/runs/{made['id']}/{of_policy}", params={"policy": "none"})
        words = f"run {made['id']} has no policy 'none' with versions of its own: it has judge"
        assert (refused.status_code, refused.json()["detail"]) == (404, words)
    assert (await api_http.post(f"/v1/runs/{made['id']}/pause")).json()["intent"] == "paused"
    assert (await row_of(database, judge["id"])).intent == "paused"

    async def problem(**policy: Any) -> str:
        document = builders.run_document(roles=roles, policies={"judge": policy})
        refused = await api_http.post("/v1/runs", json=document)
        assert refused.status_code == 422, refused.text
        return str(refused.json()["errors"][0]["path"] + ": " + refused.json()["errors"][0]["message"])

    assert "policies.judge.pool: there is no pool 'third'" in await problem(pool="third")
    assert "policies: 2 policies name pool 'default', whose engines serve 1 at a time" in await problem(pool="default")
    assert "policies.judge.lora: the engines of pool 'shared' serve LoRA adapters" in await problem(pool="shared")
    frozen = {"pool": "shared", "frozen": True, "lora": {"rank": 4}}
    assert "policies.judge.lora: a frozen policy that is new has no adapters: remove lora" in await problem(**frozen)


async def test_a_run_whose_document_does_not_parse_is_shown_with_the_reason(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    good, broken = await create(api_http, name="good"), await create(api_http, name="broken")
    async with database.session() as session:
        config = {**(await row_of(database, broken["id"])).config, "algorithm": {"type": "of another version"}}
        await session.execute(update(tables.Run).where(tables.Run.id == broken["id"]).values(config=config))
    await set_phase(database, broken["id"], "completed")
    listed = (await api_http.get("/v1/runs")).json()["items"]
    assert [one["name"] for one in listed] == ["broken", "good"]
    shown = (await api_http.get(f"/v1/runs/{broken['id']}")).json()
    for one in (listed[0], shown):
        assert (one["phase"], one["config"], one["progress"]["steps"]) == ("completed", None, 100)
        assert one["reason"].startswith("the stored document does not parse: algorithm: Input")
        assert one["allowed_actions"] == []
    assert shown["best_version_reason"] == shown["reason"]
    for path in ("steps", "metrics", "evaluations", "alarms", "agents"):
        answer = await api_http.get(f"/v1/runs/{broken['id']}/{path}")
        assert answer.status_code == 200, (path, answer.text)
    compared = await api_http.get("/v1/comparison", params={"run": [good["id"], broken["id"]]})
    assert compared.status_code == 200, compared.text
    refused = await api_http.post(f"/v1/runs/{broken['id']}/evaluations", json={})
    assert (refused.status_code, "does not parse" in refused.text) == (409, True)
    await builders.add_policy_version(database, await row_of(database, broken["id"]), 0)
    refused = await api_http.post(f"/v1/runs/{broken['id']}/resume", json={"changes": {"training": {"steps": 1}}})
    assert (refused.status_code, "does not parse" in refused.text) == (422, True)
    assert (await api_http.delete(f"/v1/runs/{broken['id']}")).status_code == 202


async def test_runs_are_sorted_by_the_reward_that_they_show(api_http: httpx.AsyncClient, database: Database) -> None:
    late, other = await builders.add_run(database), await builders.add_run(database)
    await trained_step(database, late, 1, [0.25, 0.5])
    await trained_step(database, other, 1, [0.5, 0.5])
    async with database.session() as session:
        rollout = await session.scalar(select(tables.Rollout.id).where(tables.Rollout.run_id == late.id).limit(1))
        session.add(tables.ExternalReward(rollout_id=rollout, key="after credit", name="human", value=0.5))
    for sort, runs in (
        ("highest", [(late.id, 0.625), (other.id, 0.5)]),
        ("lowest", [(other.id, 0.5), (late.id, 0.625)]),
    ):
        page = (await api_http.get("/v1/runs", params={"sort": sort})).json()
        assert [(run["id"], run["progress"]["reward_mean"]) for run in page["items"]] == runs
    shown = (await api_http.get(f"/v1/runs/{late.id}")).json()
    [step] = (await api_http.get(f"/v1/runs/{late.id}/steps")).json()["items"]
    assert shown["progress"]["reward_mean"] == step["reward_mean"] == 0.625
