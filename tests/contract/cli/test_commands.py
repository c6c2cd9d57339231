"""Commands against the real API: what people see, what programs read, and exit statuses."""

from __future__ import annotations

import asyncio
import json
import re
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tokenizers import Tokenizer
from typer.testing import CliRunner, Result

from leyden.libs.cli.__main__ import app
from leyden.libs.cli.errors import Exit
from leyden.libs.contracts.weights import weights_sha256
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.store.engines import Pool, write_pools
from tests.contract.api.test_comparison import trained_step
from tests.fakes.served_api import TOKEN
from tests.support import builders

Leyden = Any
ODD = "list[int] is [bold] and [/INST] ends it"


@pytest.fixture
def leyden(api_url: str, tmp_path: Path) -> Leyden:
    """Runs a command against the API."""

    def run(*words: str, token: str = TOKEN) -> Result:
        root = ["--home", str(tmp_path / "home"), "--url", api_url, "--token", token]
        return CliRunner().invoke(app, [*root, *words], env={"COLUMNS": "200"})

    return run


@pytest.fixture
def document(tmp_path: Path, leyden: Leyden) -> Path:
    """A run's document whose dataset is there."""
    rows = tmp_path / "questions.jsonl"
    rows.write_text('{"question": 1}\n{"question": 2}\n')
    assert leyden("dataset", "upload", str(rows)).exit_code == 0
    path = tmp_path / "run.json"
    (tmp_path / "agent").mkdir()
    path.write_text(json.dumps(builders.run_document(agent={"command": ["./agent"], "directory": "agent"})))
    return path


def test_a_dataset_is_uploaded_listed_and_shown(leyden: Leyden, document: Path) -> None:
    listed = json.loads(leyden("dataset", "list", "--json").stdout)
    assert [(item["name"], item["task_count"]) for item in listed] == [("questions", 2)]
    shown = json.loads(leyden("dataset", "show", "questions", "--json").stdout)
    assert shown["tasks"] == [{"question": 1}, {"question": 2}]
    assert "questions" in leyden("dataset", "list").stdout
    assert '{"question": 2}' in leyden("dataset", "show", listed[0]["id"]).stdout


def test_tokens_expire_and_rotate_and_their_changes_are_listed(leyden: Leyden, tmp_path: Path) -> None:
    made = json.loads(leyden("token", "create", "ci", "--scope", "write", "--expires", "30d", "--json").stdout)
    rows = tmp_path / "questions.jsonl"
    rows.write_text('{"question": 1}\n')
    assert leyden("dataset", "upload", str(rows), token=made["token"]).exit_code == 0
    new = json.loads(leyden("token", "rotate", made["id"], "--json").stdout)
    assert leyden("run", "list", token=made["token"]).exit_code == Exit.NOT_ALLOWED
    assert leyden("run", "list", token=new["token"]).exit_code == 0
    assert new["id"] in leyden("token", "list").stdout
    assert leyden("token", "revoke", new["id"]).exit_code == 0
    entries = json.loads(leyden("audit", "--json").stdout)
    assert [(one["token_name"], one["action"]) for one in entries] == [
        ("first-admin", "revoke_token"),
        ("first-admin", "rotate_token"),
        ("ci", "upload_dataset"),
        ("first-admin", "create_token"),
    ]
    assert "upload_dataset" in leyden("audit", "--token", "ci").stdout
    assert "no duration" in leyden("token", "create", "x", "--expires", "soon").stderr


def test_a_bad_dataset_is_refused_with_its_lines(leyden: Leyden, tmp_path: Path) -> None:
    rows = tmp_path / "bad.jsonl"
    rows.write_text('{"a": 1}\n[2]\n')
    result = leyden("dataset", "upload", str(rows))
    assert (result.exit_code, "line 2: a row must be a JSON object" in result.stderr) == (Exit.REFUSED, True)


