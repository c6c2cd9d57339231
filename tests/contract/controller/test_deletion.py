"""Deletion of runs and datasets: everything of them goes, nothing else does, and a repeat does the rest."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from sqlalchemy import func, select, text

from leyden.libs.contracts.ids import evaluation_id
from leyden.libs.contracts.ledger import JudgeUse
from leyden.libs.store import tables
from leyden.libs.store.attempts import AttemptKey
from leyden.libs.store.database import Database, Refused
from leyden.libs.store.locks import AdvisoryLock
from leyden.libs.store.policies import policy_columns
from leyden.libs.store.records.artifacts import Artifact, add_artifacts
from leyden.libs.store.runs import retention
from leyden.libs.store.runs.grading import add_judge_use
from leyden.services.controller.settings import Settings
from leyden.services.controller.upkeep.deletion import _own_folder, delete_marked
from leyden.services.controller.upkeep.retention import forget_old_answers
from tests.support import builders

WITH_RUN_ID = [table for table in tables.Base.__subclasses__() if "run_id" in table.__table__.columns]


@pytest.fixture
def settings(database: Database, tmp_path: Path) -> Settings:
    return Settings(database_url=database.dsn, log_folder=tmp_path / "logs")


async def full_run(database: Database, root: Path, phase: str = "completed") -> tables.Run:
    """A run with a row in every table, files of version 1 and of its checkpoint, and a trainer's log."""
    run = await builders.add_run(database)
    group, (rollout, _) = await builders.add_group(database, run)
    await builders.finish_rollout(database, rollout)
    await builders.add_call(database, rollout)
    await builders.add_tool_span(database, rollout, "memory")
    await builders.add_sample(database, rollout)
    await builders.add_credited_group(database, group)
    folder = root / "runs" / run.id
    for version, path in enumerate((root / "model", folder / "versions" / "1")):
        path.mkdir(parents=True, exist_ok=True)
        (path / "model.safetensors").write_bytes(b"weights")
        await builders.add_policy_version(database, run, version, path=str(path))
    (root / "logs").mkdir(exist_ok=True)
    (root / "logs" / f"trainer-{run.id}.log").write_text("a line\n")
    async with database.session() as session:
        now, checkpoint = datetime.now(tz=UTC), str(folder / "checkpoints" / "1")
        session.add(tables.Step(run_id=run.id, number=1, metrics={}, checkpoint=checkpoint, started_at=now))
        session.add(tables.ExternalReward(rollout_id=rollout.id, key="k", name="n", value=1.0))
        await add_judge_use(session, run.id, JudgeUse(100))
        left = [Artifact("report.md", 1, b"x")]
        await add_artifacts(session, [(AttemptKey(rollout.id, 1), run.id, left)])
        session.add(
            tables.Feedback(rollout_id=rollout.id, key="k", attempt=1, run_id=run.id, component="thumbs", value=1.0)
        )
        session.add(
            tables.Reward(
                rollout_id=rollout.id, attempt=1, key="k", run_id=run.id, source="endpoint", name="n", value=1.0
            )
        )
        session.add(
            tables.Evaluation(
                id=evaluation_id(run.id, 1), run_id=run.id, number=1, dataset_id=run.dataset_id, rollouts_per_task=1
            )
        )
        await session.flush()
        session.add(tables.StepGroup(group_id=group.id, run_id=run.id, step=1, verdict="trained"))
        await session.flush()
        session.add(tables.StepReplay(group_id=group.id, use=1, run_id=run.id, step=2))
        session.add(tables.StepSample(run_id=run.id, sample_id=f"{rollout.id}:0", step=1))
    await builders.end_run(database, run, phase)
    return run


async def mark(database: Database, run: tables.Run) -> None:
    async with database.session() as session:
        (await session.get_one(tables.Run, run.id)).intent = "deleted"


async def rows_of(database: Database, run: tables.Run) -> dict[str, int]:
    """Counts of the run's rows, by table; only those above 0."""
    async with database.read() as session:
        counts = {
            table.__tablename__: await session.scalar(
                select(func.count()).select_from(table).where(table.__table__.c.run_id == run.id)
            )
            for table in WITH_RUN_ID
        }
        counts["external_rewards"] = await session.scalar(
            text("SELECT count(*) FROM external_rewards WHERE starts_with(rollout_id, :run)"), {"run": run.id}
        )
        counts["runs"] = await session.scalar(select(func.count(tables.Run.id)).where(tables.Run.id == run.id))
    return {name: count for name, count in counts.items() if count}


