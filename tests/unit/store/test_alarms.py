"""Each rule of the table of alarms by rows in Postgres, and a healthy run that raises none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import update

from leyden.libs.contracts.alarms import ALARM_RULES
from leyden.libs.contracts.call_counts import CallCounts
from leyden.libs.contracts.states import EngineState
from leyden.libs.contracts.untrainable import of_frozen_policy
from leyden.libs.store import tables
from leyden.libs.store.alarms.attempts import judge_attempts
from leyden.libs.store.alarms.judging import judge_run, runs_to_judge
from leyden.libs.store.alarms.listing import list_alarms
from leyden.libs.store.alarms.progress import judge_groups
from leyden.libs.store.alarms.stored import runs_by_alarm
from leyden.libs.store.database import Database
from leyden.libs.store.engines import (
    Assignment,
    EngineStatus,
    Pool,
    forget_other_engines,
    write_assignments,
    write_engines,
    write_pools,
)
from leyden.libs.store.read import results, runs
from tests.support import builders
from tests.support.alarms import add_alarm, alarm_lines, alarms

BEGIN = datetime.now(tz=UTC) - timedelta(hours=2)
HEALTHY: Mapping[str, float] = {
    "trainable_tokens": 900,
    "entropy": 1.1,
    "kl_reference": 0.02,
    "gradient_norm": 0.7,
    "logprob_gap_tokens": 800,
    "logprob_gap_mean": 0.01,
}


def attempt(**changes: Any) -> dict[str, Any]:
    good = {
        "kind": "succeeded",
        "detail": None,
        "stderr": "",
        "reason": "succeeded",
        "calls": 2,
        "overflows": 0,
        "unfinished": 0,
        "training": changes.get("calls", 2),
        "untrainable": 0,
        "untrainable_reason": None,
    }
    return {**good, **changes}


def judged(attempts: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(one.name, one.reason) for one in judge_attempts(attempts)]


CRASH = {"kind": "agent_error", "reason": "agent_error", "detail": "the agent exited with code 1"}


@pytest.mark.parametrize(
    ("changes", "name", "reason"),
    [
        (
            {**CRASH, "stderr": "Traceback\nModuleNotFoundError: No module named 'x'\n\n"},
            "agents_fail",
            "6 of the last 10 attempts ended as agent_error: the agent exited with code 1: "
            "ModuleNotFoundError: No module named 'x'",
        ),
        (
            {"kind": "infra_error", "detail": "agent.directory /etc lies in no folder", "reason": None, "calls": 0},
            "platform_fails",
            "6 of the last 10 attempts ended as infra_error: agent.directory /etc lies in no folder",
        ),
        ({"reason": "no_reward"}, "no_reward", "6 of the last 10 attempts gave no reward"),
        (
            {"calls": 3, "overflows": 1},
            "context_overflows",
            "6 of the last 10 attempts sent messages beyond the model's context, in 6 of the 26 model calls of all",
        ),
        ({"calls": 0}, "no_model_call", "6 of the last 10 attempts made no model call"),
        (
            {"untrainable": 2, "untrainable_reason": "sampled with top_k"},
            "untrainable_calls",
            "12 of the last 20 model calls do not train: sampled with top_k",
        ),
    ],
)
def test_many_attempts_that_end_alike_raise_an_alarm(changes: dict[str, Any], name: str, reason: str) -> None:
    others = [attempt() for _ in range(4)]
    assert judged([attempt(**changes)] * 6 + others) == [(name, reason)]
    limit = int(6 / ALARM_RULES[name].limit)
    assert judged([attempt(**changes)] * 6 + [attempt()] * (limit - 6)) == []
    assert judged([attempt(**changes)] * 3) == []


def test_calls_without_a_complete_answer_raise_an_alarm_unless_the_platform_cut_them_off() -> None:
    mostly = [attempt(calls=10) for _ in range(20)]
    assert judged([*mostly, attempt(calls=20, unfinished=12)]) == [
        ("calls_fail", "12 of the last 220 model calls have no complete answer")
    ]
    assert judged([*mostly, attempt(calls=20, unfinished=11)]) == []
    assert judged([*mostly, attempt(kind="infra_error", calls=20, unfinished=20)]) == []


def test_numbers_do_not_make_a_failure_another_one() -> None:
    times = [attempt(kind="timeout", detail=f"stopped after {seconds} s") for seconds in range(300, 308)]
    assert judged(times) == [("agents_fail", "8 of the last 8 attempts ended as timeout: stopped after 300 s")]


class Made:
    """A run whose steps are written one after another, ten seconds apart."""

    def __init__(self, database: Database, run: tables.Run) -> None:
        self.database, self.run, self.made = database, run, 0

    async def steps(self, count: int, *, calls: dict[str, Any] | None = None, **columns: Any) -> None:
        """Steps of one group each. Args: columns: metrics, and of the group reward_mean and has_variance"""
        credit = {name: columns.pop(name) for name in ("reward_mean", "has_variance") if name in columns}
        async with self.database.session() as session:
            for _ in range(count):
                number = self.made = self.made + 1
                group = tables.Group(
                    id=f"{self.run.id}.{number}", run_id=self.run.id, number=number, dataset_id=self.run.dataset_id,
                    task_number=0, size=2, admitted_version=0,
                )  # fmt: skip
                at = BEGIN + timedelta(seconds=10 * number)
                step = {"metrics": {**HEALTHY, **columns}, "checkpoint": "c", "started_at": at, "created_at": at}
                session.add_all([group, tables.Step(run_id=self.run.id, number=number, **step)])
                await session.flush()
                credited: dict[str, Any] = {
                    "group_id": group.id,
                    "run_id": self.run.id,
                    "verdict": "credited",
                    "credit_version": 1,
                    "counted_siblings": 2,
                    "has_variance": True,
                    "min_policy_version": 0,
                    "reward_mean": 0.5 + (number % 3) / 100 + number / 1000,
                    "reward_std": 0.5,
                    "created_at": at,
                    "calls": {"calls": 8, "cut": 1, "tools": {"sql": {"ok": 7, "error": 1}}}
                    if calls is None
                    else calls,
                }
                session.add(tables.GroupCredit(**{**credited, **credit}))
                session.add(tables.StepGroup(group_id=group.id, run_id=self.run.id, step=number, verdict="trained"))

    async def names(self) -> list[str]:
        """The alarms now. The last step was made long ago, which is another test's matter."""
        async with self.database.session() as session:
            await session.execute(update(tables.RunStatus).values(updated_at=datetime.now(tz=UTC)))
        return list(await alarms(self.database, self.run.id))


