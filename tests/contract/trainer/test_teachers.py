"""A run learns from a version of another run, whose files and run stay until it has ended."""

from __future__ import annotations

import asyncio
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, update

from leyden.libs.faults import FaultInjector
from leyden.libs.store import tables, training
from leyden.libs.store.database import Database
from leyden.libs.store.runs import actions
from leyden.services.trainer.state.teacher import TeacherDamaged
from tests.contract.trainer.test_kills import train
from tests.contract.trainer.test_steps import Case, flip_a_bit, until_rows
from tests.replay import differing_versions
from tests.support import builders
from tests.support.long import long_only


@pytest.fixture
def case(database: Database, postgres_dsn: str, tiny_model: Path, tmp_path: Path, redis_url: str) -> Case:
    return Case(database, postgres_dsn, tiny_model, tmp_path / "runs", redis_url)


async def taught(
    case: Case,
    teacher: tables.Run,
    version: int,
    *,
    steps: int = 2,
    replay: dict[str, Any] | None = None,
    **algorithm: Any,
) -> Case:
    """A run with the groups of two steps, which have no variance of rewards."""
    other = Case(case.database, case._dsn, case.model, case.folder, case._redis_url)
    named = {"type": "importance_sampling", "distillation": {"run": teacher.id, "version": version}, **algorithm}
    await other.open(steps=steps, algorithm=named, sampling={"replay": replay})
    for number in range(4):
        await other.add_group(number, version=number // 2, has_variance=False)
    return other


async def set_phase(database: Database, run_id: str, phase: str) -> None:
    async with database.session() as session:
        await session.execute(update(tables.RunStatus).where(tables.RunStatus.run_id == run_id).values(phase=phase))


async def trained_teacher(case: Case) -> tables.Run:
    await case.open(steps=1)
    for number in range(2):
        await case.add_group(number)
    await case.train()
    return case.run


async def test_a_version_of_another_run_teaches_groups_whatever_their_rewards(case: Case) -> None:
    student = await taught(case, await trained_teacher(case), 1)
    await student.train()
    assert set((await student.verdicts()).values()) == {(1, "trained"), (2, "trained")}
    steps = sorted(await student.rows(tables.Step), key=lambda one: one.number)  # type: ignore[attr-defined]
    first, second = (step.metrics for step in steps)  # type: ignore[attr-defined]
    # The base model is not its own first step, and moves to it.
    assert 0 < abs(second["kl_teacher"]) < abs(first["kl_teacher"])


async def test_groups_that_a_teacher_judges_are_used_again_whatever_their_rewards(case: Case) -> None:
    student = await taught(case, await trained_teacher(case), 1, replay={"share": 0.5})
    await student.train()
    assert await student.replays() == {2: [(f"{student.run.id}.1", 1)]}


@long_only
async def test_a_taught_trainer_killed_within_and_between_its_steps_trains_what_an_undisturbed_one_does(
    case: Case, tmp_path: Path
) -> None:
    student = await taught(case, await trained_teacher(case), 1, epochs=2)
    injector = FaultInjector(tmp_path / "faults")
    for point in ("trainer.updated", "trainer.exported", "trainer.committed"):
        injector.arm(point)
        assert (point, await train(student, injector)) == (point, -signal.SIGKILL)
    assert await train(student, injector) == 0
    assert sorted((await student.consumed()).values()) == [1] * 4 + [2] * 4
    assert await asyncio.to_thread(differing_versions, case._dsn, student.run.id, case.model) == []


async def test_a_teacher_that_is_damaged_or_gone_ends_the_run_and_blames_no_step(case: Case) -> None:
    student, stop = await taught(case, await trained_teacher(case), 1, steps=3), asyncio.Event()
    learning = asyncio.create_task(student.train(stop))
    await until_rows(student, tables.Step, 2)
    stop.set()
    await learning
    folder = Path((await case.versions())[1].path)
    described = (folder / "config.json").read_text()
    (folder / "config.json").write_text("{}")
    with pytest.raises(TeacherDamaged, match=r"^algorithm\.distillation: .* cannot be loaded .*: restore it"):
        await student.train()
    (folder / "config.json").write_text(described)
    flip_a_bit(folder / "model.safetensors")
    with pytest.raises(TeacherDamaged, match="is not what the store recorded of this version: restore it"):
        await student.train()
    shutil.rmtree(folder)
    with pytest.raises(TeacherDamaged, match="is missing: restore it"):
        await student.train()
    assert await student.rows(tables.DamagedStep) == []
    unknown = await taught(case, case.run, 7)
    with pytest.raises(TeacherDamaged, match=r"version 7 of run .* is gone: name another teacher"):
        await unknown.train()


async def test_a_pupil_that_has_finished_needs_its_teacher_only_to_make_a_step_again(case: Case) -> None:
    student = await taught(case, await trained_teacher(case), 1)
    await student.train()
    async with case.database.session() as session:
        await session.execute(
            update(tables.PolicyVersion)
            .values(pruned_at=func.now())
            .where(tables.PolicyVersion.run_id == case.run.id, tables.PolicyVersion.version == 1)
        )
    await student.train()
    flip_a_bit(Path((await student.versions())[2].path) / "model.safetensors")
    with pytest.raises(TeacherDamaged, match=r"version 1 of run .* is gone: name another teacher"):
        await student.train()


async def test_a_folder_teaches_and_one_with_other_tokens_is_refused(case: Case, tmp_path: Path) -> None:
    shutil.copytree(case.model, tmp_path / "other")
    tokenizer = tmp_path / "other" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"a"', '"another"', 1))
    student = await taught(case, (await case.open(steps=1)).run, 0, distillation={"model": str(tmp_path / "other")})
    with pytest.raises(ValueError, match=r"algorithm\.distillation: the tokens of .* choose a model of the same"):
        await student.train()
    assert await student.versions() == {}


async def test_a_version_that_teaches_stays_until_its_pupil_has_ended(database: Database) -> None:
    teacher = await builders.add_run(database)
    for version in range(4):
        await builders.add_policy_version(database, teacher, version)
    named = {"type": "reinforce", "distillation": {"run": teacher.id, "version": 1}}
    pupil = await builders.add_run(
        database, config=builders.run_document(algorithm=named), dataset_id=teacher.dataset_id
    )
    await set_phase(database, teacher.id, "completed")
    async with database.session() as session:
        assert (await training.prune_versions(session, teacher.id, 3)).versions == {0, 1, 3}
    with pytest.raises(actions.ActionRefused, match=f"its version teaches run {pupil.id}; wait, or cancel that one"):
        async with database.session() as session:
            await actions.mark_deleted(session, teacher.id)
    await set_phase(database, pupil.id, "completed")
    async with database.session() as session:
        assert (await training.prune_versions(session, teacher.id, 3)).versions == {0, 3}
        await actions.mark_deleted(session, teacher.id)
