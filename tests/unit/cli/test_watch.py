"""The live table of a run, and the small parts of the supervisor."""

from __future__ import annotations

import io
import re
import socket
import time
from collections.abc import Generator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from rich.console import Console

from leyden.libs.cli.local.platform import rotate_log
from leyden.libs.cli.local.record import PlatformRecord, Process, ServiceRecord, read_record, write_record
from leyden.libs.cli.local.services import PORTS, SERVICES, STOP_ORDER, Listeners, open_listeners
from leyden.libs.cli.view import watch
from leyden.libs.cli.view.alarms import Alarms, alarm_news
from leyden.libs.cli.view.watch import agent_table, line, step_table, summary
from leyden.libs.client import Client, Unreachable
from leyden.libs.client.transport import Transport
from leyden.libs.contracts.api.alarms import Alarm
from leyden.libs.contracts.api.runs import AgentProgress, Evaluation, NextStep, Progress, Run, RunPolicy, Step
from leyden.libs.contracts.call_counts import CallCounts
from leyden.libs.contracts.config import RunConfig
from tests.support.builders import run_document

NOW = datetime(2026, 1, 2, tzinfo=UTC)


def step(number: int, reward: float | None, facts: dict[str, float], **metrics: float | None) -> Step:
    return Step(
        number=number,
        metrics=metrics,
        groups={"trained": 1},
        rollouts=2,
        reward_mean=reward,
        reward_std=None if reward is None else 0.125,
        facts=facts,
        started_at=NOW,
        created_at=NOW,
    )


def shown(table: object) -> list[list[str]]:
    output = Console(file=io.StringIO(), width=200)
    output.print(table)
    assert isinstance(output.file, io.StringIO)
    return [row.split("  ") for row in output.file.getvalue().splitlines()]


def test_steps_are_rows_with_reward_shares_loss_entropy_kl_tokens_and_seconds() -> None:
    trained = {"loss": -0.01234, "entropy": 0.5, "kl_reference": 0.002, "trained_tokens": 1234, "step_seconds": 2.06}
    first = step(1, 0.25, {"memory_first": 0.5, "calls": 2.5}, **trained, forward_seconds=1.0)
    second = step(2, None, {"memory_first": 1.0}, kl_reference=None)
    head, one, two = [[cell.strip() for cell in row if cell.strip()] for row in shown(step_table([first, second]))]
    assert head == ["step", "reward", "±", "memory first", "calls", "loss", "entropy", "KL", "tokens", "seconds"]
    assert one == ["1", "0.250", "0.125", "50%", "2.50", "-0.0123", "0.5", "0.002", "1,234", "2.1"]
    assert two == ["2", "–", "–", "100%", "–", "–", "–", "–", "–", "–"]
    said = "step 1: reward 0.250 ± 0.125, memory_first 50%, calls 2.50, loss -0.0123, entropy 0.5, KL 0.002"
    assert line(first) == f"{said}, tokens 1,234, seconds 2.1"


def test_a_run_tells_of_its_next_step_and_the_time_left_where_they_are_known() -> None:
    next_step = NextStep(number=3, rollouts=16, ended=12, graded=10, credited=8)
    progress = ended("run-a").progress.model_copy(update={"next_step": next_step, "seconds_left": 7300.0})
    run = ended("run-a").model_copy(update={"progress": progress})
    lines = summary(run).plain.splitlines()
    assert lines[1:] == ["step 3: of 16 rollouts 12 ended, 10 graded, 8 credited, about 2 h left"]
    assert len(summary(ended("run-a")).plain.splitlines()) == 1


def test_an_agent_without_a_step_has_no_mean_reward() -> None:
    agents = {
        "plain": AgentProgress(step=3, rollouts=8, reward_mean=0.5),
        "idle": AgentProgress(step=None, rollouts=0, reward_mean=None),
    }
    run = ended("run-a").model_copy(update={"agents": agents})
    _, one, other = [[cell.strip() for cell in row if cell.strip()] for row in shown(agent_table(run))]
    assert (one[:3], one[3][:3]) == (["plain", "3", "8"], "0.5")
    assert other == ["idle", "–", "0", "–"]