@pytest.fixture
async def made(database: Database) -> Made:
    document = builders.run_document(training={"steps": 500})
    return Made(database, await builders.add_run(database, config=document))


async def test_a_healthy_run_raises_no_alarm_at_any_step(made: Made) -> None:
    for _ in range(80):
        await made.steps(1)
        assert await made.names() == []


@pytest.mark.parametrize(
    ("name", "begin", "trouble", "steps"),
    [
        ("entropy_collapse", 9, {"entropy": 0.2}, 5),
        ("kl_high", 5, {"kl_reference": 1.2}, 5),
        ("gradient_jump", 10, {"gradient_norm": 7.5}, 3),
        ("gap_near_limit", 5, {"logprob_gap_mean": 0.06}, 3),
        ("not_compared", 5, {"logprob_gap_tokens": 0}, 1),
        ("not_published", 5, {"publication_failed": 1.0}, 1),
        ("nothing_trains", 5, {"trainable_tokens": 0}, 1),
        ("answers_cut", 5, {"calls": {"calls": 8, "cut": 3}}, 3),
        ("tool_fails sql", 0, {"calls": {"calls": 8, "tools": {"sql": {"error": 6, "ok": 2}}}}, 4),
        ("groups_without_variance", 0, {"has_variance": False}, 4),
        ("groups_without_variance", 10, {"has_variance": False}, 10),
        ("reward_flat", 0, {"reward_mean": 0.4}, 60),
    ],
)
async def test_each_rule_raises_its_alarm_alone_and_ends_it(
    made: Made, name: str, begin: int, trouble: dict[str, Any], steps: int
) -> None:
    await made.steps(begin)
    assert await made.names() == []
    await made.steps(steps - 1, **trouble)
    assert name not in await made.names()
    await made.steps(1, **trouble)
    assert await made.names() == [name]
    alarm = (await alarms(made.database, made.run.id))[name]
    rule = ALARM_RULES[alarm.name]
    assert (alarm.severity, alarm.ended_at, bool(alarm.evidence)) == (rule.severity, None, True)
    assert alarm.reason and alarm.remedy
    await made.steps(70, reward_mean=0.9)
    assert await made.names() == []


