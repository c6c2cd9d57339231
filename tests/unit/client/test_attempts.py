"""A block leases, beats and ends; its requests are those of the API."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import threading
import time
from typing import Any, cast

import pytest

from leyden.libs.client import AsyncClient, Attempt, Conflict, NoTask, Refused, RewardRefused, RunEnded, Unreachable
from leyden.libs.client.attempts import attempts_until, work
from leyden.libs.client.transport import Transport
from leyden.libs.contracts.api.problems import Problem
from tests.support.waiting import until

LEASED = {
    **{"run_id": "run-a", "rollout_id": "run-a.0.0", "number": 1, "dataset_id": "d", "task_number": 0},
    **{"task": {"question": "2+2"}, "base_url": "http://g/v1", "api_key": "k", "environment": {}},
    **{"takes_reward": True, "lease_seconds": 0.03, "timeout_seconds": 9.0},
}
BEAT = {"lease_expires_at": "2026-01-01T00:00:00Z", "stop": None, "reason": None}
ENDED = {"id": "1", "rollout_id": "run-a.0.0", "number": 1, "kind": "succeeded", "reward": None, "detail": None}


class Api:
    """Answers with tasks until none is left; then the run has ended."""

    timeout_seconds = 60.0

    def __init__(self, tasks: int, *, refuses_end: bool = False) -> None:
        self.tasks, self.refuses_end = tasks, refuses_end
        self.ends = list[dict[str, Any]]()
        self.beaten = threading.Event()
        self.stop: str | None = None
        self._lock = threading.Lock()

    def post(self, path: str, content: bytes | None = None, **limits: float) -> bytes:
        if path.endswith("/heartbeat"):
            self.beaten.set()
            self.beat(**limits)
            return json.dumps(BEAT | {"stop": self.stop}).encode()
        if path.endswith("/end"):
            if self.refuses_end:
                raise Conflict("late", Problem(title="", status=409, cause="lease_lost"))
            self.ends.append(json.loads(content or b""))
            return json.dumps(ENDED).encode()
        with self._lock:
            if self.tasks == 0:
                raise Conflict("over", Problem(title="", status=409, cause="run_ended"))
            self.tasks -= 1
            return json.dumps(LEASED | {"id": f"lease-{self.tasks}"}).encode()

    def beat(self, **limits: float) -> None:
        """Each heartbeat's moment."""

    def attempt(self) -> Attempt:
        return Attempt(cast(Transport, self), "run-a", agent_name=None, worker="nb", wait_seconds=None)


class Idle(Api):
    def post(self, path: str, content: bytes | None = None, **limits: float) -> bytes:
        return b""


def test_a_block_ends_with_what_it_set_and_an_exception_is_a_failure() -> None:
    api = Api(3)
    with api.attempt() as attempt:
        attempt.output, attempt.reward, attempt.facts = "4\x00\ud800", 1.0, {"turns": 2}
    with pytest.raises(ZeroDivisionError), api.attempt():
        _ = 1 / 0
    with pytest.raises(KeyboardInterrupt), api.attempt():
        raise KeyboardInterrupt
    assert api.ends == [
        {"outcome": "succeeded", "output": "4\ufffd?", "reward": 1.0, "facts": {"turns": 2}},
        {"outcome": "failed", "output": "", "facts": {}, "reason": "ZeroDivisionError: division by zero"},
        {"outcome": "given_back", "output": "", "facts": {}, "reason": "KeyboardInterrupt: "},
    ]
    with pytest.raises(RunEnded), api.attempt():
        raise AssertionError("no task is left")


@pytest.mark.parametrize("given", [{"reward": math.nan}, {"facts": {"score": object()}}])
def test_a_result_that_json_cannot_hold_ends_its_attempt_as_failed(given: dict[str, Any]) -> None:
    api = Api(1)
    with pytest.raises(ValueError), api.attempt() as attempt:
        attempt.take({"output": "4", **given})
    [end] = api.ends
    assert (end["outcome"], end["output"], end["facts"]) == ("failed", "4", {})
    assert end["reason"]


class Strict(Api):
    """Refuses rewards and U+0000, as the API of a run that takes no reward does."""

    def post(self, path: str, content: bytes | None = None, **limits: float) -> bytes:
        document = json.loads(content or b"{}")
        if "reward" in document:
            raise Refused("the run takes no reward", Problem(title="", status=422, cause="reward"))
        if "\\u0000" in (content or b"").decode():
            raise Refused("facts: the text holds U+0000", Problem(title="", status=400))
        return super().post(path, content, **limits)


@pytest.mark.parametrize(
    ("given", "kind", "reason"),
    [
        ({"reward": 1.0}, RewardRefused, "RewardRefused: the run takes no reward"),
        ({"facts": {"tail": "a\x00b"}}, Refused, "Refused: facts: the text holds U+0000"),
    ],
)
def test_a_result_that_the_api_refuses_ends_its_attempt_as_failed(
    given: dict[str, Any], kind: type[Refused], reason: str
) -> None:
    api = Strict(1)
    with pytest.raises(kind), api.attempt() as attempt:
        attempt.take({"output": "4", **given})
    assert api.ends == [{"outcome": "failed", "output": "4", "facts": {}, "reason": reason}]
    assert attempt.ended is not None