def test_a_run_is_created_with_changes_found_by_name_and_steered(leyden: Leyden, document: Path) -> None:
    changes = ("--set", "training.steps=7", "--set", "name=mine", "--set", "credit.baseline.per=state")
    made = json.loads(leyden("run", "create", str(document), *changes, "--key", "k", "--json").stdout)
    assert (made["name"], made["progress"]["steps"]) == ("mine", 7)
    assert made["config"]["credit"]["baseline"]["per"] == "state"
    assert made["config"]["agent"]["directory"] == str(document.parent / "agent")
    again = json.loads(leyden("run", "create", str(document), *changes, "--key", "k", "--json").stdout)
    assert again["id"] == made["id"]
    assert json.loads(leyden("run", "pause", "mine", "--json").stdout)["intent"] == "paused"
    assert "running" in leyden("run", "resume", "mine").stdout
    wanted = ("--version", "0", "--tasks", "1", "--json")
    refused = leyden("run", "evaluate", "mine", *wanted)
    assert (refused.exit_code, "name the dataset" in refused.stderr) == (Exit.REFUSED, True)
    evaluated = json.loads(leyden("run", "evaluate", "mine", "--dataset", made["dataset_id"], *wanted).stdout)
    assert (evaluated["number"], evaluated["max_tasks"]) == (1, 1)
    assert json.loads(leyden("run", "show", "mine", "--json").stdout)["evaluations"][0]["id"] == evaluated["id"]
    assert leyden("run", "cancel", "mine").exit_code == 0
    refused = leyden("run", "resume", "mine")
    assert (refused.exit_code, "allowed now: nothing" in refused.stderr) == (Exit.REFUSED, True)
    # Cancelled by people: the end is there although no controller has seen it.
    assert "mine" in leyden("run", "list").stdout


def test_an_ended_team_continues_with_its_policies(leyden: Leyden, document: Path, postgres_dsn: str) -> None:
    roles = '[{"name": "writer", "agent_name": "w"}, {"name": "checker", "policy": "checker"}]'
    changes = ("--set", f"roles={roles}", "--set", 'policies={"checker": {"pool": "second"}}')
    asyncio.run(add_second_pool(postgres_dsn))
    made = json.loads(leyden("run", "create", str(document), *changes, "--set", "name=team", "--json").stdout)
    runs = [made["id"], made["policies"]["checker"]["id"]]
    asyncio.run(end_with_versions(postgres_dsn, runs, 3))
    wrong = leyden("run", "resume", "team", "--policy-version", "checker")
    assert (wrong.exit_code, "write --policy-version checker=17" in wrong.stderr) == (Exit.USAGE, True)
    options = ("--policy-version", "checker=1", "--steps", "5", "--set", "optimizer.learning_rate=5e-7")
    shown = leyden("run", "resume", "team", *options).stdout
    assert f"{runs[0]}, version 2" in shown
    assert f"from {runs[0]}, version 1" in shown
    shown = leyden("run", "show", runs[0]).stdout
    assert "checker" in shown and "cancel, resume (as a new run)" in shown
    assert runs[1] in shown
    listed = json.loads(leyden("policy", "list", runs[0], "--policy", "checker", "--json").stdout)
    assert [one["version"] for one in listed] == [0, 1, 2]
    # No trainer has run: the answer names the log that is asked for.
    of_trainer = leyden("logs", "trainer", "--run", runs[0], "--policy", "checker")
    assert (of_trainer.exit_code, f"trainer-{runs[1]}" in of_trainer.stderr) == (Exit.NOT_FOUND, True)
    unknown = leyden("logs", "trainer", "--run", runs[0], "--policy", "judge")
    assert (unknown.exit_code, "it has checker" in unknown.stderr) == (Exit.NOT_FOUND, True)
    (child,) = (
        one
        for one in json.loads(leyden("run", "list", "--json").stdout)
        if one["parent"] == {"run_id": runs[0], "version": 2}
    )
    assert (child["config"]["optimizer"]["learning_rate"], child["progress"]["steps"]) == (5e-7, 5)


async def add_second_pool(dsn: str) -> None:
    database = Database(dsn)
    async with database.session() as session:
        await write_pools(session, [Pool("default"), Pool("second")])
    await database.close()


async def end_with_versions(dsn: str, run_ids: list[str], count: int) -> None:
    database = Database(dsn)
    for run_id in run_ids:
        async with database.session() as session:
            session.add(tables.RunStatus(run_id=run_id, phase="failed"))
            run = await session.get_one(tables.Run, run_id)
        for version in range(count):
            await builders.add_policy_version(database, run, version)
    await database.close()