async def test_steps_that_computed_no_token_are_no_collapse_of_entropy(made: Made) -> None:
    await made.steps(9)
    await made.steps(8, entropy=0.0, computed_tokens=0)
    assert await made.names() == []


async def test_a_tool_whose_texts_show_no_status_is_an_alarm_where_it_has_a_reward(database: Database) -> None:
    air = {"weights": {"search": 0.2, "sql": 0.2}}
    document = builders.run_document(training={"steps": 500}, credit={"air": air})
    made = Made(database, await builders.add_run(database, config=document))
    tools = {"search": {"ok": 1, "bare": 5}, "sql": {"ok": 5, "bare": 1}, "other": {"bare": 9}}
    await made.steps(3, calls={"calls": 20, "tools": tools})
    assert await made.names() == []
    await made.steps(1, calls={"calls": 20, "tools": tools})
    assert await alarm_lines(database, made.run.id) == [
        "tool search has an intermediate reward, and 20 of its 24 results of the last 4 steps are texts that show"
        " neither a success nor a failure: say by credit.air.failures what a failure of this tool is (an empty list:"
        " none is), or send its spans"
    ]
    await made.steps(70)
    assert await made.names() == []


async def test_a_run_stalls_after_three_times_its_usual_pause(made: Made) -> None:
    await made.steps(6)
    changed = update(tables.RunStatus).where(tables.RunStatus.run_id == made.run.id)
    for seconds, found in ((50, []), (70, ["stalled"])):
        async with made.database.session() as session:
            await session.execute(changed.values(updated_at=datetime.now(tz=UTC) - timedelta(seconds=seconds)))
        assert list(await alarms(made.database, made.run.id)) == found
    alarm = (await alarms(made.database, made.run.id))["stalled"]
    assert alarm.severity == "critical" and alarm.evidence["median_seconds"] == 10
    async with made.database.session() as session:
        await session.execute(changed.values(phase="evaluating"))
    assert list(await alarms(made.database, made.run.id)) == []


async def _wait(made: Made, phase: str, reason: str | None, *, minutes: float = 20) -> None:
    """Puts the run into a phase that began so long ago."""
    at = datetime.now(tz=UTC) - timedelta(minutes=minutes)
    async with made.database.session() as session:
        await session.execute(update(tables.RunStatus).values(phase=phase, reason=reason, updated_at=at))


@pytest.mark.parametrize(
    ("phase", "steps", "reason"),
    [
        ("running", 0, "no engine serves: http://e: ConnectError (since 21:04)"),
        ("running", 0, "the trainer waits: Unschedulable: 0/3 nodes are available"),
        ("evaluating", 5, "no engine serves: http://e: refused version 5"),
    ],
)
async def test_a_run_of_which_nothing_moves_is_an_alarm_with_the_controllers_reason(
    made: Made, phase: str, steps: int, reason: str
) -> None:
    await made.steps(steps)
    await _wait(made, phase, reason, minutes=10)
    assert await alarms(made.database, made.run.id) == {}
    await _wait(made, phase, reason)
    [alarm] = (await alarms(made.database, made.run.id)).values()
    assert alarm.name == "no_progress"
    assert re.fullmatch(rf"nothing of the run has moved for 12\d\d s: {re.escape(reason)}", alarm.reason)
    await builders.add_policy_version(made.database, made.run, 0)
    assert await alarms(made.database, made.run.id) == {}


async def test_a_reason_of_a_moment_does_not_explain_a_long_step(made: Made) -> None:
    await _wait(made, "running", "no engine serves: http://e: ReadTimeout")
    for minutes, names in ((1, []), (16, ["no_progress"])):
        since = datetime.now(tz=UTC) - timedelta(minutes=minutes)
        async with made.database.session() as session:
            await session.execute(update(tables.RunStatus).values(reason_since=since))
        assert list(await alarms(made.database, made.run.id)) == names


