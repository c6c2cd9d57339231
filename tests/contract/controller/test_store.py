"""The controller's writes on a real Postgres: rollouts end once, groups complete, expired leases cause retries."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update

from leyden.libs.contracts import ids
from leyden.libs.contracts.api.runs import EvaluationRequest
from leyden.libs.queue.notifications import Notifications
from leyden.libs.queue.stream import RolloutQueue
from leyden.libs.store import tables
from leyden.libs.store.alarms.publications import ended_unpublished_runs
from leyden.libs.store.database import Database
from leyden.libs.store.engines import Pool, read_pools, write_pools
from leyden.libs.store.read.results import list_evaluations
from leyden.libs.store.runs import actions
from leyden.libs.store.runs.admission import solve_rates
from leyden.libs.store.runs.facts import finishing_runs
from leyden.libs.store.runs.retention import prune_run
from leyden.services.controller import tick
from leyden.services.controller.engines.fleet import Fleet
from leyden.services.controller.engines.targets import TargetVersion
from leyden.services.controller.settings import PoolSettings, Settings
from leyden.services.controller.tick import Controller
from leyden.services.controller.trainers.models import TrainerModels
from leyden.services.controller.trainers.supervisor import TrainerSupervisor
from leyden.services.controller.upkeep.alarms import judge_all
from leyden.services.controller.worker import take_over
from tests.support import builders
from tests.support.alarms import add_alarm, alarm_lines, alarms

LONG_AGO = datetime.now(tz=UTC) - timedelta(hours=1)


class ObedientFleet(Fleet):
    """Engines that serve at once what they should; `served` says what."""

    def __init__(self) -> None:
        self.adapters = None
        self.served: TargetVersion | None = None
        self.lost: int | None = None

    def set_target(self, target: TargetVersion) -> None:
        self.served = target

    def retain_targets(self, run_ids: Collection[str]) -> None:
        """One run has the engines."""

    def has_target(self, run_id: str, version: int) -> bool:
        return self.served is not None and (self.served.run_id, self.served.version) == (run_id, version)

    def served_version(self, run_id: str) -> int | None:
        return self.served.version if self.served is not None and self.served.run_id == run_id else None

    def trouble(self, run_id: str) -> str | None:
        return None

    def lost_version(self, run_id: str) -> int | None:
        return self.lost


class NoTrainers(TrainerSupervisor):
    """Remembers what was wanted, and starts nothing."""

    def __init__(self) -> None:
        self.wanted: dict[str, int] = {}
        self.finishing: set[str] = set()
        self.alive: frozenset[str] = frozenset()
        self.models: Mapping[str, TrainerModels] = {}
        self.failures: dict[str, str] = {}
        self.reason: str | None = None

    def reconcile(
        self,
        steps_done: dict[str, int],
        models: Mapping[str, TrainerModels] | None = None,
        finishing: Collection[str] = (),
    ) -> None:
        self.wanted, self.models, self.finishing = steps_done, models or {}, set(finishing)

    @property
    def supervised(self) -> frozenset[str]:
        return self.alive

    def pop_failures(self) -> dict[str, str]:
        failures, self.failures = self.failures, {}
        return failures

    def waiting_reason(self, run_id: str) -> str | None:
        return self.reason


class Scene:
    """A controller whose engines and trainers are obedient, on a database of its own."""

    def __init__(self, database: Database, redis_url: str, **settings: Any) -> None:
        self.database = database
        self.queue = RolloutQueue(redis_url)
        self.notifications = Notifications(redis_url)
        self.fleet = ObedientFleet()
        self.fleets: dict[str, ObedientFleet] = {"default": self.fleet}
        self.trainers = NoTrainers()
        self.settings = Settings(retry_seconds=0, enqueue_again_seconds=0.001, **settings)
        self.controller = self.another_controller()

    def another_controller(self) -> Controller:
        return Controller(self.settings, self.database, self.queue, self.notifications, self.fleets, self.trainers)

    async def tick(self, times: int = 1) -> None:
        for _ in range(times):
            await self.controller.tick()

    async def phase(self, run: tables.Run) -> tuple[str, str | None]:
        async with self.database.read() as session:
            row = await session.get_one(tables.RunStatus, run.id)
            return row.phase, row.reason

    async def groups(self, run: tables.Run) -> list[tables.Group]:
        async with self.database.read() as session:
            table = tables.Group
            return list(
                await session.scalars(
                    select(table).where(table.run_id == run.id).order_by(table.evaluation_id, table.number)
                )
            )

    async def rollouts(self, run: tables.Run, state: str | None = None) -> list[tables.Rollout]:
        async with self.database.read() as session:
            table = tables.Rollout
            rows = await session.scalars(select(table).where(table.run_id == run.id).order_by(table.id))
            return [row for row in rows if state in (None, row.state)]

    async def attempt(
        self, rollout: tables.Rollout, number: int = 1, *, kind: str | None, reward: float | None
    ) -> None:
        """An attempt that ended; without a kind its lease ran out."""
        state = "expired" if kind is None else "settled"
        await builders.add_attempt(self.database, rollout, number, state=state, finished_at=LONG_AGO)
        if kind is not None:
            await builders.add_outcome(self.database, rollout, number, kind=kind, reward=reward)

    async def finish_all(self, run: tables.Run, reward: float = 1.0) -> None:
        for rollout in await self.rollouts(run, "queued"):
            await self.attempt(rollout, kind="succeeded", reward=reward)

    async def credit_and_train(
        self, run: tables.Run, step: int, verdict: str = "trained", calls: dict[str, Any] | None = None
    ) -> None:
        """What credit and trainer write for a step: every complete training group is consumed by it."""
        groups = [
            group for group in await self.groups(run) if group.evaluation_id is None and group.state == "complete"
        ]
        async with self.database.read() as session:
            consumed = set(await session.scalars(select(tables.StepGroup.group_id)))
        async with self.database.session() as session:
            now = datetime.now(tz=UTC)
            session.add(tables.Step(run_id=run.id, number=step, metrics={}, checkpoint="c", started_at=now))
            for group in groups[: step * run.config["sampling"]["groups_per_step"]]:
                if group.id not in consumed:
                    session.add(_credited(group, calls=calls))
                    await session.flush()
                    session.add(tables.StepGroup(group_id=group.id, run_id=run.id, step=step, verdict=verdict))
        await builders.add_policy_version(self.database, run, step)

    async def intend(self, run: tables.Run, intent: str) -> None:
        async with self.database.session() as session:
            await session.execute(update(tables.Run).where(tables.Run.id == run.id).values(intent=intent))

    async def close(self) -> None:
        await self.queue.close()
        await self.notifications.close()


def _credited(
    group: tables.Group, verdict: str = "credited", calls: dict[str, Any] | None = None
) -> tables.GroupCredit:
    return tables.GroupCredit(
        group_id=group.id,
        run_id=group.run_id,
        verdict=verdict,
        credit_version=1,
        counted_siblings=group.size,
        has_variance=True,
        calls=calls,
    )


@pytest.fixture
async def scene(database: Database, redis_url: str):
    made = Scene(database, redis_url)
    yield made
    await made.close()


def document(steps: int = 2, **sampling: Any) -> dict[str, Any]:
    values = {"group_size": 2, "groups_per_step": 2, "max_policy_lag": 1, "max_attempts": 3, **sampling}
    return builders.run_document(sampling=values, training={"steps": steps})


async def add_run(scene: Scene, *, version: int | None = 0, tasks: int = 4, **changes: Any) -> tables.Run:
    dataset = await builders.add_dataset(
        scene.database, [{"question": str(n)} for n in range(tasks)], name=ids.new_id("questions")
    )
    run = await builders.add_run(
        scene.database, dataset_id=dataset.id, config=changes.pop("config", document()), **changes
    )
    async with scene.database.session() as session:
        await session.delete(await session.get_one(tables.RunStatus, run.id))
    if version is not None:
        await builders.add_policy_version(scene.database, run, version)
    return run


async def test_a_run_proceeds_from_its_first_group_to_completed(scene: Scene) -> None:
    run = await add_run(scene)
    await scene.tick(2)
    assert await scene.phase(run) == ("running", None)
    assert [(group.id, group.admitted_version) for group in await scene.groups(run)] == [
        (f"{run.id}.{number}", 0) for number in range(4)
    ]
    assert await scene.queue.depth() == 8
    assert scene.trainers.wanted == {run.id: 0}

    await scene.finish_all(run)
    await scene.tick()
    assert {group.state for group in await scene.groups(run)} == {"complete"}
    assert {(row.state, row.attempt, row.reward, row.reason) for row in await scene.rollouts(run)} == {
        ("finished", 1, 1.0, "succeeded")
    }

    await scene.credit_and_train(run, 1)
    await scene.tick(2)
    assert scene.fleet.served is not None
    assert scene.fleet.served.version == 1
    await scene.credit_and_train(run, 2)
    await scene.tick(2)
    assert await scene.phase(run) == ("completed", None)
    assert len(await scene.groups(run)) == 4
    assert scene.trainers.wanted == {}


async def test_every_leader_gives_a_trainer_time_to_write_the_last_steps_checkpoint(scene: Scene) -> None:
    run = await add_run(scene)
    await scene.tick(2)
    await scene.finish_all(run)
    await scene.tick()
    await scene.credit_and_train(run, 1)
    await scene.tick()
    assert scene.trainers.finishing == set()
    await scene.credit_and_train(run, 2)
    for leader in (scene.controller, scene.another_controller()):
        await leader.tick()
        assert await scene.phase(run) == ("completed", None)
        assert (scene.trainers.wanted, scene.trainers.finishing) == ({}, {run.id})
    async with scene.database.read() as session:
        assert await finishing_runs(session, 0.0) == frozenset()
    # Its deletion waits for the trainer, whose files nobody needs.
    await scene.intend(run, "deleted")
    await scene.tick()
    assert scene.trainers.finishing == set()


async def test_a_trainer_that_lost_files_needed_has_time_however_old_the_last_step_is(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tick, "FINISH_SECONDS", 0.0)
    run = await add_run(scene)
    scene.trainers.alive = frozenset({run.id})
    await scene.tick(2)
    await scene.finish_all(run)
    await scene.tick()
    await scene.credit_and_train(run, 1)
    await scene.tick()
    # The last step is not made yet.
    assert scene.trainers.finishing == set()
    await scene.credit_and_train(run, 2)
    await scene.tick()
    assert (scene.trainers.wanted, scene.trainers.finishing) == ({}, {run.id})
    # Ended long ago as well.
    async with scene.database.session() as session:
        await session.execute(update(tables.RunStatus).values(finished_at=LONG_AGO))
    await scene.tick()
    assert scene.trainers.finishing == {run.id}
    scene.trainers.alive = frozenset()
    await scene.tick()
    assert scene.trainers.finishing == set()
    scene.trainers.alive = frozenset({run.id})
    await scene.intend(run, "deleted")
    await scene.tick()
    assert scene.trainers.finishing == set()


async def test_rollouts_are_enqueued_for_the_runners_that_their_run_names(scene: Scene, redis_url: str) -> None:
    config = {**document(), "runner": {"type": "kubernetes", "image": "agents:1"}}
    run = await add_run(scene, config=config)
    await scene.tick(3)
    jobs = RolloutQueue(redis_url, runner_type="kubernetes")
    assert (await scene.queue.depth(), await jobs.depth()) == (0, len(await scene.rollouts(run)))
    await jobs.close()


async def test_groups_with_baseline_remax_have_a_greedy_rollout_more(scene: Scene) -> None:
    config = document()
    run = await add_run(scene, config={**config, "credit": {"baseline": {"type": "remax"}}})
    await scene.tick(2)
    siblings, sampled = defaultdict[str, list[bool]](list), config["sampling"]["group_size"]
    for rollout in sorted(await scene.rollouts(run), key=lambda one: one.sibling):
        siblings[rollout.group_id].append(rollout.greedy)
    assert list(siblings.values()) == [[False] * sampled + [True]] * len(await scene.groups(run))


async def test_a_second_controller_makes_no_second_row(scene: Scene) -> None:
    run = await add_run(scene)
    await scene.tick(2)
    before = [rollout.id for rollout in await scene.rollouts(run)]
    await scene.another_controller().tick()
    assert [rollout.id for rollout in await scene.rollouts(run)] == before
    assert await scene.queue.depth() == len(before)


async def test_failures_of_the_platform_are_retried_then_excluded_and_never_rewarded(scene: Scene) -> None:
    run = await add_run(scene, config=document(max_attempts=2))
    await scene.tick(2)
    lost, broken, *others = await scene.rollouts(run)
    await scene.attempt(lost, kind=None, reward=None)
    await scene.attempt(broken, kind="infra_error", reward=None)
    await scene.tick()
    assert {rollout.state for rollout in (await scene.rollouts(run))[:2]} == {"queued"}

    await scene.attempt(lost, 2, kind="succeeded", reward=0.5)
    await scene.attempt(broken, 2, kind="infra_error", reward=None)
    for rollout in others:
        await scene.attempt(rollout, kind="agent_error", reward=None)
    await scene.tick()
    rows = [(row.state, row.attempt, row.reward, row.reason) for row in await scene.rollouts(run)]
    assert rows[:3] == [
        ("finished", 2, 0.5, "succeeded"),
        ("excluded", None, None, "infra_error"),
        ("finished", 1, 0.0, "agent_error"),
    ]
    assert {group.state for group in await scene.groups(run)} == {"complete"}


async def test_a_timeout_that_waited_for_an_engine_is_tried_again(scene: Scene) -> None:
    run = await add_run(scene)
    await scene.tick(2)
    waiting, slow, failed, *_ = await scene.rollouts(run)
    now = time.time_ns()
    times = {"state": "settled", "started_at": LONG_AGO - timedelta(seconds=10), "finished_at": LONG_AGO}
    for rollout, kind in ((waiting, "timeout"), (slow, "timeout"), (failed, "agent_error")):
        await builders.add_attempt(scene.database, rollout, **times)
        await builders.add_outcome(scene.database, rollout, kind=kind, reward=None)
    await builders.add_call(scene.database, waiting, status="aborted", queued_seconds=9.0)
    # Six calls that waited for a second at the same time, of ten that the agent had.
    for _ in range(6):
        await builders.add_call(scene.database, slow, queued_seconds=1.0, sequence=now)
    await builders.add_call(scene.database, failed, status="failed")
    await scene.tick()
    assert [(row.state, row.reason) for row in (await scene.rollouts(run))[:3]] == [
        ("queued", None),
        ("finished", "timeout"),
        ("queued", None),
    ]


async def add_request(scene: Scene, rollout: tables.Rollout, since: float, **columns: Any) -> None:
    """A request that arrived `since` seconds before the end of its attempt; by default one that nobody answered."""
    arrived = int((LONG_AGO.timestamp() - since) * 1e9)
    values = {"waited_seconds": since, "seconds": since, "delivered": False, **columns}
    values |= {
        "request_sha256": values.get("request_sha256", b"%d" % arrived),
        "gateway": values.get("gateway", "gone"),
        "sequence": arrived,
    }
    if values["delivered"] is not None:
        same = {name: values[name] for name in ("sequence", "request_sha256")}
        status = "completed" if values["delivered"] else "aborted"
        await builders.add_call(scene.database, rollout, id=f"c{since}", status=status, **same)
    async with scene.database.session() as session:
        session.add(
            tables.Delivery(run_id=rollout.run_id, request_id=f"c{since}", rollout_id=rollout.id, attempt=1, **values)
        )


@pytest.mark.parametrize(
    ("kind", "reward", "requests", "again"),
    [
        # Ten seconds of the attempt: the last request had no answer, after a tool that took most of the time.
        ("agent_error", None, [(1.5, {})], True),
        ("succeeded", 0.0, [(1.5, {})], True),
        ("succeeded", None, [(3.0, {"delivered": True})], True),
        ("succeeded", 0.0, [(3.0, {"delivered": True})], False),
        # The second of two hedged requests was closed once the first had its answer.
        ("succeeded", 0.0, [(5.0, {"delivered": True}), (4.9, {"waited_seconds": 4.0, "seconds": 4.0})], False),
        # A later try of the same request was answered.
        ("succeeded", 0.0, [(6.0, {"waited_seconds": 3.0, "seconds": 3.0, "request_sha256": b"same"}),
                            (2.0, {"delivered": True, "waited_seconds": 0.0, "request_sha256": b"same"})], False),
        # It swallowed a lost request and went on.
        ("succeeded", 0.0, [(9.0, {"waited_seconds": 3.0, "seconds": 3.0}),
                            (2.0, {"delivered": True, "waited_seconds": 0.0})], True),
        # An engine in good health: closed calls have waited for moments, however many there are.
        ("agent_error", None, [(0.2 + 0.001 * n, {"waited_seconds": 0.2, "seconds": 0.2}) for n in range(40)], False),
        # Eight at once, which the engine answers one after the other: they wait for each other.
        ("timeout", None, [(9.0 + 0.001 * n, {"waited_seconds": 1.0 * n, "seconds": 1.0 + n, "delivered": True})
                           for n in range(8)], False),
        ("agent_error", None, [(9.0 + 0.001 * n, {"waited_seconds": 1.0 * n, "seconds": 1.0 + n}) for n in range(8)],
         False),
        # Answers that came after long waits do not make a wait for an engine that is gone a usual one.
        ("timeout", None, [(9.0, {"delivered": True, "waited_seconds": 5.0, "seconds": 5.5}), (1.9, {})], True),
        ("timeout", None, [(9.0, {"delivered": True, "waited_seconds": 0.0, "seconds": 5.5}), (1.9, {})], False),
        # Two at once, and the engine is away after the first.
        ("agent_error", None, [(9.0, {"waited_seconds": 0.0, "seconds": 1.0, "delivered": True}),
                               (8.9, {"waited_seconds": 8.0, "seconds": 8.0})], True),
    ],
)  # fmt: skip
async def test_waits_are_the_platforms_whatever_ended_the_attempt(
    scene: Scene, kind: str, reward: float | None, requests: list[tuple[float, dict[str, Any]]], again: bool
) -> None:
    run = await add_run(scene)
    await scene.tick(2)
    rollout, *_ = await scene.rollouts(run)
    times = {"state": "settled", "started_at": LONG_AGO - timedelta(seconds=10), "finished_at": LONG_AGO}
    await builders.add_attempt(scene.database, rollout, **times)
    await builders.add_outcome(scene.database, rollout, kind=kind, reward=reward)
    for since, columns in requests:
        await add_request(scene, rollout, since, **columns)
    await scene.tick()
    found, *_ = await scene.rollouts(run)
    assert (found.state, found.excused_attempt) == (("queued", 1) if again else ("finished", 0))


async def test_an_attempt_is_judged_once_its_requests_have_ended(scene: Scene) -> None:
    run = await add_run(scene)
    await scene.tick(2)
    rollout, *_ = await scene.rollouts(run)
    now = datetime.now(UTC)
    times = {"state": "settled", "started_at": now - timedelta(seconds=30), "finished_at": now - timedelta(seconds=20)}
    await builders.add_attempt(scene.database, rollout, **times)
    await builders.add_outcome(scene.database, rollout, kind="succeeded", reward=0.0)
    async with scene.database.session() as session:
        session.add(tables.Gateway(name="alive", seen_at=now + timedelta(seconds=600)))
    opened = {"waited_seconds": None, "seconds": None, "delivered": None, "gateway": "alive"}
    await add_request(scene, rollout, 5.0, **opened)
    await scene.tick()
    assert (await scene.rollouts(run))[0].state == "queued"
    # The gateway dies, and its request has waited until then.
    async with scene.database.session() as session:
        gateway = await session.get(tables.Gateway, "alive")
        request = (await session.scalars(select(tables.Delivery))).one()
        assert gateway is not None
        gateway.seen_at, request.created_at = now - timedelta(seconds=15), now - timedelta(seconds=25)
    await scene.tick()
    assert [(row.state, row.excused_attempt) for row in (await scene.rollouts(run))[:1]] == [("queued", 1)]


@pytest.mark.parametrize(("kind", "reward"), [("agent_error", None), ("succeeded", 1.0)])
async def test_an_attempt_is_judged_after_every_living_gateway_has_told_its_requests(
    scene: Scene, kind: str, reward: float | None
) -> None:
    run = await add_run(scene)
    await scene.tick(2)
    rollout, *_ = await scene.rollouts(run)
    ended_at = datetime.now(UTC) - timedelta(seconds=3)
    times = {"state": "settled", "started_at": ended_at - timedelta(seconds=9), "finished_at": ended_at}
    await builders.add_attempt(scene.database, rollout, **times)
    await builders.add_outcome(scene.database, rollout, kind=kind, reward=reward)
    async with scene.database.session() as session:
        session.add(tables.Gateway(name="late", seen_at=ended_at - timedelta(seconds=1)))
    await scene.tick()
    assert (await scene.rollouts(run))[0].state == "queued"
    async with scene.database.session() as session:
        gateway = await session.get(tables.Gateway, "late")
        assert gateway is not None
        gateway.seen_at = ended_at + timedelta(seconds=1)
    await scene.tick()
    assert (await scene.rollouts(run))[0].reason == kind


async def test_a_reward_beside_an_unanswered_call_of_ours_is_tried_again(scene: Scene) -> None:
    run = await add_run(scene)
    await scene.tick(2)
    caught, again, *_ = await scene.rollouts(run)
    for rollout in (caught, again):
        await builders.add_call(scene.database, rollout, status="failed", request_sha256=b"same")
        await scene.attempt(rollout, kind="succeeded", reward=0.0)
    await builders.add_call(scene.database, again, request_sha256=b"same")
    await scene.tick()
    assert [(row.state, row.reason) for row in (await scene.rollouts(run))[:2]] == [
        ("queued", None),
        ("finished", "succeeded"),
    ]


@pytest.mark.parametrize(("status", "outcome"), [("aborted", "queued"), ("refused", "finished")])
async def test_an_agent_that_gives_up_at_a_refused_call_failed_itself(scene: Scene, status: str, outcome: str) -> None:
    """As where its messages exceed the context. The refusal is its answer, also without a row of its delivery."""
    run = await add_run(scene)
    await scene.tick(2)
    rollout, *_ = await scene.rollouts(run)
    times = {"state": "settled", "started_at": LONG_AGO - timedelta(seconds=10), "finished_at": LONG_AGO}
    await builders.add_attempt(scene.database, rollout, **times)
    await builders.add_outcome(scene.database, rollout, kind="agent_error", reward=None)
    seconds = {"queued_seconds": 1.5, "total_seconds": 1.5, "sequence": int((LONG_AGO.timestamp() - 2) * 1e9)}
    await builders.add_call(scene.database, rollout, status=status, **seconds)
    await scene.tick()
    assert (await scene.rollouts(run))[0].state == outcome


async def test_a_posted_reward_replaces_a_missing_outcome_reward(scene: Scene) -> None:
    run = await add_run(scene)
    await scene.tick(2)
    rewarded, silent, *_ = await scene.rollouts(run)
    for rollout in (rewarded, silent):
        await scene.attempt(rollout, kind="succeeded", reward=None)
    async with scene.database.session() as session:
        session.add(
            tables.Reward(
                rollout_id=rewarded.id, attempt=1, key="k", run_id=run.id, source="endpoint", name="reward", value=0.7
            )
        )
    await scene.tick()
    assert [(row.state, row.reward, row.reason) for row in (await scene.rollouts(run))[:2]] == [
        ("finished", 0.0, "succeeded"),
        ("finished", 0.0, "no_reward"),
    ]


async def test_the_tasks_of_excluded_and_stale_groups_are_sampled_again_once(scene: Scene) -> None:
    run = await add_run(scene, config=document(steps=4), tasks=6)
    await scene.tick(2)

    async def lose(excluded: tables.Group, stale: tables.Group) -> None:
        await scene.finish_all(run)
        await scene.tick()
        async with scene.database.session() as session:
            session.add_all([_credited(excluded, "excluded"), _credited(stale)])
            await session.flush()
            session.add(tables.StepGroup(group_id=stale.id, run_id=run.id, step=None, verdict="stale"))
        await scene.tick(2)

    await lose(*(await scene.groups(run))[1:3])
    groups = await scene.groups(run)
    assert [(group.number, group.replaces) for group in groups[4:]] == [(4, groups[1].id), (5, groups[2].id)]
    assert [group.task_number for group in groups[4:]] == [group.task_number for group in groups[1:3]]
    # A task that is lost twice may be broken: the shuffle goes on with the tasks whose turn it is.
    await lose(*groups[4:])
    further = (await scene.groups(run))[6:]
    assert [group.replaces for group in further] == [None, None]
    assert {group.task_number for group in [*groups[:4], *further]} == set(range(6))


async def test_flushing_redis_delays_rollouts_by_one_poll(scene: Scene, redis_url: str) -> None:
    run = await add_run(scene)
    await scene.tick(2)
    depth = await scene.queue.depth()
    await scene.queue._redis.flushall()
    await scene.tick()
    assert await scene.queue.depth() == depth == len(await scene.rollouts(run))


async def test_runs_use_the_engines_one_after_another(scene: Scene) -> None:
    first = await add_run(scene, created_at=LONG_AGO)
    second = await add_run(scene)
    await scene.tick(2)
    assert await scene.phase(second) == ("pending", f"waiting for an engine of pool default: {first.id} has them")
    assert await scene.groups(second) == []
    await scene.intend(first, "cancelled")
    await scene.tick(3)
    assert await scene.phase(first) == ("cancelled", None)
    assert {row.state for row in await scene.rollouts(first)} == {"cancelled"}
    assert {group.state for group in await scene.groups(first)} == {"cancelled"}
    assert await scene.phase(second) == ("running", None)
    assert len(await scene.groups(second)) == 4
    assert scene.fleet.served is not None
    assert scene.fleet.served.run_id == second.id


async def test_runs_of_different_pools_go_side_by_side(scene: Scene) -> None:
    scene.fleets["small"] = small = ObedientFleet()
    large, first, second = [
        await add_run(scene, config={**document(), "pool": pool}, created_at=LONG_AGO + timedelta(seconds=number))
        for number, pool in enumerate(("default", "small", "small"))
    ]
    scene.controller.settings = Settings(
        pools={
            "default": PoolSettings(engine_urls=frozenset({"http://a"})),
            "small": PoolSettings(engine_urls=frozenset({"http://b"}), model_path=Path("/models/small")),
        }
    )
    await take_over(scene.controller.settings, scene.database)
    await scene.tick(2)
    assert [await scene.phase(run) for run in (large, first)] == [("running", None)] * 2
    assert await scene.phase(second) == ("pending", f"waiting for an engine of pool small: {first.id} has them")
    assert scene.trainers.wanted == {large.id: 0, first.id: 0}
    assert scene.trainers.models == {large.id: TrainerModels(), first.id: TrainerModels("/models/small")}
    assert [fleet.served and fleet.served.run_id for fleet in (scene.fleet, small)] == [large.id, first.id]
    assert [len(await scene.groups(run)) for run in (large, first, second)] == [4, 4, 0]
    async with scene.database.read() as session:
        pools = {row.name: row for row in await session.scalars(select(tables.Pool))}
    assert {name: (row.model_path, row.run_ids, row.waiting) for name, row in pools.items()} == {
        "default": (None, [large.id], []),
        "small": ("/models/small", [first.id], [second.id]),
    }


async def test_a_run_whose_pool_is_gone_waits_with_the_reason_and_may_be_cancelled(scene: Scene) -> None:
    run = await add_run(scene, config={**document(), "pool": "gone"})
    await scene.tick()
    assert await scene.phase(run) == (
        "pending",
        "there is no pool 'gone': add it to CONTROLLER_POOLS, or cancel the run",
    )
    await scene.intend(run, "cancelled")
    await scene.tick()
    assert await scene.phase(run) == ("cancelled", None)


async def test_pools_that_the_settings_no_longer_name_go_with_their_engines(scene: Scene) -> None:
    async with scene.database.session() as session:
        await write_pools(session, [Pool("default"), Pool("old", "/models/old")])
        session.add_all(tables.Engine(url=f"http://{pool}", pool=pool, state="updating") for pool in ("default", "old"))
    await take_over(scene.controller.settings, scene.database)
    async with scene.database.read() as session:
        assert list(await read_pools(session)) == ["default"]
        assert list(await session.scalars(select(tables.Engine.url))) == ["http://default"]


async def test_a_paused_run_admits_no_groups_and_resumes_at_the_same_group(scene: Scene) -> None:
    run = await add_run(scene)
    await scene.tick(2)
    await scene.intend(run, "paused")
    await scene.finish_all(run)
    await scene.tick()
    await scene.credit_and_train(run, 1)
    await scene.tick(2)
    assert await scene.phase(run) == ("paused", None)
    assert scene.trainers.wanted == {}
    admitted = len(await scene.groups(run))
    await scene.intend(run, "running")
    await scene.tick(2)
    assert await scene.phase(run) == ("running", None)
    assert len(await scene.groups(run)) == admitted == 4


async def test_a_run_whose_agent_never_works_fails_with_the_cause(database: Database, redis_url: str) -> None:
    scene = Scene(database, redis_url, groups_without_success=2)
    run = await add_run(scene)
    await scene.tick(2)
    for rollout in await scene.rollouts(run):
        await builders.add_attempt(database, rollout, state="settled", finished_at=LONG_AGO)
        await builders.add_outcome(
            database, rollout, kind="agent_error", reward=None, detail="exited with code 1", stderr_tail="no module x"
        )
    await scene.tick()
    assert await scene.phase(run) == (
        "failed",
        "no rollout succeeds: agent_error: exited with code 1: no module x",
    )
    await scene.close()


async def test_a_short_run_whose_agent_never_works_fails_with_the_cause(scene: Scene) -> None:
    run = await add_run(scene, config=document(steps=1))
    await scene.tick(2)
    for rollout in await scene.rollouts(run):
        await scene.attempt(rollout, kind="agent_error", reward=None)
    await scene.tick()
    assert await scene.phase(run) == ("failed", "no rollout succeeds: agent_error")


SILENT = {"calls": 4, "untrainable": {"sampled with temperature": 4}}


async def test_two_steps_in_a_row_without_a_trainable_token_end_the_run(scene: Scene) -> None:
    run = await add_run(scene, config=document(steps=4))
    await scene.tick(2)
    for step, verdict in ((1, "untrainable"), (2, "no_variance"), (3, "untrainable"), (4, "untrainable")):
        await scene.finish_all(run)
        await scene.tick()
        await scene.credit_and_train(run, step, verdict, SILENT)
        assert (await scene.phase(run))[0] == "running"
        await scene.tick()
    phase, reason = await scene.phase(run)
    assert phase == "failed"
    assert reason == (
        "no token of steps 3 and 4 can be trained: of 16 model calls 16 sampled with temperature: let the agent leave"
        " out these parameters; a temperature must be above 0, best 1 (or write `sampling.override`: training then"
        " samples without them)"
    )


ROLES = [{"name": "writer", "agent_name": "writer"}, {"name": "critic", "tools": ["mark"]}]


@pytest.mark.parametrize("role", ["critic", "reader"])
async def test_a_run_ends_where_no_role_that_it_trains_has_a_call_in_two_steps(scene: Scene, role: str) -> None:
    run = await add_run(scene, config={**document(steps=4), "roles": ROLES, "train": ["writer", "critic"]})
    await scene.tick(2)
    for step in (1, 2):
        await scene.finish_all(run)
        await scene.tick()
        await scene.credit_and_train(run, step, "trained", {"calls": 4, "roles": {role: 4}})
        warnings = await alarm_lines(scene.database, run.id)
        assert (await scene.phase(run))[0] == "running"
        if step == 1 and role == "critic":
            assert warnings[-1].startswith("no call of step 1 has the role writer, which the run trains: mend the cond")
        await scene.tick()
    if role == "critic":
        assert (await scene.phase(run))[0] == "running"
        await scene.finish_all(run)
        await scene.tick()
        await scene.credit_and_train(run, 3, "trained", {"calls": 4, "roles": {"writer": 1, "critic": 3}})
        assert "no call of steps" not in "".join(await alarm_lines(scene.database, run.id))
    else:
        assert await scene.phase(run) == (
            "failed",
            "no call of steps 1 and 2 has the role writer or critic, which the run trains: mend the conditions of"
            " `roles` (`leyden run agents` shows names), or leave it out of `train`",
        )


async def test_a_run_whose_groups_credit_excludes_fails_with_the_cause(database: Database, redis_url: str) -> None:
    scene = Scene(database, redis_url, groups_without_success=3)
    run = await add_run(scene, config=document(steps=40), tasks=200)
    await scene.tick(2)
    for number, verdict in enumerate(("excluded", "credited", "excluded", "excluded", "excluded")):
        group = (await scene.groups(run))[number]
        assert (await scene.phase(run))[0] == "running"
        await scene.finish_all(run)
        await scene.tick()
        reason = "more than 3 records" if verdict == "excluded" else None
        await builders.add_credited_group(scene.database, group, verdict=verdict, reason=reason)
        await scene.tick()
    assert await scene.phase(run) == (
        "failed",
        "credit excluded the last 3 groups, so that nothing trains: more than 3 records",
    )
    await scene.close()


async def test_a_run_of_one_step_without_a_trainable_token_fails(scene: Scene) -> None:
    run = await add_run(scene, config=document(steps=1))
    await scene.tick(2)
    await scene.finish_all(run)
    await scene.tick()
    await scene.credit_and_train(run, 1, "untrainable", {"calls": 0})
    await scene.tick()
    assert await scene.phase(run) == (
        "failed",
        "no token of step 1 can be trained: its rollouts made no model call of this policy: does the agent use"
        " OPENAI_BASE_URL?",
    )


async def test_a_run_fails_when_its_trainer_cannot_be_restarted(scene: Scene) -> None:
    run = await add_run(scene)
    await scene.tick(2)
    scene.trainers.failures = {run.id: "out of memory"}
    await scene.tick()
    assert await scene.phase(run) == ("failed", "out of memory")
    assert {row.state for row in await scene.rollouts(run)} == {"cancelled"}
    assert scene.trainers.wanted == {}


async def test_sampling_waits_for_policy_version_0(scene: Scene) -> None:
    run = await add_run(scene, version=None)
    await scene.tick(2)
    assert await scene.phase(run) == ("running", "the trainer is preparing policy version 0")
    scene.trainers.reason = "no node has a free GPU"
    await scene.tick()
    assert await scene.phase(run) == ("running", "the trainer waits: no node has a free GPU")
    scene.trainers.reason = None
    assert scene.trainers.wanted == {run.id: 0}
    assert await scene.groups(run) == []


async def add_evaluation(scene: Scene, run: tables.Run, number: int, version: int | None, **columns: Any) -> None:
    async with scene.database.session() as session:
        values = {"rollouts_per_task": 1, "max_tasks": 3, **columns}
        session.add(
            tables.Evaluation(
                id=ids.evaluation_id(run.id, number),
                run_id=run.id,
                number=number,
                dataset_id=run.dataset_id,
                policy_version=version,
                **values,
            )
        )


@pytest.mark.parametrize(("works", "phase"), [(False, "failed"), (True, "completed")])
async def test_a_run_that_only_evaluates_fails_where_its_agent_never_works(
    scene: Scene, works: bool, phase: str
) -> None:
    run = await add_run(scene, config=document(steps=0))
    await add_evaluation(scene, run, 1, 0)
    await scene.tick(2)
    first, *others = await scene.rollouts(run)
    await scene.attempt(first, kind="succeeded" if works else "agent_error", reward=0.0 if works else None)
    for rollout in others:
        await scene.attempt(rollout, kind="agent_error", reward=None)
    await scene.tick(2)
    assert await scene.phase(run) == (phase, None if works else "no rollout succeeds: agent_error")


async def test_evaluations_run_before_and_after_training_on_their_versions(scene: Scene) -> None:
    run = await add_run(scene, config=document(steps=1, max_policy_lag=0))
    await add_evaluation(scene, run, 1, 0)
    await add_evaluation(scene, run, 2, None)
    await scene.tick(2)
    assert await scene.phase(run) == ("evaluating", None)
    assert scene.fleet.served is not None
    assert scene.fleet.served.version == 0
    assert [group.id for group in await scene.groups(run)] == [f"{run.id}.e1.{number}" for number in range(3)]
    await scene.finish_all(run)
    await scene.tick(2)
    assert await scene.phase(run) == ("running", None)
    await scene.finish_all(run)
    await scene.tick()
    await scene.credit_and_train(run, 1)
    await scene.tick(2)
    assert await scene.phase(run) == ("evaluating", None)
    last = [group for group in await scene.groups(run) if group.evaluation_id == f"{run.id}.e2"]
    assert [(group.number, group.admitted_version) for group in last] == [(0, 1), (1, 1), (2, 1)]
    await scene.finish_all(run)
    await scene.tick(2)
    assert await scene.phase(run) == ("completed", None)

    await add_evaluation(scene, run, 3, 0, max_tasks=1)
    await scene.tick(3)
    assert await scene.phase(run) == ("evaluating", None)
    assert scene.fleet.served is not None
    assert scene.fleet.served.version == 0
    await scene.finish_all(run)
    await scene.tick(2)
    assert await scene.phase(run) == ("completed", None)


async def test_a_trained_run_gets_its_trainer_again_to_export_a_lost_version(scene: Scene) -> None:
    run = await add_run(scene, config=document(steps=1, max_policy_lag=0))
    await add_evaluation(scene, run, 1, None)
    await scene.tick(3)
    await scene.finish_all(run)
    await scene.tick()
    await scene.credit_and_train(run, 1)
    await scene.tick(2)
    assert (await scene.phase(run))[0] == "evaluating"
    assert scene.trainers.wanted == {}
    for lost, wanted in ((0, {}), (1, {run.id: 1}), (None, {})):
        scene.fleet.lost = lost
        await scene.tick()
        assert scene.trainers.wanted == wanted


async def test_an_evaluation_of_another_version_waits_for_open_groups(scene: Scene) -> None:
    run = await add_run(scene)
    await scene.tick(2)
    await scene.finish_all(run)
    await scene.tick()
    await scene.credit_and_train(run, 1)
    await scene.tick(2)
    assert [group.admitted_version for group in await scene.groups(run)] == [0, 0, 0, 0]
    await scene.credit_and_train(run, 2)
    await add_evaluation(scene, run, 1, 0)
    await builders.add_group(scene.database, run, 9)
    await scene.tick(2)
    assert scene.fleet.served is not None
    assert scene.fleet.served.version == 2
    await scene.finish_all(run)
    await scene.tick(2)
    assert scene.fleet.served.version == 0
    assert {one.id for one in await scene.groups(run) if one.state == "open"} == {f"{run.id}.e1.{n}" for n in range(3)}


def stopping_document(**stopping: Any) -> dict[str, Any]:
    made = document(steps=9, groups_per_step=1, max_policy_lag=0)
    made["training"]["early_stopping"] = stopping
    return made


async def step_with_reward(scene: Scene, run: tables.Run, step: int, reward: float) -> None:
    await scene.tick(2)
    await scene.finish_all(run, reward)
    await scene.tick()
    await scene.credit_and_train(run, step)


async def test_a_run_stops_early_once_its_rewards_do_not_improve(scene: Scene) -> None:
    run = await add_run(scene, config=stopping_document(metric="train_reward", patience=2))
    for step, reward in enumerate((0.2, 0.5, 0.4), 1):
        await step_with_reward(scene, run, step, reward)
        await scene.tick(2)
        assert await scene.phase(run) == ("running", None)
    # The next step's group is open when the last value comes.
    _, late = await builders.add_group(scene.database, run, 4, admitted_version=3)
    for rollout in await scene.rollouts(run, "queued"):
        if rollout.group_id == f"{run.id}.3":
            await scene.attempt(rollout, kind="succeeded", reward=0.5)
    await scene.tick()
    await scene.credit_and_train(run, 4)
    await scene.tick(2)
    reason = "stopped early at step 4: the train reward was not better than 0.5 (step 2) for 2 values in a row"
    assert await scene.phase(run) == ("completed", reason)
    states = {row.id: (row.state, row.reason) for row in await scene.rollouts(run)}
    assert [states[one.id] for one in late] == [("cancelled", "training stopped early")] * 2
    assert scene.trainers.wanted == {}
    # A reward that comes late would decide otherwise; a new leader keeps the decision, also after one more evaluation.
    async with scene.database.session() as session:
        session.add_all(
            tables.ExternalReward(rollout_id=one.id, key="late", name="person", value=9.0)
            for one in await scene.rollouts(run)
            if one.group_id == f"{run.id}.3"
        )
        await actions.create_evaluation(session, run.id, EvaluationRequest(policy_version=3, dataset=run.dataset_id))
    scene.controller = scene.another_controller()
    await scene.tick(3)
    assert (await scene.phase(run))[0] == "evaluating"
    await scene.finish_all(run)
    await scene.tick(3)
    assert await scene.phase(run) == ("completed", reason)
    assert scene.trainers.wanted == {}


async def test_a_run_stops_early_by_its_evaluations_and_measures_the_last_version(scene: Scene) -> None:
    config = stopping_document(metric="evaluation_reward", target=0.9)
    held_out = await builders.add_dataset(scene.database, [{"question": "9"}], name=ids.new_id("held-out"))
    config["evaluation"] = {"dataset": held_out.id, "every": 2}
    run = await add_run(scene, config=config)
    async with scene.database.session() as session:
        session.add_all(
            tables.Evaluation(
                id=f"{run.id}.e{number}",
                run_id=run.id,
                number=number,
                dataset_id=held_out.id,
                policy_version=version,
                rollouts_per_task=1,
            )
            for number, version in enumerate((0, 2, 4, 6, 8, None), 1)
        )
    await scene.tick(2)
    await scene.finish_all(run, 0.1)
    for step in (1, 2):
        await step_with_reward(scene, run, step, 0.5)
    await scene.tick(3)
    assert (await scene.phase(run))[0] == "evaluating"
    await scene.finish_all(run, 0.95)
    await scene.tick(4)
    # The last evaluation measures the version at which training stopped; those in between never begin.
    assert (await scene.phase(run))[0] == "evaluating"
    await scene.finish_all(run, 0.9)
    await scene.tick(3)
    reason = "stopped early at version 2: the evaluation reward 0.95 reached the target 0.9"
    assert await scene.phase(run) == ("completed", reason)
    measured = [(g.evaluation_id, g.admitted_version) for g in await scene.groups(run) if g.evaluation_id]
    assert measured == [(f"{run.id}.e1", 0), (f"{run.id}.e2", 2), (f"{run.id}.e6", 2)]
    async with scene.database.read() as session:
        found = (await list_evaluations(session, run.id, cursor=None, limit=10)).items
    assert all(one.results.complete for one in found)
    # A new leader decides the same.
    scene.controller = scene.another_controller()
    await scene.tick(2)
    assert await scene.phase(run) == ("completed", reason)
    await prune_run(scene.database, run.id)


async def test_groups_without_variance_are_replaced_so_that_steps_do_not_starve(scene: Scene) -> None:
    run = await add_run(scene, config=document(max_policy_lag=0, refill_zero_variance=1))
    await scene.tick(2)
    await scene.finish_all(run)
    await scene.tick()
    groups = await scene.groups(run)
    for group, has_variance in zip(groups, (False, True), strict=True):
        await builders.add_credited_group(scene.database, group, has_variance=has_variance)
    await scene.tick()
    # One of two groups teaches nothing: a third one is sampled; a tick more changes nothing.
    await scene.tick()
    assert [group.number for group in await scene.groups(run)] == [0, 1, 2]
    await scene.finish_all(run)
    await scene.tick()
    await builders.add_credited_group(scene.database, (await scene.groups(run))[2], has_variance=True)
    async with scene.database.session() as session:
        session.add(tables.Step(run_id=run.id, number=1, metrics={}, checkpoint="c", started_at=datetime.now(tz=UTC)))
        await session.flush()
        session.add_all(
            tables.StepGroup(group_id=f"{run.id}.{number}", run_id=run.id, step=1, verdict=verdict)
            for number, verdict in enumerate(("no_variance", "trained", "trained"))
        )
    await builders.add_policy_version(scene.database, run, 1)
    await scene.tick(2)
    assert [group.number for group in await scene.groups(run)] == [0, 1, 2, 3, 4]


async def test_an_untrainable_group_is_not_replaced(scene: Scene) -> None:
    run = await add_run(scene, config=document(max_policy_lag=0, refill_zero_variance=1))
    await scene.tick(2)
    await scene.finish_all(run)
    await scene.tick()
    for group, trainable in zip(await scene.groups(run), (False, True), strict=True):
        version = 0 if trainable else None
        await builders.add_credited_group(scene.database, group, has_variance=trainable, min_policy_version=version)
    await scene.tick(2)
    # The trainer counts it: another one would be stale at the next step.
    assert [group.number for group in await scene.groups(run)] == [0, 1]


async def test_a_curriculum_reads_the_solve_rates_of_earlier_groups(scene: Scene) -> None:
    curriculum = {"floor": 0.1}
    run = await add_run(
        scene, config=document(steps=9, max_policy_lag=8, groups_per_step=1, curriculum=curriculum), tasks=2
    )
    # Task 0 is always solved, task 1 every other time.
    for number, rewards in enumerate(((1.0, 1.0), (0.0, 1.0))):
        _, rollouts = await builders.add_group(scene.database, run, number, task_number=number, state="complete")
        for rollout, reward in zip(rollouts, rewards, strict=True):
            # As weights of 0.7, 0.2 and 0.1 make it.
            rounded = 0.7 + 0.2 + 0.1 if reward == 1.0 else reward
            await builders.finish_rollout(scene.database, rollout, reward=rounded)
    async with scene.database.read() as session:
        assert await solve_rates(session, run.id, 10) == {0: 1.0, 1: 0.5}
        assert await solve_rates(session, run.id, 1) == {1: 0.5}
    await scene.tick(2)
    tasks = [group.task_number for group in await scene.groups(run)]
    assert len(tasks) == 9
    # Each pair has both, since none comes twice while there are others.
    assert tasks[2:4] in ([0, 1], [1, 0])


async def test_a_curriculum_counts_rewards_that_were_given_beside_the_outcome(scene: Scene) -> None:
    """As an agent whose judge posts its rewards: the outcome itself has none."""
    run = await add_run(scene, config=document(steps=9), tasks=3)
    for number in range(3):
        _, rollouts = await builders.add_group(scene.database, run, number, task_number=number, state="complete")
        for rollout in rollouts:
            await builders.finish_rollout(scene.database, rollout, reward=0.0)
            async with scene.database.session() as session:
                if number == 1:
                    given = {"attempt": 1, "run_id": run.id, "source": "endpoint", "name": "judge"}
                    session.add(tables.Reward(rollout_id=rollout.id, key="judge", value=1.0, **given))
                if number == 2:
                    session.add(tables.ExternalReward(rollout_id=rollout.id, key="a", name="person", value=1.0))
    async with scene.database.read() as session:
        assert await solve_rates(session, run.id, 10) == {0: 0.0, 1: 1.0, 2: 1.0}


async def test_a_curriculum_takes_no_reward_that_is_to_come_for_a_failure(scene: Scene) -> None:
    awaiting = {**document(steps=9), "runner": {"type": "process", "stdout_reward": False}}
    run = await add_run(scene, config=awaiting, tasks=2)
    for number in range(2):
        _, rollouts = await builders.add_group(scene.database, run, number, task_number=number, state="complete")
        for rollout in rollouts:
            await builders.finish_rollout(scene.database, rollout, reward=None)
            async with scene.database.session() as session:
                (await session.get_one(tables.Rollout, rollout.id)).reward = 0.0
    async with scene.database.session() as session:
        session.add(tables.ExternalReward(rollout_id=rollouts[0].id, key="a", name="person", value=1.0))
    async with scene.database.read() as session:
        assert await solve_rates(session, run.id, 10) == {1: 1.0}


async def test_a_document_that_does_not_parse_fails_its_own_run_alone(scene: Scene) -> None:
    broken, good = await add_run(scene), await add_run(scene)
    async with scene.database.session() as session:
        config = {**broken.config, "algorithm": {"type": "of another version"}}
        await session.execute(update(tables.Run).where(tables.Run.id == broken.id).values(config=config))
    await scene.tick(2)
    phase, reason = await scene.phase(broken)
    assert (phase, str(reason)[:51]) == ("failed", "the stored document does not parse: algorithm: Inpu")
    assert await scene.phase(good) == ("running", None)
    assert await scene.groups(good)
    await judge_all(scene.database)
    async with scene.database.read() as session:
        judged = await session.get_one(tables.RunStatus, broken.id)
        assert judged.judged_end == judged.finished_at is not None


async def test_a_document_that_breaks_leaves_the_alarms_that_it_cannot_be_asked_about(scene: Scene) -> None:
    run = await add_run(scene)
    await scene.tick(2)
    await scene.finish_all(run)
    await scene.tick()
    await scene.credit_and_train(run, 1)
    await add_alarm(scene.database, run.id, "gap_near_limit")
    await add_alarm(scene.database, run.id, "stalled", number=2)
    async with scene.database.session() as session:
        made = {"metrics": {"publication_failed": 1.0}, "checkpoint": "2", "started_at": LONG_AGO}
        session.add(tables.Step(run_id=run.id, number=2, **made))
    await breaks(scene.database, run)
    await scene.tick(2)
    assert (await scene.phase(run))[0] == "failed"
    # An ended run does not stall, and somebody publishes its versions.
    assert list(await alarms(scene.database, run.id)) == ["gap_near_limit", "no_model_call", "not_published"]
    async with scene.database.read() as session:
        assert await ended_unpublished_runs(session) == [run.id]


DAMAGES: list[Any] = [
    ["no object"],
    {"algorithm": {"type": "of another version"}},
    {"roles": ["a"], "train": ["a"]},
    {"policies": "none"},
    {"reward": {"components": 1}},
    {"evaluation": [], "agent": None},
]


async def breaks(database: Database, run: tables.Run, damage: Any = DAMAGES[1]) -> None:
    async with database.session() as session:
        config = {**run.config, **damage} if isinstance(damage, dict) else damage
        await session.execute(update(tables.Run).where(tables.Run.id == run.id).values(config=config))


@pytest.mark.parametrize("begun", [False, True])
async def test_a_document_that_breaks_after_the_end_fails_its_own_evaluation_alone(scene: Scene, begun: bool) -> None:
    broken, good = await add_run(scene, config=document(steps=1)), await add_run(scene, config=document(steps=1))
    for run in (broken, good):
        await scene.tick(2)
        await scene.finish_all(run)
        await scene.tick()
        await scene.credit_and_train(run, 1)
        await scene.tick(2)
        assert (await scene.phase(run))[0] == "completed"
    await add_evaluation(scene, broken, 1, 0)
    if begun:
        await scene.tick(2)
        await scene.finish_all(broken)
    await breaks(scene.database, broken)
    await add_evaluation(scene, good, 1, 0)
    await scene.tick(3)
    phase, reason = await scene.phase(broken)
    assert phase == ("failed" if begun else "completed")
    assert str(reason).startswith("the stored document does not parse: algorithm: Input")
    ended = {(one.state, one.reason) for one in await scene.rollouts(broken) if ".e1." in one.id}
    assert ended == ({("cancelled", "the run failed")} if begun else set())
    assert await scene.phase(good) == ("evaluating", None)
    # It is said once.
    async with scene.database.read() as session:
        before = (await session.get_one(tables.RunStatus, broken.id)).updated_at
    await scene.tick()
    async with scene.database.read() as session:
        assert (await session.get_one(tables.RunStatus, broken.id)).updated_at == before


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: next(iter(damage)))
async def test_a_document_that_breaks_at_work_stops_no_other_run(scene: Scene, damage: Any) -> None:
    broken, good = await add_run(scene), await add_run(scene)
    await scene.tick(2)
    await scene.finish_all(broken)
    await scene.tick()
    await scene.credit_and_train(broken, 1, calls=SILENT)
    await scene.tick()
    await scene.finish_all(broken)
    await breaks(scene.database, broken, damage)
    await scene.tick(2)
    phase, reason = await scene.phase(broken)
    assert (phase, str(reason)[:34]) == ("failed", "the stored document does not parse")
    assert await scene.phase(good) == ("running", None)