async def test_a_deleted_run_leaves_neither_rows_nor_files_and_touches_no_other(
    database: Database, settings: Settings, tmp_path: Path
) -> None:
    gone, kept = [await full_run(database, tmp_path) for _ in range(2)]
    before = await rows_of(database, kept)
    assert {
        "run_status",
        "rewards",
        "outcomes",
        "step_samples",
        "policy_versions",
        "external_rewards",
        "feedback",
        "judge_usage",
        "artifacts",
    } <= set(before)
    await delete_marked(settings, database)
    assert await rows_of(database, gone) == before
    await mark(database, gone)
    await delete_marked(settings, database)
    assert await rows_of(database, gone) == {}
    assert await rows_of(database, kept) == before
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [kept.id]
    assert [path.name for path in (tmp_path / "logs").iterdir()] == [f"trainer-{kept.id}.log"]
    assert (tmp_path / "model" / "model.safetensors").exists()
    async with database.read() as session:
        assert (
            await session.scalar(
                text("SELECT count(*) FROM pg_class WHERE relname LIKE :name"), {"name": f"%{gone.id}"}
            )
            == 0
        )


async def test_a_continued_run_without_a_step_leaves_no_files(
    database: Database, settings: Settings, tmp_path: Path
) -> None:
    parent, copied, named = [await builders.add_run(database) for _ in range(3)]
    checker = await builders.add_run(database, dataset_id=copied.dataset_id, **policy_columns(copied.id, "checker"))
    folder = tmp_path / "runs"
    # The first version is a copy of the parent's, or a folder that the document names: here one of another run.
    first_versions = {
        copied.id: folder / copied.id / "versions" / "0",
        checker.id: folder / checker.id / "versions" / "0",
        parent.id: tmp_path / "model",
        named.id: folder / parent.id / "versions" / "1",
    }
    for run in (copied, checker, parent, named):
        path = first_versions[run.id]
        path.mkdir(parents=True)
        await builders.add_policy_version(database, run, 0, path=str(path))
        await builders.end_run(database, run, "cancelled")
        await mark(database, run)
    # A run goes after its further policies.
    for _ in range(2):
        await delete_marked(settings, database)
    assert [await rows_of(database, run) for run in (copied, checker, parent, named)] == [{}] * 4
    assert [path.exists() for path in first_versions.values()] == [False, False, True, True]
    assert [path.name for path in folder.iterdir()] == [parent.id]


async def test_answers_to_creates_go_with_their_run_and_with_age(
    database: Database, settings: Settings, api_http: httpx.AsyncClient
) -> None:
    dataset = await builders.add_dataset(database, name="questions")
    document, gone = builders.run_document(dataset="questions"), await builders.add_run(database, dataset_id=dataset.id)
    _, (rollout, _) = await builders.add_group(database, gone)
    path = f"/v1/rollouts/{rollout.id}/rewards"
    for number, (place, body) in enumerate([("/v1/runs", document), (path, {"key": "a", "value": 0.5})]):
        headers = {"idempotency-key": f"key-{number}"}
        assert (await api_http.post(place, json=body, headers=headers)).status_code == 201
    async with database.read() as session:
        made = await session.scalar(select(tables.Run.id).where(tables.Run.id != gone.id))
    await builders.end_run(database, gone)
    await mark(database, gone)
    await delete_marked(settings, database)
    await forget_old_answers(database)
    assert await answers_of(database) == {"key-0": made}
    async with database.session() as session:
        await session.execute(text("UPDATE idempotency_keys SET created_at = created_at - interval '8 days'"))
    await forget_old_answers(database)
    assert await answers_of(database) == {}


async def answers_of(database: Database) -> dict[str, str | None]:
    """The run of each stored answer, by key."""
    table = tables.IdempotencyKey
    async with database.read() as session:
        return {row.key: row.run_id for row in await session.execute(select(table.key, table.run_id))}


async def test_a_run_without_a_step_leaves_no_files_that_its_trainer_did_not_record(
    database: Database, settings: Settings, tmp_path: Path
) -> None:
    root, run = tmp_path / "runs", await builders.add_run(database)
    await builders.add_policy_version(database, run, 0, path=str(tmp_path / "model"))
    for folder in (tmp_path / "model", *(root / run.id / "versions" / name for name in ("1", ".1.ab.partial"))):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"weights")
    (root / "run-other").mkdir()
    await builders.end_run(database, run, "failed")
    await mark(database, run)
    await delete_marked(settings.model_copy(update={"trainer_folder": root}), database)
    assert await rows_of(database, run) == {}
    assert [path.name for path in root.iterdir()] == ["run-other"]
    assert (tmp_path / "model" / "model.safetensors").exists()


@pytest.mark.parametrize("name", ["", ".", "..", "../elsewhere", "run-a/versions", "missing", "link"])
def test_nothing_but_a_folder_right_below_the_trainers_is_a_runs_own(tmp_path: Path, name: str) -> None:
    root = tmp_path / "runs"
    for folder in (root / "run-a" / "versions", tmp_path / "elsewhere"):
        folder.mkdir(parents=True)
    (root / "link").symlink_to(tmp_path / "elsewhere")
    assert _own_folder(root, name) == set()
    assert _own_folder(root, "run-a") == {root / "run-a"}
    assert _own_folder(None, "run-a") == set()