@pytest.mark.parametrize(
    ("phase", "reason"),
    [
        ("paused", None),
        ("paused", "waiting for an engine of pool default: run-a has them"),
        # A long step of the trainer.
        ("running", None),
        ("completed", "the reward did not rise"),
    ],
)
async def test_a_run_that_waits_by_design_makes_no_alarm(made: Made, phase: str, reason: str | None) -> None:
    await _wait(made, phase, reason)
    assert await alarms(made.database, made.run.id) == {}


async def test_rollouts_that_no_runner_takes_are_an_alarm_while_runners_do_nothing(made: Made) -> None:
    _, [one, _] = await builders.add_group(made.database, made.run)
    await _wait(made, "running", None)
    [alarm] = (await alarms(made.database, made.run.id)).values()
    assert alarm.reason.endswith("no runner takes any of its 2 rollouts")
    # External agents take work of their own kind alone.
    external = builders.run_document(runner={"type": "external"}, agent={})
    _, [with_people, _] = await builders.add_group(
        made.database, await builders.add_run(made.database, config=external)
    )
    await builders.add_attempt(made.database, with_people)
    assert "no_progress" in await alarms(made.database, made.run.id)
    # Those of another run come first.
    busy = await builders.add_run(made.database)
    _, [theirs, _] = await builders.add_group(made.database, busy)
    await builders.add_attempt(made.database, theirs)
    assert await alarms(made.database, made.run.id) == {}
    await builders.end_attempt(made.database, theirs.id)
    async with made.database.session() as session:
        # It waits for its grade, as one that people rate.
        await session.execute(update(tables.Rollout).where(tables.Rollout.id == one.id).values(grading_attempt=1))
    await builders.add_attempt(made.database, one, state="settled")
    await _wait(made, "running", "waiting for people: 0 of 2 rollouts have it")
    assert "no_progress" not in await alarms(made.database, made.run.id)


async def test_rollouts_of_external_agents_wait_for_their_programs(database: Database) -> None:
    run = await builders.add_run(database, config=builders.run_document(runner={"type": "external"}, agent={}))
    await builders.add_group(database, run)
    await _wait(Made(database, run), "running", None)
    assert await alarms(database, run.id) == {}


@pytest.mark.parametrize("adapter", [False, True])
async def test_an_engine_that_keeps_an_older_version_is_an_alarm(made: Made, adapter: bool) -> None:
    await made.steps(6)
    for version, at in (*((version, BEGIN) for version in range(6)), (6, datetime.now(tz=UTC) - timedelta(seconds=90))):
        await builders.add_policy_version(made.database, made.run, version, created_at=at)
    async with made.database.session() as session:
        await session.execute(update(tables.RunStatus).values(updated_at=BEGIN))
        owner = {} if adapter else {"run_id": made.run.id, "policy_version": 5}
        session.add(tables.Engine(url="http://old", state="serving", detail="refuses", **owner))
        session.add(tables.Engine(url="http://new", run_id=made.run.id, policy_version=6, state="serving"))
        await session.flush()
        if adapter:
            session.add(tables.EngineAdapter(url="http://old", run_id=made.run.id, policy_version=5))
    found = await alarms(made.database, made.run.id)
    assert list(found) == ["stalled", "engines_stale http://old"]
    assert found["engines_stale http://old"].reason.startswith("engine http://old still serves version 5, 9")


async def test_an_engine_that_serves_nothing_for_long_is_an_alarm(made: Made) -> None:
    await made.steps(6)
    serves, loads, away = (
        EngineStatus("http://new", EngineState.SERVING, made.run.id, 6),
        EngineStatus("http://old", EngineState.UPDATING, detail="loading 6"),
        EngineStatus("http://old", EngineState.UNREACHABLE, detail="ReadTimeout (2 tries)"),
    )
    async with made.database.session() as session:
        await session.execute(update(tables.RunStatus).values(updated_at=BEGIN))
        await write_pools(session, [Pool("default")])
        await write_assignments(session, {"default": Assignment((made.run.id,))})
        await write_engines(session, [serves, loads])
    silent = "engines_stale http://old"
    assert silent not in await alarms(made.database, made.run.id)
    async with made.database.session() as session:
        earlier = tables.Engine.silent_since - timedelta(seconds=90)
        await session.execute(update(tables.Engine).values(silent_since=earlier))
        # Each further failure is another status of the same silence.
        await write_engines(session, [away])
    alarm = (await alarms(made.database, made.run.id))[silent]
    assert alarm.reason.startswith("engine http://old has served no weights for 9")
    assert alarm.reason.endswith(" s: ReadTimeout (2 tries)")
    async with made.database.session() as session:
        await write_engines(session, [EngineStatus("http://old", EngineState.SERVING, made.run.id, 6)])
    assert silent not in await alarms(made.database, made.run.id)


