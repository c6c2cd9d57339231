"""Attempts whose agent runs in this process: leased from the API, kept by heartbeats, ended with their outcome."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, Literal
from urllib.parse import quote

from leyden.libs.client.errors import Conflict, LeydenError, Refused
from leyden.libs.client.transport import Transport
from leyden.libs.contracts.api.attempts import (
    EndedAttempt,
    EndRequest,
    Heartbeat,
    LeasedAttempt,
    LeaseRequest,
    StopReason,
)

log = logging.getLogger(__name__)

WAIT_SECONDS = 10.0
"""The wait of one request for a task; the client asks again."""
BEAT_SECONDS = 10.0
"""The longest wait for the answer to a heartbeat; of a short lease a sixth."""
ERROR_CHARACTERS = 2000
OUTPUT_BYTES = 400_000
"""The end of a longer output is sent: the API takes bodies of 1 MiB."""

Result = float | Mapping[str, Any] | str | None
"""An agent's function returns a reward, fields of the end (`output`, `reward`, `rewards`, `facts`), or its answer."""


class RunEnded(Conflict):
    """The run has no more tasks: it has completed, failed or been cancelled."""


class NoTask(LeydenError):
    """No task of the run was due in time."""


class RewardRefused(Refused):
    """The run takes no reward of its agent: every further attempt that gives one would end so."""


class Attempt:
    """One attempt, from the first line of its `with` block to the last.

    The agent's model is at `base_url` with `api_key`, for any client of OpenAI's or Anthropic's API. Set `reward`,
    `rewards` or `output` inside the block. An exception ends the attempt as failed and goes on; an interrupt gives it
    back, so that its task runs again. An attempt that was lost meanwhile, see `stopped`, counts for nothing. A result
    that the API refuses, such as a reward or facts, ends the attempt as failed with the API's reason.

    Args: agent_name: the one of the run's `agents` that plays it, where it has several; wait_seconds: how long entering
        waits for a task; None: for as long as the run goes on
    Raises: on entry: RunEnded; NoTask; Conflict: the platform starts the run's agents itself; at the block's end:
        Refused: the API refuses what the block set; RewardRefused: it is the reward
    """

    def __init__(
        self, http: Transport, run_id: str, *, agent_name: str | None, worker: str, wait_seconds: float | None
    ) -> None:
        self._http, self._run_id, self._agent_name = http, run_id, agent_name
        self._address = f"/v1/runs/{quote(run_id, safe='')}/attempts"
        self._worker, self._wait_seconds = worker, wait_seconds
        self._leased: LeasedAttempt | None = None
        self._is_entered = False
        self._over = threading.Event()
        self._heart: threading.Thread | None = None
        # An `async with` runs in it. Waits for tasks would fill the few threads of the loop, so that no end is sent.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="attempt")
        self.output = ""
        self.reward: float | None = None
        self.rewards: dict[str, float] = {}
        self.facts: dict[str, Any] = {}
        self.stopped: StopReason | None = None
        """The reason to stop the agent, as soon as the platform gives one."""
        self.ended: EndedAttempt | None = None
        """The end as the platform counts it, after the block."""

    @property
    def leased(self) -> LeasedAttempt:
        """All that the platform says of the attempt. Raises: RuntimeError: outside a `with` block"""
        if self._leased is None:
            raise RuntimeError("an attempt begins in its block: write `with client.attempt(run) as attempt:`")
        return self._leased

    @property
    def task(self) -> dict[str, Any]:
        """The row of the dataset."""
        return self.leased.task

    @property
    def base_url(self) -> str:
        """The same for all attempts: the key names this one."""
        return self.leased.base_url

    @property
    def api_key(self) -> str:
        return self.leased.api_key

    @property
    def environment(self) -> dict[str, str]:
        """The variables of an agent that runs as a process: addresses, keys and the task."""
        return self.leased.environment

    def begin(self) -> None:
        """Leases a task and keeps it by heartbeats; entering the block does it, too."""
        if self._leased is None:
            self._leased = self._lease()
            name = f"heartbeat of {self._leased.rollout_id}"
            self._heart = threading.Thread(target=self._beat, name=name, daemon=True)
            self._heart.start()

    def abandon(self) -> None:
        """Gives the attempt back if its block never began."""
        if not self._is_entered:
            self.__exit__(GeneratorExit, GeneratorExit("no agent ran"), None)

    def __enter__(self) -> Attempt:
        self.begin()
        self._is_entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        try:
            self._end(error)
        except Conflict:
            # Lost before its end, which counts for nothing then.
            self.stopped = self.stopped or StopReason.LEASE_LOST
        except LeydenError:
            # The agent's own error says more; without an end the lease runs out.
            if error is None:
                raise
        finally:
            # After the end, which waits for no answer to a heartbeat.
            if self._heart is not None:
                self._heart.join()

    async def __aenter__(self) -> Attempt:
        try:
            return await asyncio.wrap_future(self._thread.submit(self.__enter__))
        except BaseException:
            # The thread of a cancelled task may wait still, and would keep an attempt that nobody plays.
            self._over.set()
            self._thread.submit(self._give_back)
            self._thread.shutdown(wait=False)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end = self._thread.submit(self.__exit__, kind, error, trace)
        self._thread.shutdown(wait=False)
        await asyncio.shield(asyncio.wrap_future(end))

    def take(self, result: Result) -> None:
        """Sets what an agent's function returned: a number is its reward, a text its answer, an object fields."""
        if isinstance(result, str):
            self.output = result
        elif isinstance(result, Mapping):
            for name, value in result.items():
                if name not in {"output", "reward", "rewards", "facts"}:
                    raise TypeError(f"{name!r} is no field of an end: return output, reward, rewards or facts")
                setattr(self, name, value)
        elif result is not None:
            self.reward = float(result)

    def _give_back(self) -> None:
        if self._leased is not None:
            self.__exit__(GeneratorExit, GeneratorExit("nobody waits for it"), None)

    def _lease(self) -> LeasedAttempt:
        key = secrets.token_hex(8)
        deadline = None if self._wait_seconds is None else time.monotonic() + self._wait_seconds
        while True:
            left = WAIT_SECONDS if deadline is None else max(0.0, min(WAIT_SECONDS, deadline - time.monotonic()))
            request = LeaseRequest(worker=self._worker, key=key, wait_seconds=left, agent=self._agent_name)
            try:
                # An older platform refuses fields that it does not know.
                content = request.model_dump_json(exclude_none=True).encode()
                # The platform takes `left` to say that there is none.
                body = self._http.post(self._address, content, timeout_seconds=self._http.timeout_seconds + left)
            except Conflict as error:
                if error.problem is not None and error.problem.cause == "run_ended":
                    raise RunEnded(str(error), error.problem) from None
                raise
            if body:
                return LeasedAttempt.model_validate_json(body)
            if self._over.is_set():
                raise NoTask("nobody waits for a task any more")
            if deadline is not None and time.monotonic() >= deadline:
                raise NoTask(f"run {self._run_id!r} had no task that is due within {self._wait_seconds:g} s")

    def _beat(self) -> None:
        """Renews the lease three times in its life, until the block ends or the platform says stop.

        Two heartbeats without an answer leave room for a third one.
        """
        address, third = f"{self._address}/{self.leased.id}/heartbeat", self.leased.lease_seconds / 3
        pause = third
        while not self._over.wait(pause):
            try:
                body = self._http.post(address, timeout_seconds=min(BEAT_SECONDS, third / 2), patience_seconds=0.0)
            except LeydenError:
                # The API may come back before the lease is over, or another replica answer.
                pause = third / 8
                continue
            answer, pause = Heartbeat.model_validate_json(body), third
            # After the block, it may tell of the block's own end.
            if answer.stop is not None and not self._over.is_set():
                self.stopped = answer.stop
                return

    def _end(self, error: BaseException | None) -> None:
        """Raises: LeydenError; ValueError, Refused: of a result that no JSON or the API holds, which ended as failed"""
        refusal: ValueError | Refused | None = None
        try:
            answer = self._send_end(error)
        except (ValueError, Refused) as refused:
            # Without an end the lease would run out, and the task would run again.
            refusal, self.facts = refused, {}
            answer = self._send_end(error or refused)
        self.ended = EndedAttempt.model_validate_json(answer)
        if refusal is not None and error is None:
            raise refusal

    def _send_end(self, error: BaseException | None) -> bytes:
        try:
            # Without heartbeats, the lease leaves time for a second try.
            limit = max(BEAT_SECONDS, self.leased.lease_seconds / 3)
            return self._http.post(
                f"{self._address}/{self.leased.id}/end", self._end_document(error), timeout_seconds=limit
            )
        except Refused as refused:
            if refused.problem is not None and refused.problem.cause == "reward":
                raise RewardRefused(str(refused), refused.problem) from None
            raise

    def _end_document(self, error: BaseException | None) -> bytes:
        outcome: Literal["succeeded", "failed", "given_back"] = "succeeded"
        if error is not None:
            outcome = "failed" if isinstance(error, Exception) else "given_back"
        fields: dict[str, Any] = {"outcome": outcome, "output": _sendable(str(self.output)), "facts": self.facts}
        if error is None:
            fields |= {"reward": self.reward, "rewards": self.rewards or None}
        else:
            fields["reason"] = _sendable(f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS])
        return EndRequest(**fields).model_dump_json(exclude_none=True).encode()