def test_a_run_begins_with_a_recipe_that_is_listed_and_shown(leyden: Leyden, document: Path) -> None:
    assert "Adapters of rank 32" in leyden("recipes").stdout.replace("\n", " ")
    shown = json.loads(leyden("recipes", "lora-1gpu").stdout)
    assert shown["training"]["lora"]["rank"] == 32
    unknown = leyden("recipes", "lora")
    assert (unknown.exit_code, "write one of flight-cpu" in unknown.stderr) == (Exit.NOT_FOUND, True)
    made = json.loads(leyden("run", "create", str(document), "--set", "recipe=lora-1gpu", "--json").stdout)["config"]
    assert (made["recipe"], made["training"]["lora"]["rank"], made["optimizer"]["learning_rate"]) == (None, 32, 1e-4)
    refused = leyden("run", "create", str(document), "--set", "recipe=lora")
    assert (refused.exit_code, "recipe: there is no recipe 'lora'" in refused.stderr) == (Exit.REFUSED, True)


def test_a_link_opens_the_console_at_a_run(leyden: Leyden, document: Path) -> None:
    run = json.loads(leyden("run", "create", str(document), "--set", "name=quiz", "--json").stdout)
    link = json.loads(leyden("console", "quiz", "--json").stdout)["console"]
    token = re.search(f"/#sign-in=(.*)&to=/runs/{run['id']}$", link)
    assert token is not None
    assert leyden("run", "list", token=token[1]).exit_code == 0
    assert leyden("run", "cancel", run["id"], token=token[1]).exit_code == Exit.NOT_ALLOWED
    assert leyden("console", token=token[1]).exit_code == Exit.NOT_ALLOWED
    assert leyden("console", "none").exit_code == Exit.NOT_FOUND


def test_a_toml_document_is_read(leyden: Leyden, document: Path) -> None:
    path = document.with_suffix(".toml")
    path.write_text('name = "toml"\ndataset = "questions"\n[agent]\ncommand = ["./agent"]\n')
    assert json.loads(leyden("run", "create", str(path), "--json").stdout)["name"] == "toml"


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ("training.stepps=1", Exit.REFUSED, "training.stepps: unknown field: write 'steps'"),
        ("training", Exit.USAGE, "is not PATH=VALUE"),
        ("name.first=1", Exit.USAGE, "is not an object"),
        ("dataset=nowhere", Exit.NOT_FOUND, "upload it"),
    ],
)
def test_a_wrong_change_names_the_remedy(leyden: Leyden, document: Path, change: str, status: Exit, words: str) -> None:
    result = leyden("run", "create", str(document), "--set", change)
    assert result.exit_code == status
    assert words in result.stderr


def test_statuses_distinguish_missing_things_and_missing_rights(leyden: Leyden) -> None:
    assert leyden("run", "show", "nobody").exit_code == Exit.NOT_FOUND
    assert leyden("rollout", "show", "nobody").exit_code == Exit.NOT_FOUND
    assert leyden("run", "list", token="wrong").exit_code == Exit.NOT_ALLOWED


def test_a_list_of_runs_has_their_curves_and_best_versions(leyden: Leyden, postgres_dsn: str) -> None:
    async def add() -> tuple[str, str]:
        database = Database(postgres_dsn)
        try:
            new = await builders.add_run(database)
            trained = await builders.add_run(database, config=builders.run_document(model="/models/small", pool="big"))
            for version in (0, 1):
                await builders.add_policy_version(database, trained, version)
            for number, rewards in enumerate([(0.0, 1.0), (1.0, 1.0)], start=1):
                await trained_step(database, trained, number, rewards)
            return new.id, trained.id
        finally:
            await database.close()

    new, trained = asyncio.run(add())
    lines = {run: line for line in leyden("run", "list").stdout.splitlines() for run in (new, trained) if run in line}
    for words in ("▁█", "1: 0.75 in training"):
        assert words in lines[trained], lines
    assert "none yet" in lines[new]
    found = {one["id"]: one for one in json.loads(leyden("run", "list", "--json").stdout)}
    shown = (found[trained]["agent_names"], found[trained]["model"], found[trained]["config"]["pool"])
    assert shown == (["{python} /agents/agent.py"], "/models/small", "big")
    curves = {run: one["curve"] for run, one in found.items()}
    assert (curves[trained]["points"], curves[trained]["best_reward"]) == ([[1, 0.5], [2, 1.0]], 0.75)
    assert (curves[new]["points"], curves[new]["best_version"], curves[new]["best_reward"]) == ([], None, None)


