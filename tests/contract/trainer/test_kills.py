"""The trainer process, killed at every fault point of a step: its weights equal those of an undisturbed trainer."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leyden.libs.contracts.samples import RoutedExperts
from leyden.libs.contracts.weights import file_sha256
from leyden.libs.faults import FaultInjector
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.store.runs import actions
from leyden.services.trainer.state.checkpoints import STATE_NAME
from leyden.services.trainer.state.folders import remove_folder
from leyden.services.trainer.state.versions import describe
from tests.contract.trainer.test_steps import Case
from tests.fakes.forked_trainer import forked_trainer
from tests.replay import differing_versions
from tests.support import builders
from tests.support.long import long_only

POINTS = (
    "trainer.updated",
    "trainer.weights_written",
    "trainer.version_unnamed",
    "trainer.exported",
    "trainer.step_written",
    "trainer.replays_written",
    "trainer.committed",
    "trainer.state_written",
    "trainer.checkpoint_unnamed",
    "trainer.saved",
    "trainer.versions_marked",
)
OF_CONTINUED_RUNS = ("trainer.version_unnamed", "trainer.version_copied")
STEPS = 4
OF_REPLAYED_ROUTES = (
    "trainer.updated",
    "trainer.exported",
    "trainer.committed",
    "trainer.state_written",
)
OWN_CRITIC = {"epochs": 2, "critic": {"trunk": "own", "learning_rate": 0.01}}


async def prepared(database: Database, dsn: str, model: Path, folder: Path, redis_url: str) -> Case:
    case = await Case(database, dsn, model, folder, redis_url).open(
        steps=STEPS,
        algorithm={"mini_batches": 2, "epochs": 2},
        sampling={"replay": {"share": 0.5}, "refill_zero_variance": 1},
        keep_checkpoints=1,
    )
    for number in range(3 * STEPS):
        # The first group of each step has no variance; another one replaces it.
        await case.add_group(number, version=number // 3, has_variance=number % 3 > 0)
    return case


async def with_own_critic(database: Database, dsn: str, model: Path, folder: Path, redis_url: str) -> Case:
    case = await Case(database, dsn, model, folder, redis_url).open(
        steps=STEPS, algorithm=OWN_CRITIC, keep_checkpoints=1
    )
    for number in range(2 * STEPS):
        await case.add_group(number, version=number // 2)
    return case


async def with_replayed_routes(
    database: Database, dsn: str, experts: Path, folder: Path, redis_url: str, *, replays: bool = True
) -> Case:
    """Engines chose other experts than the trainer would, and for the tokens that rollouts share different ones."""
    case = await Case(database, dsn, experts, folder, redis_url).open(
        steps=STEPS,
        algorithm={"mini_batches": 2, "epochs": 2},
        sampling={"replay": {"share": 0.5}},
        keep_checkpoints=1,
        router="trained",
        routing_replay=replays,
    )
    chosen = np.random.default_rng(0)

    def recorded(tokens: int) -> bytes:
        """Three layers, of which the first has no experts, with two of six for each token."""
        ids = chosen.permuted(np.tile(np.arange(6, dtype=np.uint8), (tokens, 2, 1)), axis=-1)[..., :2].reshape(
            tokens, 4
        )
        return RoutedExperts(0, 6, 1, np.pad(ids, ((0, 0), (2, 0))).tobytes()).stored()

    for number in range(2 * STEPS):
        await case.add_group(number, version=number // 2, experts=recorded)
    return case


async def train(case: Case, injector: FaultInjector, **variables: str) -> int | None:
    """The exit status of one trainer process."""
    settings = case.settings()
    environment = {
        "PATH": os.environ["PATH"],
        "LEYDEN_DATABASE_URL": settings.database_url,
        "LEYDEN_REDIS_URL": settings.redis_url,
        "LEYDEN_LOG_LEVEL": "warning",
        "TRAINER_PORT": "0",
        "TRAINER_FOLDER": str(case.folder),
        "TRAINER_MODEL_PATH": str(case.model),
        "TRAINER_THREADS": "1",
        "TRAINER_DEVICE": "cpu",
        **injector.environment,
        **variables,
    }
    process = forked_trainer(case.run.id, environment)
    process.start()
    try:
        await asyncio.to_thread(process.join, 120)
        return process.exitcode
    finally:
        process.kill()
        process.join()


@pytest.mark.timeout(900)
async def test_a_step_killed_at_every_point_is_recorded_once_with_the_weights_of_an_undisturbed_one(
    database: Database, postgres_dsn: str, tiny_model: Path, tmp_path: Path, redis_url: str
) -> None:
    undisturbed = await prepared(database, postgres_dsn, tiny_model, tmp_path / "undisturbed", redis_url)
    await undisturbed.train()
    killed = await prepared(database, postgres_dsn, tiny_model, tmp_path / "killed", redis_url)
    injector = FaultInjector(tmp_path / "faults")
    for point in POINTS:
        injector.arm(point)
        assert (point, await train(killed, injector)) == (point, -signal.SIGKILL)
        assert injector.fired(point, 0.0)
    assert await train(killed, injector) == 0

    wanted, found = await undisturbed.versions(), await killed.versions()
    assert {number: one.content_sha256 for number, one in found.items()} == {
        number: one.content_sha256 for number, one in wanted.items()
    }
    assert sorted(step.number for step in await killed.rows(tables.Step)) == list(range(1, STEPS + 1))  # type: ignore[attr-defined]
    samples = await killed.consumed()
    assert samples == {
        f"{killed.run.id}.{number}.{sibling}:0": 1 + number // 3
        for number in range(3 * STEPS)
        if number % 3 > 0
        for sibling in (0, 1)
    }
    replaced = [verdict for verdict in (await killed.verdicts()).items() if verdict[1][1] == "no_variance"]
    assert sorted(replaced) == sorted(
        (f"{killed.run.id}.{3 * step}", (step + 1, "no_variance")) for step in range(STEPS)
    )
    # Each step from the second uses one group of the step before again, once.
    assert await killed.replays() == {step: [(f"{killed.run.id}.{3 * step - 4}", 1)] for step in range(2, STEPS + 1)}
    folder = killed.folder / killed.run.id
    assert describe(Path(found[STEPS].path)).content_sha256 == found[STEPS].content_sha256
    assert sorted(path.name for path in folder.glob("*/*")) == [str(STEPS)] * 2


@long_only
@pytest.mark.timeout(600)
async def test_fine_tuning_killed_within_and_between_its_passes_trains_what_an_undisturbed_one_does(
    database: Database, postgres_dsn: str, tiny_model: Path, tmp_path: Path, redis_url: str
) -> None:
    """Five groups, two a step: in the third step the second pass begins."""
    case = await Case(database, postgres_dsn, tiny_model, tmp_path / "runs", redis_url).open(
        steps=5, algorithm={"type": "sft", "runs": ["run-1"]}, keep_checkpoints=1
    )
    for number in range(5):
        await case.add_group(number, version=-1)
    injector = FaultInjector(tmp_path / "faults")
    for point in ("trainer.exported", "trainer.committed", "trainer.replays_written", "trainer.state_written"):
        injector.arm(point)
        assert (point, await train(case, injector)) == (point, -signal.SIGKILL)
    assert await train(case, injector) == 0
    # Ten samples of five groups once, and five further uses of a group.
    assert sorted((await case.consumed()).values()) == [1] * 4 + [2] * 4 + [3] * 2
    assert [(step, len(groups)) for step, groups in (await case.replays()).items()] == [(3, 1), (4, 2), (5, 2)]
    uses = Counter(group for groups in (await case.replays()).values() for group, _ in groups)
    assert list(uses.values()) == [1] * 5
    assert await asyncio.to_thread(differing_versions, postgres_dsn, case.run.id, tiny_model) == []
    metrics = [step.metrics for step in await case.rows(tables.Step)]  # type: ignore[attr-defined]
    assert not any({"entropy", "logprob_gap_tokens", "policy_lag_mean"} & one.keys() for one in metrics)
    assert await case.alarms() == []


@long_only
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_refreshed_reference_survives_kills_before_and_after_its_refresh(
    database: Database, postgres_dsn: str, tiny_model: Path, tmp_path: Path, redis_url: str, dtype: str
) -> None:
    """The reference of steps 3 and 4 is version 2, which retention would remove after step 3."""
    made = {}
    for name in ("undisturbed", "killed"):
        case = await Case(database, postgres_dsn, tiny_model, tmp_path / name, redis_url).open(
            steps=5,
            algorithm={"epochs": 2, "kl_coefficient": 2.0, "kl_reference_every": 2},
            keep_checkpoints=1,
            export_dtype=dtype,
        )
        for number in range(10):
            await case.add_group(number, version=number // 2)
        injector = FaultInjector(tmp_path / "faults")
        # A trainer that is started again makes one step more than the one before, up to its point.
        for point in (
            ("trainer.versions_marked", *["trainer.updated", "trainer.committed"] * 3) if name == "killed" else ()
        ):
            injector.arm(point)
            assert (point, await train(case, injector)) == (point, -signal.SIGKILL)
        assert await train(case, injector) == 0
        made[name] = {number: one.content_sha256 for number, one in (await case.versions()).items()}
        # With bfloat16 it has the weights in float32, too.
        made[name][-1] = file_sha256(case.folder / case.run.id / "checkpoints" / "5" / STATE_NAME)
    assert made["killed"] == made["undisturbed"]


@long_only
@pytest.mark.timeout(600)
async def test_a_critic_of_its_own_survives_kills(
    database: Database, postgres_dsn: str, tiny_model: Path, tmp_path: Path, redis_url: str
) -> None:
    """It is in no version: a critic that a restart lost would change the weights of the next step."""
    weights, states = {}, {}
    for name in ("undisturbed", "killed"):
        case = await with_own_critic(database, postgres_dsn, tiny_model, tmp_path / name, redis_url)
        injector = FaultInjector(tmp_path / "faults")
        for point in ("trainer.saved", "trainer.committed", "trainer.updated") if name == "killed" else ():
            injector.arm(point)
            assert (point, await train(case, injector)) == (point, -signal.SIGKILL)
        assert await train(case, injector) == 0
        weights[name] = {number: one.content_sha256 for number, one in (await case.versions()).items()}
        states[name] = (case.folder / case.run.id / "checkpoints" / str(STEPS) / STATE_NAME).read_bytes()
    assert weights["killed"] == weights["undisturbed"]
    assert states["killed"] == states["undisturbed"]


@long_only
@pytest.mark.timeout(900)
async def test_replayed_routes_survive_kills_within_a_step(
    database: Database, postgres_dsn: str, tiny_experts: Path, tmp_path: Path, redis_url: str
) -> None:
    """The experts of a step are read again for the step made again, and for the one that a checkpoint lacks."""
    weights, states = {}, {}
    for name in ("undisturbed", "killed", "own routes"):
        where = database, postgres_dsn, tiny_experts, tmp_path / name, redis_url
        case = await with_replayed_routes(*where, replays=name != "own routes")
        injector = FaultInjector(tmp_path / "faults")
        for point in OF_REPLAYED_ROUTES if name == "killed" else ():
            injector.arm(point)
            assert (point, await train(case, injector)) == (point, -signal.SIGKILL)
            assert injector.fired(point, 0.0)
        await case.train()
        weights[name] = {number: one.content_sha256 for number, one in (await case.versions()).items()}
        states[name] = file_sha256(case.folder / case.run.id / "checkpoints" / str(STEPS) / STATE_NAME)
        if name == "killed":
            steps = [step.metrics for step in await case.rows(tables.Step)]  # type: ignore[attr-defined]
            assert [step["routing_unrecorded_tokens"] for step in steps] == [0] * STEPS
            assert await asyncio.to_thread(differing_versions, postgres_dsn, case.run.id, tiny_experts) == []
    assert weights["killed"] == weights["undisturbed"]
    assert states["killed"] == states["undisturbed"]
    # The records decide on the weights: a trainer that lost them would not make the same ones.
    assert all(weights["own routes"][step] != weights["killed"][step] for step in range(1, STEPS + 1))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "changes", [{}, {"lora": {"rank": 2, "alpha": 4.0}}, {"algorithm": OWN_CRITIC}], ids=["weights", "lora", "critic"]
)
async def test_a_continued_run_killed_while_it_copies_its_version_begins_like_an_undisturbed_one(
    database: Database, postgres_dsn: str, tiny_model: Path, tmp_path: Path, redis_url: str, changes: dict[str, Any]
) -> None:
    case = await Case(database, postgres_dsn, tiny_model, tmp_path / "runs", redis_url).open(
        steps=3, keep_checkpoints=3, **changes
    )
    for number in range(6):
        await case.add_group(number, version=number // 2)
    await case.train()
    made, parent = await case.versions(), case.run
    document = {**parent.config, "training": {**parent.config["training"], "steps": 1}}
    case.run = await builders.add_run(database, config=document, parent_run_id=parent.id, parent_version=2)
    for number in (4, 5):
        await case.add_group(number)
    injector = FaultInjector(tmp_path / "faults")
    for point in OF_CONTINUED_RUNS:
        injector.arm(point)
        assert (point, await train(case, injector)) == (point, -signal.SIGKILL)
        assert injector.fired(point, 0.0)
        assert await case.versions() == {}
    # The step is committed, and the moments that it began with lie in the parent's checkpoint alone.
    injector.arm("trainer.committed")
    assert await train(case, injector) == -signal.SIGKILL
    await builders.end_run(database, parent)
    async with database.session() as session:
        with pytest.raises(actions.ActionRefused, match="until its own second step"):
            await actions.mark_deleted(session, parent.id)
    assert await train(case, injector) == 0
    states = [
        file_sha256(case.folder / run / "checkpoints" / step / STATE_NAME)
        for run, step in ((parent.id, "3"), (case.run.id, "1"))
    ]
    assert states[0] == states[1]
    # With the parent's weights, adapters and moments, the first step is the parent's own third one.
    found = await case.versions()
    assert [found[number].content_sha256 for number in (0, 1)] == [made[number].content_sha256 for number in (2, 3)]
    [step] = await case.rows(tables.Step)
    assert step.metrics["optimizer_inherited"] == 1.0  # type: ignore[attr-defined]
    assert sorted(path.name for path in (case.folder / case.run.id / "versions").iterdir()) == ["0", "1"]


@pytest.mark.timeout(600)
async def test_a_trainer_killed_while_it_writes_a_lost_version_from_its_checkpoint_writes_it_again(
    database: Database, postgres_dsn: str, tiny_model: Path, tmp_path: Path, redis_url: str
) -> None:
    case = await Case(database, postgres_dsn, tiny_model, tmp_path / "runs", redis_url).open(
        steps=1, export_dtype="bfloat16"
    )
    for number in range(2):
        await case.add_group(number)
    await case.train()
    made = (await case.versions())[1]
    remove_folder(Path(made.path))
    injector = FaultInjector(tmp_path / "faults")
    for point in ("trainer.weights_written", "trainer.version_unnamed", "trainer.exported"):
        injector.arm(point)
        assert (point, await train(case, injector)) == (point, -signal.SIGKILL)
    assert await train(case, injector) == 0
    assert describe(Path(made.path)).content_sha256 == made.content_sha256
    assert len(await case.rows(tables.Step)) == 1
    assert sorted(path.name for path in Path(made.path).parent.iterdir()) == ["1"]