class SlowApi:
    """A client whose API fails `failures` times before each run's answer."""

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def changes(self, run_id: str) -> Generator[tuple[str, ...], None, None]:
        yield from ()

    def run(self, run_id: str) -> Run:
        self.failures -= 1
        if self.failures >= 0:
            raise Unreachable("no answer from http://api: timed out")
        return ended(run_id)

    def steps(self, run_id: str) -> list[Step]:
        return [step(1, 0.5, {})]

    def evaluations(self, run_id: str) -> list[Evaluation]:
        return []


def ended(run_id: str) -> Run:
    return Run(
        id=run_id,
        name="slow",
        dataset_id="d",
        intent="running",
        phase="completed",
        reason=None,
        created_at=NOW,
        started_at=NOW,
        finished_at=NOW,
        progress=Progress(step=1, steps=1, policy_version=1, rollouts={}, reward_mean=None),
        allowed_actions=[],
        config=RunConfig.model_validate(run_document()),
    )


def test_a_watch_survives_an_api_that_does_not_answer_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "OUTAGE_PAUSE_SECONDS", 0.0)
    output = Console(file=io.StringIO(), width=200)
    assert watch.watch_run(cast(Client, SlowApi(3)), "run-a", output).phase == "completed"
    assert isinstance(output.file, io.StringIO)
    assert output.file.getvalue().count("waiting for the API: no answer from http://api: timed out") == 3
    monkeypatch.setattr(watch, "OUTAGE_SECONDS", -1.0)
    with pytest.raises(Unreachable):
        watch.watch_run(cast(Client, SlowApi(1)), "run-a", output)


def test_a_watch_that_writes_lines_tells_once_that_an_alarm_began_and_once_that_it_ended() -> None:
    def alarm(run_id: str, number: int, name: str) -> Alarm:
        figures: dict[str, Any] = {"severity": "warning", "since": NOW, "reason": "why", "remedy": "what"}
        return Alarm(run_id=run_id, number=number, name=name, **figures)

    def run(*own: Alarm, of_policy: list[Alarm] | None = None) -> Run:
        policy = RunPolicy(id="run-b", trains=True, step=1, steps=2, policy_version=1, alarms=of_policy or [])
        return ended("run-a").model_copy(update={"alarms": list(own), "policies": {"checker": policy}})

    first, second, of_policy = alarm("run-a", 1, "kl_high"), alarm("run-a", 2, "stalled"), alarm("run-b", 1, "kl_high")
    told: Alarms = {}
    [began] = alarm_news(run(first), told)
    assert re.fullmatch(r"alarm kl_high, warning since 2026-01-0\d [\d:]{8}: why: what", began.plain)
    assert alarm_news(run(first.model_copy(update={"reason": "why now"})), told) == []
    found = [one.plain for one in alarm_news(run(second, of_policy=[of_policy]), told)]
    assert found[0] == "alarm kl_high has ended"
    assert [one.split(",")[0] for one in found[1:]] == ["alarm stalled", "policy checker: alarm kl_high"]
    assert [one.plain for one in alarm_news(run(second), told)] == ["policy checker: alarm kl_high has ended"]


def test_a_request_that_timed_out_is_repeated() -> None:
    tries = list[httpx.Request]()

    def answer(request: httpx.Request) -> httpx.Response:
        tries.append(request)
        if len(tries) == 1:
            # Longer than the patience.
            time.sleep(0.3)
            raise httpx.ReadTimeout("timed out")
        return httpx.Response(200, content=b"{}")

    transport = Transport("http://api", None, timeout_seconds=0.3, patience_seconds=0.2)
    transport._client = httpx.Client(base_url="http://api", transport=httpx.MockTransport(answer))
    assert transport.get("/v1/runs") == b"{}"
    assert len(tries) == 2


def test_a_step_without_a_trainable_token_says_so() -> None:
    idle = step(1, 0.5, {}, trainable_tokens=0).model_copy(update={"calls": CallCounts(calls=2)})
    assert line(idle).endswith("no token can be trained: no call of its rollouts has a sampled token")