def test_a_trajectory_is_shown_call_by_call_with_credit_and_tools(leyden: Leyden, postgres_dsn: str) -> None:
    run_id, rollout_id = asyncio.run(add_trajectory(postgres_dsn))
    shown = leyden("rollout", "show", rollout_id, "--tokens").stdout
    for words in ("What is 2+2?", "Four.", "advantage 0.75", "memory: error ToolError", "-0.5000", "success yes"):
        assert words in shown
    found = json.loads(leyden("rollout", "show", rollout_id, "--json").stdout)
    assert (found["calls"][0]["prompt_ids"], found["spans"][0]["tool"]) == ([1, 2, 3], "memory")
    siblings = leyden("rollout", "group", rollout_id.rpartition(".")[0]).stdout
    assert rollout_id in siblings and "+0.750" in siblings, siblings
    listed = json.loads(leyden("rollout", "list", "--run", run_id, "--state", "finished", "--json").stdout)
    assert [item["id"] for item in listed] == [rollout_id]
    beside = leyden("run", "compare", run_id, run_id).stdout
    assert run_id in beside and "Differences of the documents" in beside and "Nothing yet." in beside
    filtered = leyden("rollout", "list", "--run", run_id, "--text", "four", "--sort", "highest", "--failed", "--json")
    assert json.loads(filtered.stdout) == []
    filtered = leyden("rollout", "list", "--run", run_id, "--text", "four", "--reward-max", "99", "--json")
    assert [item["id"] for item in json.loads(filtered.stdout)] == [rollout_id]
    assert leyden("run", "watch", run_id).exit_code == Exit.ERROR


def test_transitions_are_shown_with_reward_and_next_state(leyden: Leyden, postgres_dsn: str) -> None:
    _, rollout_id = asyncio.run(add_trajectory(postgres_dsn))
    shown = leyden("rollout", "trajectory", rollout_id).stdout
    for words in ("1  model", "Four.", "+0", "2  tool memory  error", "that of the call that asked", "no next state"):
        assert words in shown, shown
    first = leyden("rollout", "trajectory", rollout_id, "--limit", "1")
    assert "These are the first 1" in first.stdout and "memory" not in first.stdout
    found = json.loads(leyden("rollout", "trajectory", rollout_id, "--json").stdout)
    assert [(one["type"], one["reward"]) for one in found] == [("llm", 0.0), ("tool", None)]
    assert (found[0]["next_state"], found[1]["next_state"]) == (found[1]["state"], None)
    assert leyden("rollout", "trajectory", "nowhere").exit_code == Exit.NOT_FOUND


def test_tokens_are_shown_with_their_text_by_the_tokenizer_of_the_run_or_of_a_named_folder(
    leyden: Leyden, postgres_dsn: str, tiny_model: Path
) -> None:
    run_id, rollout_id = asyncio.run(add_trajectory(postgres_dsn))
    with psycopg.connect(postgres_dsn) as connection:
        ids = connection.execute("SELECT sampled_ids FROM model_calls").fetchone()
    assert ids is not None
    first = struct.unpack_from("<i", ids[0])[0]
    text = json.dumps(Tokenizer.from_file(str(tiny_model / "tokenizer.json")).decode([first]), ensure_ascii=False)
    without = leyden("rollout", "show", rollout_id, "--tokens").stdout
    assert "name it with --model" in without
    assert text not in without
    named = leyden("rollout", "show", rollout_id, "--tokens", "--model", str(tiny_model)).stdout
    assert re.search(rf"^{first} +{re.escape(text)} +-0\.5000 +0", named, re.MULTILINE), named

    async def add_version() -> None:
        database = Database(postgres_dsn)
        try:
            run = tables.Run(id=run_id)
            await builders.add_policy_version(database, run, 0, path=str(tiny_model))
        finally:
            await database.close()

    asyncio.run(add_version())
    assert leyden("rollout", "show", rollout_id, "--tokens").stdout == named


