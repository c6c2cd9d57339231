"""The grader on Postgres: totals with their components, retries, concurrent graders, and kills."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, text, update

from leyden.libs.faults import FaultInjector
from leyden.libs.grading.pool import Pool
from leyden.libs.service import Checks
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.store.runs.grading import (
    Settled,
    heartbeat_gradings,
    lease_gradings,
    lease_groups,
    lease_suspects,
    release_gradings,
    settle_gradings,
)
from leyden.services.grader import worker
from leyden.services.grader.settings import Settings
from leyden.services.grader.worker import work
from tests.contract.controller.test_store import LONG_AGO
from tests.fakes.deadly_grader import DEADLY
from tests.invariants import violations
from tests.support import builders
from tests.support.waiting import eventually, waits_for_a_table

F1 = {
    "name": "answer",
    "weight": 0.9,
    "grader": {"type": "token_f1", "output": "{output.answer}", "reference": "{task.answer}"},
}
FORMAT = {"name": "format", "weight": 0.1, "grader": {"type": "regex", "pattern": "^answer: "}}
HANGS = {"name": "hangs", "grader": {"type": "regex", "pattern": "^(a+)+$"}}
SLOW = {"name": "slow", "grader": {"type": "sql_result", "reference": "{task.sql}", "database": "CREATE TABLE t(a);"}}
# Each of the terms takes a second, in one instruction of SQLite.
SLOW_TERM = "length(trim('{i}' || hex(zeroblob(49990)), replace(hex(zeroblob(4000)), '0', 'z') || '0{i}'))"
SLOW_SQL = "SELECT " + ", ".join(SLOW_TERM.format(i=i) for i in range(20))
BETTER = {
    "name": "better",
    "grader": {"type": "relative_model", "provider": "judge", "model": "m", "rubric": "Which answer is better?"},
}
QUALITY = {"name": "quality", "from": "otlp"}


async def add_ungraded(
    database: Database,
    *components: dict[str, Any],
    outputs: Sequence[str],
    task: dict[str, Any] | None = None,
    finished_at: datetime = LONG_AGO,
    **reward: Any,
) -> tuple[tables.Run, list[tables.Rollout]]:
    """A group whose attempts have succeeded and wait for their grades."""
    dataset = await builders.add_dataset(database, [task or {"answer": "Eiffel Tower"}], name=f"d{os.urandom(4).hex()}")
    config = builders.run_document(reward={"components": list(components), **reward})
    run = await builders.add_run(database, dataset_id=dataset.id, config=config)
    _, rollouts = await builders.add_group(database, run, size=len(outputs))
    for rollout, output in zip(rollouts, outputs, strict=True):
        await builders.add_attempt(database, rollout, state="settled", finished_at=finished_at)
        await builders.add_outcome(database, rollout, reward=None, stdout_tail=output)
    async with database.session() as session:
        await session.execute(update(tables.Rollout).where(tables.Rollout.run_id == run.id).values(grading_attempt=1))
    return run, rollouts


async def rows(database: Database, table: Any, run: tables.Run, *order: Any) -> Sequence[Any]:
    async with database.read() as session:
        return (await session.scalars(select(table).where(table.run_id == run.id).order_by(*order))).all()


async def gradings(database: Database, run: tables.Run) -> Sequence[tables.Grading]:
    return await rows(database, tables.Grading, run, tables.Grading.rollout_id)


async def rewards(database: Database, run: tables.Run) -> Sequence[tables.RolloutReward]:
    table = tables.RolloutReward
    return await rows(database, table, run, table.rollout_id, table.position)


async def is_settled(database: Database, run: tables.Run, count: int) -> bool:
    return [one.settled_at is None for one in await gradings(database, run)] == [False] * count


async def settled(database: Database, run: tables.Run, count: int) -> Sequence[tables.Grading]:
    async with asyncio.timeout(60):
        while not await is_settled(database, run, count):
            await asyncio.sleep(0.05)
    return await gradings(database, run)


def settings_of(database: Database, redis_url: str, **settings: Any) -> Settings:
    urls = {"database_url": database.dsn, "redis_url": redis_url}
    return Settings(**{**urls, "poll_seconds": 0.1, "processes": 1, **settings})


@asynccontextmanager
async def grading(database: Database, redis_url: str, **settings: Any) -> AsyncIterator[None]:
    stop = asyncio.Event()
    working = asyncio.create_task(work(settings_of(database, redis_url, **settings), stop, Checks()))
    try:
        yield
    finally:
        stop.set()
        await working


async def test_an_attempt_gets_one_total_with_its_components(database: Database, redis_url: str) -> None:
    outputs = ['answer: it is\n{"answer": "the tall Eiffel Tower"}', '{"answer": "Louvre\\u0000"}']
    run, _ = await add_ungraded(database, F1, FORMAT, outputs=outputs)
    async with grading(database, redis_url):
        first, second = await settled(database, run, 2)
    assert first.total == pytest.approx(0.9 * 0.8 + 0.1, abs=1e-9)
    assert (second.total, second.reason, second.tries) == (0.0, None, 1)
    answer, layout, *others = await rewards(database, run)
    assert (answer.component, answer.state, answer.weight, answer.value) == ("answer", "scored", 0.9, 0.8)
    assert (answer.extracted, answer.source) == ("the tall Eiffel Tower", "token_f1")
    assert answer.explanation == "F1 0.8 with 'Eiffel Tower'"
    assert (layout.component, layout.value, layout.extracted) == ("format", 1.0, "answer: ")
    assert [(one.component, one.value) for one in others] == [("answer", 0.0), ("format", 0.0)]
    assert others[0].extracted == "Louvre\ufffd"


async def test_calls_and_tools_are_those_that_the_gateway_recorded(database: Database, redis_url: str) -> None:
    budget = {"name": "calls", "grader": {"type": "call_budget", "at_most": 2}}
    tool = {"name": "tool", "grader": {"type": "tool_use", "tool": "search", "at_least": 2}}
    run, (rollout,) = await add_ungraded(database, budget, tool, outputs=[""])
    asked = [{"id": f"call_{n}", "name": name, "arguments": "{}"} for n, name in enumerate(("search", "add", "search"))]
    await builders.add_call(database, rollout, answer={"role": "assistant", "content": "", "tool_calls": asked})
    for _ in range(2):
        await builders.add_call(database, rollout)
    async with grading(database, redis_url):
        await settled(database, run, 1)
    found = await rewards(database, run)
    assert [(one.value, one.explanation) for one in found] == [
        (0.5, "3 model calls of 2"),
        (1.0, "2 calls of search"),
    ]


async def test_an_answer_that_never_reached_the_agent_is_no_call_and_no_use_of_a_tool(
    database: Database, redis_url: str
) -> None:
    budget = {"name": "calls", "grader": {"type": "call_budget", "at_most": 9}}
    tool = {"name": "tool", "grader": {"type": "tool_use", "tool": "search", "at_least": 1}}
    run, (rollout,) = await add_ungraded(database, budget, tool, outputs=[""])
    asked = [{"id": "call_1", "name": "search", "arguments": "{}"}]
    answer = {"role": "assistant", "content": "", "tool_calls": asked}
    # The client left for the first answer and asked again; it left for the second one, too, and continued it.
    for _ in range(2):
        call = await builders.add_call(database, rollout, answer=answer)
        await builders.add_delivery(database, call, delivered=False)
    await builders.add_call(database, rollout, parent_call_id=call.id, shared_turns=2)
    async with grading(database, redis_url):
        await settled(database, run, 1)
    found = await rewards(database, run)
    assert [one.explanation for one in found] == ["2 model calls of 9", "1 calls of search"]


async def test_a_grader_that_takes_too_long_is_tried_again_and_is_no_0(database: Database, redis_url: str) -> None:
    run, _ = await add_ungraded(database, FORMAT, SLOW, outputs=["SELECT 1"], task={"sql": SLOW_SQL})
    async with grading(database, redis_url, component_seconds=1.0):
        (late,) = await settled(database, run, 1)
    assert (late.total, late.reason) == (None, "slow: it took longer than 1 s before it read the output")
    assert late.tries == 3
    assert [(one.component, one.state, one.value) for one in await rewards(database, run)][:2] == [
        ("format", "scored", 0.0),
        ("slow", "failed", None),
    ]


async def test_an_output_that_takes_too_long_earns_0_at_once_and_the_next_one_its_grade(
    database: Database, redis_url: str
) -> None:
    run, _ = await add_ungraded(database, FORMAT, SLOW, outputs=[SLOW_SQL, "SELECT 1"], task={"sql": "SELECT 1"})
    async with grading(database, redis_url, component_seconds=1.0):
        slow, right = await settled(database, run, 2)
    assert [(one.total, one.reason, one.tries) for one in (slow, right)] == [(0.0, None, 1), (1.0, None, 1)]


async def test_a_text_whose_search_never_ends_earns_0_at_once(database: Database, redis_url: str) -> None:
    run, _ = await add_ungraded(database, FORMAT, HANGS, outputs=["answer: \n" + "a" * 64 + "!"])
    async with grading(database, redis_url, component_seconds=0.3):
        (found,) = await settled(database, run, 1)
    assert (found.total, found.tries) == (pytest.approx(0.1), 1)
    assert (await rewards(database, run))[1].explanation.startswith("the grading of this output took longer than 0.3")


async def test_a_grader_that_breaks_is_tried_three_times_and_holds_no_group(
    database: Database, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def breaks(*_: Any) -> Any:
        raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")

    monkeypatch.setattr(worker, "PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(Pool, "grade", breaks)
    run, _ = await add_ungraded(database, FORMAT, outputs=["answer: 1"])
    async with grading(database, redis_url):
        (found,) = await settled(database, run, 1)
    assert (found.total, found.tries) == (None, 3)
    assert (found.reason or "").startswith("format: the grader broke: UnicodeEncodeError: 'utf-8' codec")


async def test_two_graders_grade_each_attempt_once(database: Database, redis_url: str) -> None:
    run, _ = await add_ungraded(database, F1, FORMAT, outputs=['{"answer": "Tower"}'] * 24)
    async with grading(database, redis_url), grading(database, redis_url):
        found = await settled(database, run, 24)
    assert {one.tries for one in found} == {1}
    assert len(await rewards(database, run)) == 48


async def test_settling_after_another_grader_took_the_lease_changes_nothing(database: Database) -> None:
    run, _ = await add_ungraded(database, F1, outputs=["x"])
    async with database.session() as session:
        (late,) = await lease_gradings(session, "late", 5, 30.0)
    async with database.session() as session:
        assert await lease_gradings(session, "other", 5, 30.0) == []
        await session.execute(
            update(tables.Grading).values(lease_expires_at=func.now() - func.make_interval(0, 0, 0, 0, 0, 1))
        )
    async with database.session() as session:
        (lease,) = await lease_gradings(session, "other", 5, 30.0)
        assert (lease.tries, await heartbeat_gradings(session, [late.lease_id], 30.0)) == (2, set())
        assert await settle_gradings(session, [Settled(late, 1.0, None, ())]) == set()
        assert await settle_gradings(session, [Settled(lease, 0.5, None, ())]) == {lease.lease_id}
        assert await settle_gradings(session, [Settled(lease, 0.7, None, ())]) == set()
    assert [one.total for one in await gradings(database, run)] == [0.5]


@pytest.mark.parametrize("is_compared", [False, True])
async def test_an_attempt_that_ends_its_graders_is_failed_after_ten_tries(
    database: Database, *, is_compared: bool
) -> None:
    run, rollouts = await add_ungraded(database, BETTER if is_compared else FORMAT, outputs=["x", "y"])
    deadly, other = [one.id for one in rollouts]

    async def lease() -> dict[str, int]:
        async with database.session() as session:
            groups = await lease_groups(session, "one", 5, 30.0) if is_compared else []
            singles = [] if is_compared else await lease_gradings(session, "one", 5, 30.0)
            suspects = await lease_suspects(session, "one", 5, 30.0)
            leases = [*singles, *(one for group in (*groups, *suspects) for one in group)]
            # The grader gives back one of them in good order before the other one ends it.
            await release_gradings(session, [one.lease_id for one in leases if one.rollout_id == other])
            await session.execute(update(tables.Grading).values(lease_expires_at=LONG_AGO))
            return {one.rollout_id: one.tries for one in leases}

    for tries in range(1, 11):
        assert await lease() == {deadly: tries, other: 1}
    assert await lease() == {other: 1}
    found = {
        one.rollout_id: (one.settled_at is not None, one.total, one.reason) for one in await gradings(database, run)
    }
    reason = "its grader died 10 times while it graded, or lost the store"
    assert found == {deadly: (True, None, reason), other: (False, None, None)}
    assert await rewards(database, run) == []


@pytest.mark.parametrize("is_compared", [False, True])
async def test_suspect_attempts_are_leased_one_by_one(database: Database, *, is_compared: bool) -> None:
    outputs = ["x", "y"] if is_compared else ["x"]
    component = BETTER if is_compared else FORMAT
    runs = [(await add_ungraded(database, component, outputs=outputs))[0].id for _ in range(2)]
    leasing = lease_groups if is_compared else lease_gradings

    async def lease() -> int:
        async with database.session() as session:
            return len(await leasing(session, "one", 5, 30.0))

    async def lease_suspect() -> set[str]:
        async with database.session() as session:
            (leases,) = await lease_suspects(session, "one", 1, 30.0) or [()]
            assert len(leases) in {0, len(outputs)}
            return {one.run_id for one in leases}

    for _ in range(3):
        assert (await lease(), await lease_suspect()) == (2, set())
        async with database.session() as session:
            await session.execute(update(tables.Grading).values(lease_expires_at=LONG_AGO))
    assert await lease() == 0
    assert (await lease_suspect()) | (await lease_suspect()) == set(runs)
    assert await lease_suspect() == set()


@asynccontextmanager
async def deadly_grader(database: Database, redis_url: str) -> AsyncIterator[asyncio.subprocess.Process]:
    names = {"LEYDEN_DATABASE_URL": database.dsn, "LEYDEN_REDIS_URL": redis_url, "GRADER_POLL_SECONDS": "0.1"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.fakes.deadly_grader", env={**os.environ, **names}
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def test_attempts_beside_one_that_kills_its_graders_get_their_numbers(database: Database, redis_url: str) -> None:
    """Each grader starts when the leases of the one before have ended."""
    run, _ = await add_ungraded(database, FORMAT, outputs=[DEADLY, *["answer: 4"] * 7])
    deaths = 0
    while not await is_settled(database, run, 8):
        async with deadly_grader(database, redis_url) as grader:
            dies, ends = asyncio.create_task(grader.wait()), asyncio.create_task(settled(database, run, 8))
            await asyncio.wait({dies, ends}, return_when=asyncio.FIRST_COMPLETED)
            ends.cancel()
        deaths += grader.returncode == -signal.SIGKILL
        async with database.session() as session:
            await session.execute(update(tables.Grading).values(lease_expires_at=LONG_AGO))
    deadly, *others = await gradings(database, run)
    assert (deadly.total, deadly.reason) == (None, "its grader died 10 times while it graded, or lost the store")
    assert deaths == 10
    assert [(one.total, one.tries) for one in others] == [(pytest.approx(0.1), 4)] * 7


async def test_runs_take_turns_at_graders(database: Database) -> None:
    many, _ = await add_ungraded(database, FORMAT, outputs=["answer: x"] * 8)
    few, _ = await add_ungraded(database, FORMAT, outputs=["answer: x"] * 3)

    async def lease(count: int) -> list[str]:
        async with database.session() as session:
            leased = await lease_gradings(session, "one", count, 30.0)
            return sorted("many" if one.run_id == many.id else "few" for one in leased)

    # The older run is first at equal numbers; each has two then.
    assert await lease(1) == ["many"]
    assert await lease(3) == ["few", "few", "many"]
    # A run whose attempts are graded soon gets more of them.
    async with database.session() as session:
        late = update(tables.Grading).where(tables.Grading.run_id == few.id)
        await session.execute(late.values(lease_expires_at=LONG_AGO))
    assert await lease(2) == ["few", "few"]
    # One run's unused turns go to the other.
    assert await lease(9) == ["few", *["many"] * 6]
    assert await lease(9) == []


STRANGE = [{**F1, "grader": {"type": "of another version"}}]


@pytest.mark.parametrize(
    ("config", "reason"),
    [({"reward": {"components": STRANGE}}, "reward.components.0.grader: Input"), ("text", "it is no object but a str")],
)
async def test_a_document_that_does_not_parse_fails_its_own_gradings_alone(
    database: Database, config: object, reason: str
) -> None:
    broken, _ = await add_ungraded(database, F1, outputs=["x", "y"])
    good, _ = await add_ungraded(database, F1, outputs=["x"])
    changed = {**broken.config, **config} if isinstance(config, dict) else config
    async with database.session() as session:
        await session.execute(update(tables.Run).where(tables.Run.id == broken.id).values(config=changed))
    for leased in ([good.id], []):
        async with database.session() as session:
            assert [one.run_id for one in await lease_gradings(session, "one", 5, 30.0)] == leased
    for failed in await settled(database, broken, 2):
        assert (failed.total, failed.tries) == (None, 1)
        assert str(failed.reason).startswith(f"the stored document does not parse: {reason}")


async def killed_at(
    point: str, injector: FaultInjector, database: Database, redis_url: str, **environment: str
) -> None:
    """A grader that dies at the point."""
    injector.arm(point)
    names = {"LEYDEN_DATABASE_URL": database.dsn, "LEYDEN_REDIS_URL": redis_url, "GRADER_LEASE_SECONDS": "1"}
    names |= {**environment, **injector.environment}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "leyden.services.grader", env={**os.environ, **names}
    )
    assert await process.wait() == -signal.SIGKILL
    assert injector.fired(point, 0.0)


@pytest.mark.parametrize("point", ["grader.leased", "grader.graded", "grader.total_written", "grader.settled"])
async def test_a_killed_grader_repeats_and_doubles_nothing(
    database: Database, redis_url: str, tmp_path: Path, point: str
) -> None:
    run, _ = await add_ungraded(database, F1, FORMAT, outputs=['{"answer": "Tower"}', '{"answer": "Eiffel"}', "no"])
    await killed_at(point, FaultInjector(tmp_path / "faults"), database, redis_url)
    async with grading(database, redis_url):
        found = await settled(database, run, 3)
    assert [one.total for one in found] == [pytest.approx(0.9 * 2 / 3), pytest.approx(0.9 * 2 / 3), 0.0]
    assert len(await rewards(database, run)) == 6


async def test_a_grader_paused_inside_a_transaction_does_not_hold_its_attempts(
    database: Database, redis_url: str
) -> None:
    names = {"LEYDEN_DATABASE_URL": database.dsn, "LEYDEN_REDIS_URL": redis_url, "GRADER_LEASE_SECONDS": "3"}
    late = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "leyden.services.grader", env={**os.environ, **names}
    )
    try:
        async with database.session() as session:
            # The grader has graded its attempt and waits for the rows of the components.
            await session.execute(text("LOCK TABLE rollout_rewards IN SHARE MODE"))
            run, _ = await add_ungraded(database, FORMAT, outputs=["answer: 4"])
            await eventually(lambda: waits_for_a_table(database), "a grader that writes", 60.0)
            late.send_signal(signal.SIGSTOP)
        async with grading(database, redis_url):
            await settled(database, run, 1)
        late.send_signal(signal.SIGCONT)
        other, _ = await add_ungraded(database, FORMAT, outputs=["no"])
        assert [one.total for one in await settled(database, other, 1)] == [0.0]
        assert [(one.total, one.tries) for one in await gradings(database, run)] == [(0.1, 2)]
        assert len(await rewards(database, run)) == 1
        late.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert await late.wait() == 0
    finally:
        if late.returncode is None:
            late.kill()
            await late.wait()


@pytest.mark.parametrize("missing", ["renormalise", "zero", "exclude"])
@pytest.mark.parametrize("total", ["weighted_sum", "weighted_mean"])
async def test_means_gates_and_clips_are_the_totals_that_the_invariants_compute(
    database: Database, redis_url: str, missing: str, total: str
) -> None:
    gate = {"name": "brief", "weight": 0.0, "gate": {"at_least": 1.0}, "grader": {"type": "length", "at_most": 9}}
    outputs = ['{"answer": "Eiffel"}', 9 * "a " + '\n{"answer": "Eiffel"}', "aa", '{"answer": 5}']
    rest = {"missing": missing, "total": total, "clip": [0.05, 0.5]}
    run, rollouts = await add_ungraded(database, F1, FORMAT, QUALITY, gate, outputs=outputs, **rest)
    async with database.session() as session:
        for place in (0, 1, 3):
            named = {"rollout_id": rollouts[place].id, "attempt": 1, "run_id": run.id, "component": "quality"}
            session.add(tables.Feedback(**named, key="1", value=0.0))
    async with grading(database, redis_url):
        found = await settled(database, run, len(outputs))
    ended = {"state": "finished", "attempt": 1, "reason": "succeeded", "finished_at": func.now()}
    async with database.session() as session:
        for rollout, one in zip(rollouts, found, strict=True):
            if one.total is not None:
                await session.execute(
                    update(tables.Rollout).where(tables.Rollout.id == rollout.id).values(reward=one.total, **ended)
                )
    assert any(one.total == 0.05 for one in found)
    broken = await asyncio.to_thread(violations, database.dsn, run.id)
    assert "rewards that are not the settled total of their components" not in broken