def test_every_table_that_holds_a_run_back_is_emptied_before_it() -> None:
    holding = {
        key.parent.table.name
        for table in tables.Base.metadata.tables.values()
        for key in table.foreign_keys
        if key.target_fullname == "runs.id" and key.ondelete != "CASCADE"
    }
    emptied = {statement.text.split()[2] for statement in retention._DELETE_ROWS}
    assert holding - emptied == {"runs", "run_status"}


async def test_the_tokens_of_a_deleted_runs_judges_are_not_counted(database: Database) -> None:
    async with database.session() as session:
        await add_judge_use(session, "run-gone", JudgeUse(100))
    async with database.read() as session:
        assert await session.scalar(select(func.count()).select_from(tables.JudgeUsage)) == 0


@pytest.mark.parametrize("statements", [0, 4, 11])
async def test_a_deletion_that_died_in_the_middle_is_finished_by_the_next(
    database: Database, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statements: int
) -> None:
    run = await full_run(database, tmp_path)
    await mark(database, run)
    with monkeypatch.context() as patch:
        patch.setattr(retention, "_DELETE_ROWS", [*retention._DELETE_ROWS[:statements], text("SELECT killed here")])
        await delete_marked(settings, database)
    assert not (tmp_path / "runs" / run.id).exists()
    assert {"runs", "run_status"} <= set(await rows_of(database, run))
    await delete_marked(settings, database)
    assert await rows_of(database, run) == {}


async def test_a_folder_of_another_machine_is_named_and_stays(
    database: Database, settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = await full_run(database, tmp_path)
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    await mark(database, run)
    await delete_marked(settings, database)
    assert await rows_of(database, run) == {}
    assert str(tmp_path / "runs" / run.id) in capsys.readouterr().out
    assert (tmp_path / "elsewhere" / run.id).exists()


async def test_a_run_is_not_deleted_while_an_agent_or_its_trainer_is_alive(
    database: Database, settings: Settings, tmp_path: Path
) -> None:
    run = await full_run(database, tmp_path, "cancelled")
    await mark(database, run)
    lock = AdvisoryLock(database.dsn, f"trainer:{run.id}")
    assert await lock.acquire()
    await delete_marked(settings, database)
    await lock.release()
    async with database.session() as session:
        rollout = await session.get_one(tables.Rollout, f"{run.id}.0.1")
    await builders.add_attempt(database, rollout)
    await delete_marked(settings, database)
    assert (tmp_path / "runs" / run.id / "versions" / "1").exists()
    await builders.end_attempt(database, rollout.id)
    await delete_marked(settings, database)
    assert await rows_of(database, run) == {}


async def test_rows_of_runs_that_are_not_deleted_stay_append_only(database: Database, tmp_path: Path) -> None:
    kept, marked = [await full_run(database, tmp_path) for _ in range(2)]
    await mark(database, marked)
    for table in (
        "rewards",
        "feedback",
        "outcomes",
        "steps",
        "step_groups",
        "step_samples",
        "group_credits",
        "policy_versions",
    ):
        with pytest.raises(Refused, match="append-only"):
            async with database.session() as session:
                await session.execute(text(f"DELETE FROM {table} WHERE run_id = :run"), {"run": kept.id})
    for change in (f"DELETE FROM external_rewards WHERE rollout_id = '{kept.id}.0.0'", "UPDATE rewards SET value = 2"):
        with pytest.raises(Refused, match="append-only"):
            async with database.session() as session:
                await session.execute(text(change))


async def test_the_api_deletes_only_runs_that_have_ended(database: Database, api_http: httpx.AsyncClient) -> None:
    run = await builders.add_run(database)
    refused = await api_http.delete(f"/v1/runs/{run.id}")
    assert (refused.status_code, "it is running" in refused.json()["detail"]) == (409, True)
    await builders.end_run(database, run)
    for _ in range(2):
        answer = await api_http.delete(f"/v1/runs/{run.id}")
        assert (answer.status_code, answer.json()["intent"], answer.json()["allowed_actions"]) == (202, "deleted", [])
    for action in ("evaluations", "resume", "cancel"):
        assert (await api_http.post(f"/v1/runs/{run.id}/{action}", json={})).status_code == 409
    assert (await api_http.delete("/v1/runs/run-none")).status_code == 404


async def test_a_dataset_is_deleted_once_no_run_uses_it(
    database: Database, settings: Settings, api_http: httpx.AsyncClient
) -> None:
    run = await builders.add_run(database)
    await builders.end_run(database, run)
    refused = await api_http.delete(f"/v1/datasets/{run.dataset_id}")
    assert (refused.status_code, run.id in refused.json()["detail"]) == (409, True)
    assert (await api_http.delete(f"/v1/runs/{run.id}")).status_code == 202
    await delete_marked(settings, database)
    assert (await api_http.get(f"/v1/runs/{run.id}")).status_code == 404
    assert (await api_http.delete(f"/v1/datasets/{run.dataset_id}")).status_code == 204
    assert (await api_http.delete(f"/v1/datasets/{run.dataset_id}")).status_code == 404
    async with database.read() as session:
        assert await session.scalar(select(func.count()).select_from(tables.Task)) == 0