def test_a_failure_whose_facts_the_api_refuses_keeps_its_own_reason() -> None:
    api = Strict(1)
    attempt = api.attempt()
    attempt.facts = {"tail": "\x00"}
    with pytest.raises(ZeroDivisionError), attempt:
        _ = 1 / 0
    assert [one["reason"] for one in api.ends] == ["ZeroDivisionError: division by zero"]


@pytest.mark.parametrize("at_once", [1, 2])
def test_work_ends_where_the_run_takes_no_reward_and_goes_on_after_refused_facts(at_once: int) -> None:
    api = Strict(9)
    with pytest.raises(RewardRefused):
        work(api.attempt, lambda _: 1.0, at_once)
    assert 1 <= len(api.ends) <= at_once
    api = Strict(3)
    assert work(api.attempt, lambda _: {"facts": {"tail": "\x00"}}, at_once) == len(api.ends) == 3


def test_work_of_threads_ends_with_the_first_refusal() -> None:
    api, numbers = Strict(200), itertools.count()

    def agent(_: Attempt) -> float | None:
        number = next(numbers)
        # The other thread goes on without a reward.
        time.sleep(0.05 * (number != 1))
        return 1.0 if number == 1 else None

    with pytest.raises(RewardRefused):
        work(api.attempt, agent, 2)
    assert len(api.ends) < 200


def test_work_of_coroutines_ends_where_the_run_takes_no_reward() -> None:
    api = Strict(9)

    async def agent(_: Attempt) -> float:
        return 1.0

    async def play() -> None:
        async with AsyncClient("http://api") as client:
            client._client._next_attempt = lambda *_: api.attempt  # type: ignore[method-assign]
            await client.work("run-a", agent)

    with pytest.raises(RewardRefused):
        asyncio.run(play())
    assert [one["outcome"] for one in api.ends] == ["failed"]


def test_a_heartbeat_tells_the_agent_to_stop() -> None:
    api = Api(1)
    api.stop = "cancelled"
    with api.attempt() as attempt:
        assert api.beaten.wait(60)
    assert attempt.stopped == "cancelled"


def test_an_end_waits_for_no_answer_to_a_heartbeat() -> None:
    class Silent(Api):
        def beat(self, **limits: float) -> None:
            until(lambda: self.ends, "the end is sent", 20)
            self.stop = "ended"

    api = Silent(1)
    with api.attempt() as attempt:
        assert api.beaten.wait(60)
    assert (attempt.stopped, [one["outcome"] for one in api.ends]) == (None, ["succeeded"])


def test_two_heartbeats_without_an_answer_leave_room_for_a_third_one() -> None:
    class Clock(threading.Event):
        seconds = 0.0

        def wait(self, timeout: float | None = None) -> bool:
            self.seconds += timeout or 0.0
            return self.is_set()

    class Deaf(Api):
        def beat(self, *, timeout_seconds: float, patience_seconds: float) -> None:
            assert patience_seconds == 0.0
            clock.seconds += timeout_seconds
            moments.append(clock.seconds)
            if len(moments) < 3:
                raise Unreachable("no answer")
            answered.set()

    api, clock, answered, moments = Deaf(1), Clock(), threading.Event(), list[float]()
    api.stop = "cancelled"
    attempt = api.attempt()
    attempt._over = clock
    with attempt:
        assert answered.wait(60)
    assert moments[-1] < LEASED["lease_seconds"]


def test_an_end_that_comes_too_late_raises_nothing() -> None:
    api = Api(1, refuses_end=True)
    with api.attempt() as attempt:
        pass
    assert (attempt.stopped, attempt.ended) == ("lease_lost", None)


def test_a_wait_without_a_task_ends() -> None:
    idle = cast(Transport, Idle(0))
    with pytest.raises(NoTask), Attempt(idle, "run-a", agent_name=None, worker="nb", wait_seconds=0.0):
        raise AssertionError("there is no task")


def test_a_cancelled_task_gives_its_attempt_back() -> None:
    api = Api(1)

    async def agent(begun: asyncio.Event) -> None:
        async with api.attempt():
            begun.set()
            await asyncio.Event().wait()

    async def cancel() -> None:
        begun = asyncio.Event()
        task = asyncio.create_task(agent(begun))
        await begun.wait()
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(cancel())
    assert [one["outcome"] for one in api.ends] == ["given_back"]


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_function_works_until_the_run_has_ended(at_once: int) -> None:
    api = Api(6)
    assert work(api.attempt, lambda _: {"reward": 0.5}, at_once) == 6
    assert [one["reward"] for one in api.ends] == [0.5] * 6


def test_an_attempt_whose_block_never_began_is_given_back() -> None:
    api = Api(2)
    found = attempts_until(api.attempt, threading.Event())
    with next(found):
        pass
    next(found)
    found.close()  # type: ignore[attr-defined]  # a generator
    assert [one["outcome"] for one in api.ends] == ["succeeded", "given_back"]