def test_exit_status_0_is_shown_as_exited_0_beside_the_reward(leyden: Leyden, postgres_dsn: str) -> None:
    run_id, rollout_id = asyncio.run(add_trajectory(postgres_dsn))
    with psycopg.connect(postgres_dsn) as connection:
        connection.execute("ALTER TABLE rollouts DISABLE TRIGGER USER")
        connection.execute("UPDATE rollouts SET reward = 0, reason = 'succeeded' WHERE id = %s", [rollout_id])
    for words in (["rollout", "list", "--run", run_id], ["rollout", "show", rollout_id]):
        shown = leyden(*words).stdout
        assert ("exited 0" in shown, "succeeded" in shown) == (True, False), shown


def test_a_rollout_shows_the_end_of_its_output_and_all_of_it_when_asked(leyden: Leyden, postgres_dsn: str) -> None:
    _, rollout_id = asyncio.run(add_trajectory(postgres_dsn))
    with psycopg.connect(postgres_dsn) as connection:
        printed = "\n".join(f"line {number}" for number in range(1, 21))
        connection.execute("ALTER TABLE outcomes DISABLE TRIGGER USER")
        connection.execute("UPDATE outcomes SET stdout_tail = %s, stderr_tail = 'a [warning]'", [printed])
    end = leyden("rollout", "show", rollout_id).stdout
    assert ("line 20" in end, "line 9\n" in end, "a [warning]" in end) == (True, False, True)
    assert "stdout of attempt 1 (its end; --output shows all that is stored)" in end
    full = leyden("rollout", "show", rollout_id, "--output").stdout
    assert ("line 1\n" in full, "its end" in full) == (True, False)


async def add_attempts(dsn: str) -> str:
    """A rollout whose first attempt expired and whose second one runs, each with a call."""
    database = Database(dsn)
    try:
        _, [rollout] = await builders.add_group(database, await builders.add_run(database), size=1)
        for number, state in ((1, "expired"), (2, "running")):
            await builders.add_attempt(database, rollout, number, state=state)
            answer = {"role": "assistant", "content": f"said in attempt {number}"}
            await builders.add_call(database, rollout, attempt=number, answer=answer)
        return rollout.id
    finally:
        await database.close()


def test_a_rollout_without_a_counted_attempt_shows_its_newest(leyden: Leyden, postgres_dsn: str) -> None:
    rollout_id = asyncio.run(add_attempts(postgres_dsn))
    shown = leyden("rollout", "show", rollout_id).stdout
    assert ("said in attempt 1" in shown, "said in attempt 2" in shown) == (False, True)
    assert "No attempt counts: these are the calls of attempt 2, the newest." in shown
    found = json.loads(leyden("rollout", "show", rollout_id, "--json").stdout)
    assert [call["attempt"] for call in found["calls"]] == [2]
    earlier = leyden("rollout", "show", rollout_id, "--attempt", "1").stdout
    assert ("said in attempt 1" in earlier, "No attempt counts" in earlier) == (True, False)


def test_a_rollout_is_rated(leyden: Leyden, postgres_dsn: str) -> None:
    rollout_id = asyncio.run(add_rated(postgres_dsn))
    shown = leyden("rollout", "rate", rollout_id, "thumbs", "-1", "--comment", "no [answer]")
    assert (shown.exit_code, shown.stdout.strip()) == (0, f"{rollout_id}: thumbs -1 for attempt 1"), shown.output
    assert leyden("rollout", "rate", rollout_id, "thumbs", "0.5").exit_code == 0
    told = leyden("rollout", "show", rollout_id).stdout
    assert re.search(r"feedback thumbs +-1 from first-admin for attempt 1: no \[answer\]", told), told
    refused = leyden("rollout", "rate", rollout_id, "stars", "1")
    assert (refused.exit_code, "write one of thumbs" in refused.output) == (Exit.REFUSED, True)