async def test_a_pool_in_which_nothing_embeds_is_an_alarm_of_the_runs_that_name_it(database: Database) -> None:
    run = await builders.add_run(database, config=builders.run_document(embeddings={"pool": "e"}))
    other = await builders.add_run(database)
    away = EngineStatus("http://e", EngineState.UNREACHABLE, detail="its model samples text and makes no embeddings")

    async def reasons() -> list[str]:
        assert await alarms(database, other.id) == {}
        return [alarm.reason for alarm in (await alarms(database, run.id)).values()]

    async def pass_a_minute() -> None:
        earlier = timedelta(seconds=61)
        async with database.session() as session:
            await session.execute(update(tables.RunStatus).values(updated_at=tables.RunStatus.updated_at - earlier))
            await session.execute(update(tables.Engine).values(silent_since=tables.Engine.silent_since - earlier))
            await session.execute(update(tables.Pool).values(updated_at=tables.Pool.updated_at - earlier))

    assert await reasons() == []
    await pass_a_minute()
    assert await reasons() == ["no pool 'e' embeds"]
    async with database.session() as session:
        await write_pools(session, [Pool("default"), Pool("e", embeddings=True)])
    assert await reasons() == []
    await pass_a_minute()
    assert await reasons() == ["pool 'e' has no engine"]
    async with database.session() as session:
        await write_engines(session, [away], "e")
    assert await reasons() == []
    await pass_a_minute()
    [reason] = await reasons()
    assert re.fullmatch(rf"no engine of pool 'e' has embedded for \d+ s: http://e: {away.detail}", reason)
    async with database.session() as session:
        await write_engines(session, [EngineStatus("http://other", EngineState.SERVING)], "e")
    assert await reasons() == []
    async with database.session() as session:
        await forget_other_engines(session, [], "e")
    assert await reasons() == []


async def test_groups_that_the_trainer_refuses_are_an_alarm(made: Made) -> None:
    await made.steps(30)
    for number in range(100, 104):
        assert await made.names() == []
        group, _ = await builders.add_group(made.database, made.run, number)
        async with made.database.session() as session:
            session.add(tables.StepGroup(group_id=group.id, run_id=made.run.id, verdict="stale"))
    [alarm] = (await alarms(made.database, made.run.id)).values()
    assert (alarm.name, alarm.evidence["stale"]) == ("stale_groups", 4)


async def test_groups_that_credit_excludes_are_an_alarm_from_the_first(made: Made) -> None:
    group, _ = await builders.add_group(made.database, made.run, 100)
    credit = {"verdict": "excluded", "reason": "more than 3 records", "min_policy_version": None}
    await builders.add_credited_group(made.database, group, **credit)
    [alarm] = (await alarms(made.database, made.run.id)).values()
    assert (alarm.name, alarm.evidence["share"]) == ("groups_excluded", 1.0)
    assert alarm.reason == "credit excluded 1 of the last 1 groups; the last: more than 3 records"
    await made.steps(20)
    assert await made.names() == []


async def test_equal_rewards_of_0_are_told_from_others(made: Made) -> None:
    await made.steps(4, has_variance=False, reward_mean=0.0)
    [line] = await alarm_lines(made.database, made.run.id)
    assert line.startswith(
        "in each of the last 4 groups all rewards are equal: there is nothing to learn from them; they"
    )
    assert line.endswith(
        "they are all 0: the tasks are too hard or the agent fails; read one with `leyden rollout show`"
    )