def test_a_run_shows_the_progress_of_its_policies() -> None:
    run = Run(
        id="run-a",
        name="pair",
        dataset_id="dataset-a",
        intent="running",
        phase="running",
        reason=None,
        created_at=NOW,
        started_at=NOW,
        finished_at=None,
        progress=Progress(step=1, steps=2, policy_version=1, rollouts={"finished": 3}, reward_mean=None),
        policies={
            "checker": RunPolicy(id="run-b", trains=True, step=1, steps=2, policy_version=1),
            "judge": RunPolicy(id="run-c", trains=False, step=0, steps=0, policy_version=None),
        },
        allowed_actions=[],
        config=RunConfig.model_validate(run_document()),
    )
    first = "pair (run-a): running, step 1 of 2, rollouts 3 finished"
    lines = [first, "policy checker: step 1 of 2, version 1", "policy judge: frozen, no version yet"]
    assert summary(run).plain == "\n".join(lines)


def test_samples_that_were_used_again_are_a_column_of_runs_that_replay() -> None:
    replaying, fresh = (step(2, 0.5, {}, samples=12.0, samples_replayed=again) for again in (4.0, 0.0))
    head, *rows = [[cell.strip() for cell in row if cell.strip()] for row in shown(step_table([replaying, fresh]))]
    assert [row[head.index("replayed")] for row in rows] == ["4 of 12", "0 of 12"]
    assert "replayed 4 of 12" in line(replaying)
    assert "replayed" not in line(fresh)


def test_a_critics_metrics_are_columns_of_runs_with_a_critic() -> None:
    taught, plain = step(2, 0.5, {}, value_loss=0.25, value_explained_variance=0.75), step(2, 0.5, {})
    head, row = [[cell.strip() for cell in row if cell.strip()] for row in shown(step_table([taught]))]
    assert row[head.index("value explained")] == "0.75"
    assert "value loss 0.25, value explained 0.75" in line(taught)
    assert "value" not in line(plain)


def ports_of(listeners: dict[str, Listeners]) -> dict[str, tuple[int | None, int]]:
    return {
        name: (one.public.getsockname()[1] if one.public else None, one.internal.getsockname()[1])
        for name, one in listeners.items()
    }


def test_ports_are_those_of_the_last_start_while_they_are_free() -> None:
    first = open_listeners(SERVICES, None, free=True)
    chosen = ports_of(first)
    for one in first.values():
        one.close()
    assert {name for name, (public, _) in chosen.items() if public is not None} == set(PORTS)
    services = {
        name: ServiceRecord(
            url=f"http://127.0.0.1:{public}" if public else None,
            internal_url=f"http://127.0.0.1:{internal}",
            process=None,
            restarts=0,
        )
        for name, (public, internal) in chosen.items()
    }
    with socket.create_server(("127.0.0.1", chosen["api"][0] or 0)):
        second = open_listeners(SERVICES, record(services=services), free=True)
    again = ports_of(second)
    for one in second.values():
        one.close()
    assert again["api"][0] != chosen["api"][0]
    assert {**again, "api": None} == {**chosen, "api": None}


def test_every_service_is_stopped() -> None:
    assert {name for wave in STOP_ORDER for name in wave} == set(SERVICES)


def record(**changes: object) -> PlatformRecord:
    values = {"state": "ready", "supervisor": Process(pid=1, started_ticks=1), "embedded": []}
    return PlatformRecord.model_validate(values | changes)


def test_a_record_is_read_as_written_and_one_of_another_version_is_none(tmp_path: Path) -> None:
    assert read_record(tmp_path) is None
    write_record(tmp_path, record())
    assert read_record(tmp_path) == record()
    assert not record().is_running()
    (tmp_path / "platform.json").write_text('{"version": 0}')
    assert read_record(tmp_path) is None


def test_a_long_log_is_rotated_while_a_service_writes_it(tmp_path: Path) -> None:
    log = tmp_path / "api.log"
    with log.open("a") as writer:
        writer.write("x" * 100)
        writer.flush()
        rotate_log(log, limit=200)
        assert log.stat().st_size == 100
        rotate_log(log, limit=50)
        writer.write("after")
    assert (log.read_text(), len((tmp_path / "api.log.1").read_text())) == ("after", 100)