@pytest.mark.parametrize("phase", ["failed", "cancelled"])
def test_a_run_that_does_not_complete_ends_each_way_to_watch_it_with_status_1(
    leyden: Leyden, document: Path, postgres_dsn: str, phase: str
) -> None:
    create = ("run", "create", str(document), "--key", "k")
    run_id = json.loads(leyden(*create, "--json").stdout)["id"]
    with psycopg.connect(postgres_dsn) as connection:
        ended = "INSERT INTO run_status (run_id, phase, reason, finished_at) VALUES (%s, %s, 'no GPU', now())"
        connection.execute(ended, [run_id, phase])
    for watched in (leyden("run", "watch", run_id), leyden(*create, "--watch")):
        assert watched.exit_code == Exit.ERROR
        assert f"run {run_id} is {phase}: no GPU" in watched.stderr
    watched = leyden(*create, "--watch", "--json")
    assert (watched.exit_code, json.loads(watched.stdout)["phase"]) == (Exit.ERROR, phase)


def test_watch_prints_one_json_object_a_line(leyden: Leyden, postgres_dsn: str) -> None:
    run_id, _ = asyncio.run(add_trajectory(postgres_dsn))
    with psycopg.connect(postgres_dsn) as connection:
        row = "INSERT INTO steps (run_id, number, metrics, checkpoint, started_at) VALUES (%s, 1, %s, 'x', now())"
        connection.execute(row, [run_id, json.dumps({"entropy": 0.5})])
    watched = leyden("run", "watch", run_id, "--json")
    assert watched.exit_code == Exit.ERROR
    first, last = map(json.loads, watched.stdout.splitlines())
    assert (first["type"], first["number"], first["metrics"]) == ("step", 1, {"entropy": 0.5})
    assert (last["type"], last["id"], last["phase"]) == ("run", run_id, "failed")


def test_a_trial_runs_one_rollout_without_a_step_and_names_what_would_not_train(
    leyden: Leyden, document: Path, postgres_dsn: str
) -> None:
    async def end(run_id: str) -> None:
        database = Database(postgres_dsn)
        try:
            run = tables.Run(id=run_id, dataset_id="")
            async with database.read() as session:
                run.dataset_id = (await session.get_one(tables.Run, run_id)).dataset_id
            _, [rollout] = await builders.add_group(database, run, size=1, evaluation_id=f"{run_id}.e1")
            await builders.add_call(database, rollout, trainable=False, untrainable_reason="sampled with temperature")
            failed = {"exit_code": 3, "stderr_tail": "ValueError: broken", "detail": "exit status 3"}
            await builders.finish_rollout(database, rollout, reward=0.0, kind="agent_error", **failed)
            async with database.session() as session:
                session.add(tables.RunStatus(run_id=run_id, phase="completed"))
        finally:
            await database.close()

    with ThreadPoolExecutor(1) as pool:
        trial = pool.submit(leyden, "agent", "try", str(document), "--set", "training.steps=7")
        with psycopg.connect(postgres_dsn, autocommit=True) as connection:
            while (row := connection.execute("SELECT id, config FROM runs").fetchone()) is None:
                time.sleep(0.02)
        asyncio.run(end(row[0]))
        result = trial.result()
    config = row[1]
    assert (config["training"]["steps"], config["name"]) == (0, "trial of test run")
    assert (
        config["evaluation"] | {"dataset": "questions", "max_tasks": 1, "rollouts_per_task": 1} == config["evaluation"]
    )
    assert (result.exit_code, "ValueError: broken" in result.stdout) == (Exit.ERROR, True), result.output
    assert "would not train: the agent ended as agent_error: exit status 3" in result.stdout
    assert "would not train: 1 of 1 model calls cannot be trained: sampled with temperature" in result.stdout