def _sendable(text: str) -> str:
    """The end of a text, without the characters that the API refuses: U+0000 and lone surrogates."""
    content = text.replace("\x00", "\ufffd").encode("utf-8", "replace")
    return content[-OUTPUT_BYTES:].decode("utf-8", "replace")


def attempts_until(make: Callable[[], Attempt], stop: threading.Event) -> Iterator[Attempt]:
    """Yields leased attempts until the run has ended or somebody says stop; one without a block is given back."""
    while not stop.is_set():
        attempt = make()
        try:
            attempt.begin()
        except RunEnded:
            return
        except NoTask:
            continue
        try:
            yield attempt
        finally:
            attempt.abandon()


def work(make: Callable[[], Attempt], agent: Callable[[Attempt], Result], at_once: int) -> int:
    """Runs the agent on task after task until the run has ended; returns the number of attempts.

    Ctrl-C lets the attempts of other threads end, and gives back the one of its own thread.

    Raises: RewardRefused: the agent gives a reward, and the run takes none
    """
    stop, numbers = threading.Event(), list[int]()

    def run() -> None:
        for attempt in attempts_until(make, stop):
            try:
                with attempt:
                    attempt.take(agent(attempt))
            except RewardRefused:
                raise
            except Exception:
                log.warning("attempt %s of %s failed", attempt.leased.number, attempt.leased.rollout_id, exc_info=True)
            numbers.append(attempt.leased.number)

    if at_once == 1:
        run()
        return len(numbers)
    with ThreadPoolExecutor(at_once, thread_name_prefix="attempt") as pool:
        threads = [pool.submit(run) for _ in range(at_once)]
        try:
            wait(threads, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
    for thread in threads:
        thread.result()
    return len(numbers)