def test_rewards_that_a_large_min_spread_makes_equal_are_not_called_equal() -> None:
    [near] = judge_groups([(False, 0.5, 0.2)] * 3 + [(False, 0.5, 0.0)], min_spread=1.0)
    assert near.reason == (
        "in each of the last 4 groups no rewards differ by more than credit.baseline.min_spread (1):"
        " none of them teaches"
    )
    assert near.remedy.endswith("the rewards of 3 of these groups differ by less") and near.evidence["near"] == 3
    [equal] = judge_groups([(False, 0.5, 0.0)] * 4, min_spread=1.0)
    assert "all rewards are equal" in equal.reason


async def test_groups_that_cannot_train_and_demonstrations_do_not_have_equal_rewards(
    database: Database,
) -> None:
    for changes, trainable in (({}, False), ({"algorithm": {"type": "sft"}}, True)):
        run = await builders.add_run(database, config=builders.run_document(**changes))
        for number in range(4):
            group, _ = await builders.add_group(database, run, number)
            version = 0 if trainable else None
            await builders.add_credited_group(database, group, has_variance=False, min_policy_version=version)
        assert await alarms(database, run.id) == {}


async def test_an_alarm_is_raised_once_kept_up_to_date_and_ends_after_a_quiet_time(made: Made) -> None:
    await made.steps(4, kl_reference=2.0)
    assert await made.names() == []
    await made.steps(1, kl_reference=2.0)
    first = (await alarms(made.database, made.run.id))["kl_high"]
    await made.steps(1, kl_reference=3.0)
    second = (await alarms(made.database, made.run.id))["kl_high"]
    assert (second.number, second.since) == (first.number, first.since) == (1, first.since)
    assert (first.evidence["kl"], second.evidence["kl"]) == (2.0, 2.2)
    await made.steps(5)
    async with made.database.session() as session:
        assert (await judge_run(session, made.run.id, 60.0)).ended == []
    assert await made.names() == []
    await made.steps(5, kl_reference=2.0)
    await made.names()
    async with made.database.read() as session:
        listed = (await list_alarms(session, policy_id=made.run.id, cursor=None, limit=9)).items
    assert [(one.number, one.ended_at is None) for one in listed] == [(2, True), (1, False)]


async def test_alarms_stay_with_a_run_that_has_ended_and_leave_the_metric(made: Made) -> None:
    await made.steps(5, kl_reference=2.0)
    assert await made.names() == ["kl_high"]
    async with made.database.read() as session:
        assert await runs_by_alarm(session) == {("kl_high", "warning"): 1}
    await builders.end_run(made.database, made.run)
    async with made.database.read() as session:
        assert await runs_to_judge(session) == [made.run.id]
    for ended_as in ("completed", None):
        async with made.database.session() as session:
            assert (await judge_run(session, made.run.id)).ended_as == ended_as
    async with made.database.read() as session:
        assert await runs_to_judge(session) == []
        assert await runs_by_alarm(session) == {}
        assert [one.name for one in (await runs.get_run(session, made.run.id)).alarms] == ["kl_high"]
        listed = (await runs.list_runs(session, name=None, phase=None, cursor=None, limit=9)).items
        assert [one.name for one in listed[0].alarms] == ["kl_high"]


async def test_a_run_with_the_same_alarm_for_several_policies_counts_once(made: Made) -> None:
    checker = await builders.add_run(
        made.database, dataset_id=made.run.dataset_id, lead_run_id=made.run.id, policy="checker"
    )
    for run_id in (made.run.id, checker.id):
        await add_alarm(made.database, run_id, "kl_high")
    async with made.database.read() as session:
        assert await runs_by_alarm(session) == {("kl_high", "warning"): 1}


async def test_a_run_carries_the_alarms_of_its_attempts(database: Database) -> None:
    run = await builders.add_run(database)
    _, rollouts = await builders.add_group(database, run, size=4)
    for rollout in rollouts:
        await builders.finish_rollout(
            database, rollout, reward=None, kind="agent_error", detail="exit code 1", stderr_tail="ImportError: no y\n"
        )
        await builders.add_call(database, rollout, trainable=False, untrainable_reason="sampled with top_k")
    assert await alarm_lines(database, run.id) == [
        "4 of the last 4 attempts ended as agent_error: exit code 1: ImportError: no y: read the output of one with"
        " `leyden rollout show`, and mend the agent or its time-out",
        "4 of the last 4 model calls do not train: sampled with top_k: let the agent leave out these parameters; a"
        " temperature must be above 0, best 1 (or write `sampling.override`: training then samples without them)",
    ]