def test_a_trial_runs_each_agent_of_a_run_that_has_several(leyden: Leyden, document: Path, postgres_dsn: str) -> None:
    async def end(run_id: str) -> None:
        database = Database(postgres_dsn)
        try:
            async with database.read() as session:
                run = await session.get_one(tables.Run, run_id)
            for number, name in enumerate(("a", "b")):
                columns = {"evaluation_id": f"{run_id}.e1", "agent": name, "runner_type": "process"}
                _, [rollout] = await builders.add_group(database, run, number, size=1, **columns)
                await builders.add_call(database, rollout)
                await builders.finish_rollout(database, rollout, reward=1.0, kind=("succeeded", "agent_error")[number])
            async with database.session() as session:
                session.add(tables.RunStatus(run_id=run_id, phase="completed"))
        finally:
            await database.close()

    fields = json.loads(document.read_text())
    del fields["agent"]
    agents = [{"name": name, "command": ["/agent"]} for name in ("a", "b")]
    document.write_text(json.dumps(fields | {"agents": agents}))
    with ThreadPoolExecutor(1) as pool:
        trial = pool.submit(leyden, "agent", "try", str(document), "--json")
        with psycopg.connect(postgres_dsn, autocommit=True) as connection:
            while (row := connection.execute("SELECT id FROM runs").fetchone()) is None:
                time.sleep(0.02)
        asyncio.run(end(row[0]))
        result = trial.result()
    assert result.exit_code == Exit.ERROR, result.output
    found = {one["agent"]: len(one["problems"]) for one in json.loads(result.stdout)}
    assert found == {"a": 0, "b": 1}
    shown = leyden("rollout", "list", "--run", row[0], "--agent", "b", "--json")
    assert [one["agent"] for one in json.loads(shown.stdout)] == ["b"]
    assert json.loads(leyden("rollout", "list", "--run", row[0], "--cause", "ungraded", "--json").stdout) == []


def test_a_report_is_written_for_any_run(leyden: Leyden, postgres_dsn: str, tmp_path: Path) -> None:
    run_id, rollout_id = asyncio.run(add_trajectory(postgres_dsn))
    with psycopg.connect(postgres_dsn) as connection:
        row = "INSERT INTO steps (run_id, number, metrics, checkpoint, started_at) VALUES (%s, 1, '{}', 'x', now())"
        connection.execute(row, [run_id])
        group = "INSERT INTO step_groups (group_id, run_id, step, verdict) SELECT group_id, run_id, 1, 'trained'"
        connection.execute("ALTER TABLE step_groups DISABLE TRIGGER ALL")
        connection.execute(f"{group} FROM rollouts WHERE id = %s", [rollout_id])
    page = tmp_path / "pages" / "run.html"
    written = leyden("run", "report", run_id, "--output", str(page))
    assert (written.exit_code, str(page) in written.stdout.replace("\n", "")) == (0, True), written.output
    text = page.read_text()
    for words in ("training reward 1.000 → 1.000 (step 1 → 1)", rollout_id, "Four."):
        assert words in text


def test_words_of_users_and_agents_are_no_markup(leyden: Leyden, tmp_path: Path, postgres_dsn: str) -> None:
    rows = tmp_path / "typed.jsonl"
    rows.write_text(json.dumps({"question": ODD}))
    assert leyden("dataset", "upload", str(rows)).exit_code == 0
    run_id, rollout_id = asyncio.run(add_trajectory(postgres_dsn, ODD))
    for words in (["dataset", "show", "typed"], ["run", "show", run_id], ["rollout", "show", rollout_id]):
        shown = leyden(*words)
        assert (shown.exit_code, ODD in shown.stdout) == (0, True), shown.output


async def add_rated(dsn: str) -> str:
    """A running rollout whose reward is people's."""
    database = Database(dsn)
    reward = {"components": [{"name": "thumbs", "from": "feedback"}], "wait": {"seconds": 60.0}}
    run = await builders.add_run(database, config=builders.run_document(reward=reward))
    _, [rollout] = await builders.add_group(database, run, size=1)
    await builders.add_attempt(database, rollout)
    await database.close()
    return rollout.id


async def add_trajectory(dsn: str, words: str = "the trainer was given up") -> tuple[str, str]:
    """A failed run with one finished rollout."""
    database = Database(dsn)
    try:
        run = await builders.add_run(database)
        _, [rollout, _] = await builders.add_group(database, run)
        turns = [{"role": "user", "content": "What is 2+2?"}]
        answer = {"role": "assistant", "content": "Four."}
        call = await builders.add_call(database, rollout, turns=turns, answer=answer)
        request = f"chatcmpl-{call.request_id}"
        failed = {"status": "error", "error_type": "ToolError", "response_id": request}
        await builders.add_tool_span(database, rollout, "memory", **failed)
        await builders.add_attempt(database, rollout, state="settled")
        await builders.add_outcome(database, rollout, facts={"success": True}, detail=words)
        numbers = {"intermediate_reward": 0.0, "return_": 1.0, "baseline": 0.25, "advantage": 0.75}
        async with database.session() as session:
            row = await session.get_one(tables.Rollout, rollout.id)
            row.state, row.attempt, row.reward = "finished", 1, 1.0
            parts = {"depth": 0, "state_key": "", "tools": {"calls": []}, **numbers}
            session.add(tables.CallCredit(run_id=run.id, call_id=call.id, rollout_id=rollout.id, **parts))
            status = await session.get_one(tables.RunStatus, run.id)
            status.phase, status.reason = "failed", words
        return run.id, rollout.id
    finally:
        await database.close()