async def test_calls_that_the_document_gives_to_a_frozen_policy_raise_no_alarm(database: Database) -> None:
    run = await builders.add_run(database)
    _, rollouts = await builders.add_group(database, run, size=4)
    for rollout in rollouts:
        await builders.finish_rollout(database, rollout, reward=1.0)
        reasons = {"trainable": False, "untrainable_reason": of_frozen_policy("writer")}
        for _ in range(3):
            await builders.add_call(database, rollout, **reasons)
        await builders.add_call(database, rollout)
    assert await alarm_lines(database, run.id) == []
    await builders.add_call(database, rollouts[0], trainable=False, untrainable_reason="sampled with top_k")
    assert await alarm_lines(database, run.id) == []


async def test_calls_of_an_evaluation_raise_no_alarm_though_they_sample_as_the_agent_asks(database: Database) -> None:
    run = await builders.add_run(database)
    evaluation = f"{run.id}.e1"
    async with database.session() as session:
        session.add(
            tables.Evaluation(
                id=evaluation, run_id=run.id, number=1, dataset_id=run.dataset_id, rollouts_per_task=1, max_tasks=None
            )
        )
    _, rollouts = await builders.add_group(database, run, size=6, evaluation_id=evaluation)
    for rollout in rollouts:
        await builders.finish_rollout(database, rollout, reward=1.0)
        await builders.add_call(database, rollout, trainable=False, untrainable_reason="sampled with temperature")
    assert await alarm_lines(database, run.id) == []


async def test_a_step_without_a_token_that_can_be_trained_says_why(database: Database) -> None:
    run = await builders.add_run(database)
    group, _ = await builders.add_group(database, run, size=2)
    counts = {"calls": 3, "untrainable": {"role checker does not train": 3}}
    await builders.add_credited_group(database, group, has_variance=False, min_policy_version=None, calls=counts)
    async with database.session() as session:
        row = {"metrics": {"trainable_tokens": 0}, "checkpoint": "c", "started_at": datetime.now(tz=UTC)}
        session.add(tables.Step(run_id=run.id, number=1, **row))
        await session.flush()
        session.add(tables.StepGroup(group_id=group.id, run_id=run.id, step=1, verdict="untrainable"))
    assert await alarm_lines(database, run.id) == [
        "step 1 had no token that can be trained: of 3 model calls 3 role checker does not train: name their role in"
        " `train`, or mend the conditions of `roles` (`leyden run agents`)"
    ]
    async with database.read() as session:
        found = await runs.get_run(session, run.id)
        step = (await results.list_steps(session, run.id, cursor=None, limit=1)).items[0]
    assert (found.calls, step.calls) == (CallCounts(**counts), CallCounts(**counts))
    assert step.groups == {"untrainable": 1}


async def test_a_tool_that_fails_in_most_calls_is_an_alarm_and_a_series(made: Made) -> None:
    tools = {"sql": {"ok": 2, "error": 8, "unset": 5}, "search": {"ok": 5, "error": 5}, "rare": {"error": 9}}
    # Its framework marks failures, and sends results as they are.
    tools["marked"] = {"error": 20, "bare": 60}
    for number in range(1, 5):
        assert await made.names() == []
        await made.steps(1, calls={"calls": 12, "tools": tools if number == 1 else {"sql": {"error": 1, "ok": 1}}})
    assert await alarm_lines(made.database, made.run.id) == [
        "tool sql failed in 11 of the 16 calls of the last 4 steps whose end is known: read one with `leyden rollout"
        " show`, or say by credit.air.failures what a failure of this tool is"
    ]
    async with made.database.read() as session:
        metrics = await results.get_metrics(session, made.run.id, ["tool.sql.failed_share", "tool.sql.calls"])
    assert {one.name: [point[2] for point in one.points] for one in metrics.series} == {
        "tool.sql.failed_share": [0.8, 0.5, 0.5, 0.5],
        "tool.sql.calls": [15.0, 2.0, 2.0, 2.0],
    }