def test_a_policy_is_exported_as_a_folder_once(leyden: Leyden, postgres_dsn: str, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "config.json").write_text("{}")
    (weights / "model.safetensors").write_bytes(b"whole")
    sha256 = weights_sha256(weights)

    async def add() -> str:
        database = Database(postgres_dsn)
        try:
            run = await builders.add_run(database)
            await builders.add_policy_version(database, run, 0, path=str(weights), content_sha256=sha256)
            return run.id
        finally:
            await database.close()

    run_id = asyncio.run(add())
    assert json.loads(leyden("policy", "list", run_id, "--kept", "--json").stdout)[0]["version"] == 0
    assert "engines" in leyden("policy", "list", run_id).stdout
    target = tmp_path / "out"
    assert leyden("policy", "export", run_id, "--to", str(target)).exit_code == 0
    assert (target / "config.json").read_text() == "{}"
    assert leyden("policy", "export", run_id, "--to", str(target)).exit_code == Exit.REFUSED
    missing = leyden("policy", "export", run_id, "--version", "9", "--to", str(tmp_path / "other"))
    assert (missing.exit_code, "there are: 0" in missing.stderr) == (Exit.NOT_FOUND, True)
    (weights / "model.safetensors").write_bytes(b"wholf")
    damaged = leyden("policy", "export", run_id, "--to", str(tmp_path / "other"))
    assert (damaged.exit_code, "are damaged" in damaged.stderr) == (Exit.REFUSED, True)
    (weights / "gone").symlink_to("nowhere")
    broken = leyden("policy", "export", run_id, "--to", str(tmp_path / "other"))
    assert broken.exit_code == Exit.ERROR
    assert not [path for path in tmp_path.iterdir() if "other" in path.name]


def test_runs_and_datasets_are_deleted_only_when_that_is_meant(
    leyden: Leyden, document: Path, postgres_dsn: str
) -> None:
    made = json.loads(leyden("run", "create", str(document), "--json").stdout)
    assert leyden("run", "delete", made["id"], "--yes").exit_code == Exit.REFUSED
    assert leyden("dataset", "delete", made["dataset_id"], "--yes").exit_code == Exit.REFUSED
    with psycopg.connect(postgres_dsn) as connection:
        connection.execute("INSERT INTO run_status (run_id, phase) VALUES (%s, 'completed')", [made["id"]])
    assert leyden("run", "delete", made["id"]).exit_code != 0
    assert json.loads(leyden("run", "show", made["id"], "--json").stdout)["intent"] == "running"
    assert leyden("run", "delete", made["name"], "--yes").exit_code == 0
    assert json.loads(leyden("run", "show", made["id"], "--json").stdout)["intent"] == "deleted"


def test_a_run_is_pruned_once_it_has_ended_and_only_when_that_is_meant(
    leyden: Leyden, document: Path, postgres_dsn: str
) -> None:
    made = json.loads(leyden("run", "create", str(document), "--json").stdout)
    refused = leyden("run", "prune", made["id"], "--yes")
    assert (refused.exit_code, "it has not ended" in refused.stderr) == (Exit.REFUSED, True)
    with psycopg.connect(postgres_dsn) as connection:
        connection.execute("INSERT INTO run_status (run_id, phase) VALUES (%s, 'completed')", [made["id"]])
    assert leyden("run", "prune", made["id"]).exit_code != 0
    assert json.loads(leyden("run", "show", made["id"], "--json").stdout)["pruned"] is False
    pruned = json.loads(leyden("run", "prune", made["name"], "--yes", "--json").stdout)
    assert (pruned["run_id"], pruned["freed_bytes"] > 0) == (made["id"], True)
    assert json.loads(leyden("run", "show", made["id"], "--json").stdout)["pruned"] is True
