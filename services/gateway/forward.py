"""One model call from body to durable record: parse, find a repeat, render, sample, record, and only then the end.

A call lives in a task of its own, whoever listens: a repeat of an SDK joins the call that its first try began, and when
the last listener has hung up the call is cancelled, aborted at the engine and recorded as such.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import numpy as np

from leyden.libs.capability import CapabilityError, Cause
from leyden.libs.contracts.conversation import Dialect
from leyden.libs.contracts.ids import new_call_id, weight_version
from leyden.libs.contracts.states import CallStatus
from leyden.libs.faults import fault_point
from leyden.libs.store.attempts import AttemptKey
from leyden.libs.store.calls import NewCall
from leyden.libs.telemetry import logger, parse_traceparent
from leyden.services.gateway import metrics
from leyden.services.gateway.answer import Answer, Completion, finished_answer, logprobs_of
from leyden.services.gateway.choice import Choice, Job
from leyden.services.gateway.door import Door, refusal
from leyden.services.gateway.errors import BadRequest, GatewayError, TooManyCalls, Unavailable, stopping
from leyden.services.gateway.history import History
from leyden.services.gateway.prompt import Added, Prompt
from leyden.services.gateway.reading import Reader
from leyden.services.gateway.record import Recorder
from leyden.services.gateway.render import ChatModel
from leyden.services.gateway.repeats import Repeats, Retry
from leyden.services.gateway.request import ChatRequest, parse_answer, parse_request
from leyden.services.gateway.sample import Sampler

log = logger()


@dataclass(slots=True, eq=False)
class Call:
    """One request to the model while it is in hand. `arrived_at` is `perf_counter()`, `sequence` wall time in ns."""

    door: Door
    request: ChatRequest
    prompt: Prompt
    temperature: float
    choices: list[Choice]
    digest: bytes
    trace_id: str | None
    parent_span_id: str | None
    arrived_at: float
    sequence: int
    task: asyncio.Task[Completion] | None = None
    watchers: list[Callable[[], None]] = field(default_factory=list)
    is_recorded: bool = False
    is_over: bool = False
    """Its attempt has ended: whatever becomes of it is not answered."""

    @property
    def request_id(self) -> str:
        """The id of the first choice, which names the answer."""
        return self.choices[0].call_id

    @contextmanager
    def watched(self, tell: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Calls `tell` at every progress. Leaving the block as the last watcher of an unfinished call cancels it."""
        self.watchers.append(tell)
        try:
            yield
        finally:
            self.watchers.remove(tell)
            if not self.watchers and self.task is not None and not self.task.done():
                self.task.cancel()

    @property
    def is_alive(self) -> bool:
        """Whether it will come to an answer as far as anyone knows: it is not being cancelled."""
        return self.task is not None and not self.task.cancelling()

    def progressed(self) -> None:
        """Tells everyone who watches."""
        for tell in self.watchers:
            tell()


class Gateway:
    """The way of a call through the gateway's parts."""

    def __init__(
        self,
        model: ChatModel,
        *,
        history: History,
        sampler: Sampler,
        recorder: Recorder,
        reader: Reader,
        max_choices: int,
        max_calls: int,
        max_calls_per_attempt: int,
        hold_seconds: float,
    ) -> None:
        self.model = model
        self._history = history
        self._sampler = sampler
        self._recorder = recorder
        self._reader = reader
        self._repeats: Repeats[Call] = Repeats()
        self._max_choices = max_choices
        self._places = asyncio.Semaphore(max_calls)
        self._max_calls_per_attempt = max_calls_per_attempt
        self._of_attempt: dict[AttemptKey, int] = {}
        self._hold_seconds = hold_seconds
        self._in_hand: dict[asyncio.Task[Completion], Call] = {}
        self._is_closing = False

    async def begin(self, door: Door, body: bytes, headers: Mapping[str, str]) -> tuple[ChatRequest, Call | Completion]:
        """The request, and the call that was begun for it, or the answer that an earlier try has already got.

        Raises: BadRequest: the body cannot be served; TooManyCalls: of this attempt; Unavailable: the store is away, or
            the gateway stops
        """
        arrived_at, sequence = time.perf_counter(), time.time_ns()
        known = self._history.opening(door.key, body)
        request = parse_request(body, max_choices=self._max_choices, opening=known)
        retry = Retry.of(headers)
        digest = hashlib.sha256(retry.key.encode() + body).digest() if retry.key else request.body_sha256
        with self._repeats.beginning(door, digest) as earlier:
            repeated = await self._repeated(door, request, digest, retry, earlier) if retry.is_repeat else None
            if repeated is not None:
                return request, repeated
            self._take_up(door)
            try:
                call = await self._prepare(door, request, digest, headers, arrived_at, sequence)
                self._check_open()
            except BaseException:
                self._lay_down(door)
                raise
            self._start(call)
            return request, call

    def _check_open(self) -> None:
        # Nobody would wait for the record of a call that begins now.
        if self._is_closing:
            raise stopping()

    def _take_up(self, door: Door) -> None:
        held = self._of_attempt.get(door.key, 0)
        if held >= self._max_calls_per_attempt:
            message = f"This attempt has {held} calls in hand; wait for some of them."
            raise TooManyCalls(message, code="rate_limit_exceeded", retry_after_seconds=1)
        self._of_attempt[door.key] = held + 1

    def _lay_down(self, door: Door) -> None:
        self._of_attempt[door.key] -= 1
        if not self._of_attempt[door.key]:
            del self._of_attempt[door.key]

    def end(self, attempt: AttemptKey) -> None:
        """Cancels the calls of an attempt that has ended: recorded as aborted, unless they were before, and refused."""
        for task, call in self._in_hand.items():
            if call.door.key == attempt:
                call.is_over = True
                task.cancel()

    async def close(self) -> None:
        """Cancels what is in hand; every call is recorded as aborted before this returns."""
        self._is_closing = True
        for task in self._in_hand:
            task.cancel()
        if self._in_hand:
            await asyncio.wait(self._in_hand)

    async def _repeated(
        self, door: Door, request: ChatRequest, digest: bytes, retry: Retry, earlier: Sequence[asyncio.Event]
    ) -> Call | Completion | None:
        for one in earlier:
            await one.wait()
        call = self._repeats.join(door, digest, retry)
        if call is not None and call.is_alive:
            metrics.REPLAYS.labels("in_hand").inc()
            return call
        stored = await self._reader.completions(
            door, digest, lambda choice: logprobs_of(self.model, request, choice, 0)
        )
        completion = next((done for done in stored if self._repeats.claim(done.request_id, retry)), None)
        if completion is not None:
            metrics.REPLAYS.labels("store").inc()
        return completion

    async def _prepare(
        self,
        door: Door,
        request: ChatRequest,
        digest: bytes,
        headers: Mapping[str, str],
        arrived_at: float,
        sequence: int,
    ) -> Call:
        prompt = await self._history.prompt(door.key, request, lambda known: self._reader.answers(door, known))
        self._check_vocabulary(request, prompt)
        temperature = request.sampling.temperature
        if temperature is None:
            temperature = await self._reader.temperature(door.run_id)
        if prompt.is_fork:
            metrics.FORKS.inc()
        seed = request.sampling.seed
        parent = parse_traceparent(headers.get("traceparent"))
        return Call(
            door=door,
            request=request,
            prompt=prompt,
            temperature=temperature,
            choices=[
                Choice(new_call_id(), index, None if seed is None else (seed + index) % 2**63)
                for index in range(request.choices)
            ],
            digest=digest,
            trace_id=parent.trace_id if parent else None,
            parent_span_id=parent.span_id if parent else None,
            arrived_at=arrived_at,
            sequence=sequence,
        )

    def _check_vocabulary(self, request: ChatRequest, prompt: Prompt) -> None:
        # One id beyond the vocabulary kills a real engine.
        size = self.model.vocab_size
        if prompt.tokens.least < 0 or prompt.tokens.greatest >= size:
            raise BadRequest("The messages hold a token that the model does not know.", param="messages")
        for token in request.sampling.logit_bias:
            if not (token.isascii() and token.isdecimal() and len(token) < 10 and int(token) < size):
                raise BadRequest(
                    f"logit_bias names token '{token[:20]}', but ids go from 0 to {size - 1}.",
                    param="logit_bias",
                    code="invalid_value",
                )

    def _start(self, call: Call) -> None:
        call.task = asyncio.create_task(self._serve(call), name=f"call {call.request_id}")
        self._in_hand[call.task] = call
        self._repeats.add(call.door, call.digest, call.request_id, call)
        metrics.IN_HAND.inc()
        call.task.add_done_callback(lambda task: self._ended(call, task))

    def _ended(self, call: Call, task: asyncio.Task[Completion]) -> None:
        del self._in_hand[task]
        self._lay_down(call.door)
        self._repeats.remove(call.door, call.digest, call)
        metrics.IN_HAND.dec()
        if not task.cancelled():
            # Everyone may have hung up: an exception that nobody fetches is no accident.
            task.exception()
        call.progressed()

    async def _serve(self, call: Call) -> Completion:
        try:
            await self._take_place()
            try:
                await self._sample(call)
            finally:
                self._places.release()
            fault_point("gateway.answered")
            completion = await self._complete(call)
            fault_point("gateway.recorded")
        except asyncio.CancelledError:
            otherwise = "the gateway was stopped" if self._is_closing else "the agent hung up"
            reason = "its attempt ended" if call.is_over else otherwise
            await self._record_unfinished(call, CallStatus.ABORTED, reason)
            if not call.is_over:
                raise
        except GatewayError as error:
            if not isinstance(error, BadRequest) or any(choice.sampled_ids for choice in call.choices):
                await self._record_unfinished(call, CallStatus.FAILED, error.message)
            raise
        except Exception:
            await self._record_unfinished(call, CallStatus.FAILED, "an error of the gateway")
            raise
        if call.is_over:
            raise refusal(CapabilityError(Cause.ENDED))
        return completion

    async def _take_place(self) -> None:
        """A call's turn. One that waits in vain is recorded as failed, so that its agent's failure counts as ours.

        Raises: Unavailable: too many calls for too long
        """
        try:
            # A timer only for those who wait.
            async with asyncio.timeout(self._hold_seconds if self._places.locked() else None):
                await self._places.acquire()
        except TimeoutError:
            raise Unavailable("Too many calls at once; try again.", code="overloaded", retry_after_seconds=1) from None

    async def _sample(self, call: Call) -> None:
        request = call.request
        room = self.model.context_length - 1 - call.prompt.tokens.length
        job = Job(
            run_id=call.door.run_id,
            rollout_id=call.door.rollout_id,
            prompt=call.prompt.tokens,
            sampling=request.sampling,
            temperature=call.temperature,
            max_tokens=min(request.sampling.max_tokens or room, room),
            vocab_size=self.model.vocab_size,
            top_logprobs=request.top_logprobs,
            eos_ids=sorted(self.model.eos_ids),
            stream=request.stream,
        )
        if len(call.choices) == 1:
            await self._sampler.sample(job, call.choices[0], call.progressed)
            return
        try:
            async with asyncio.TaskGroup() as group:
                for choice in call.choices:
                    group.create_task(self._sampler.sample(job, choice, call.progressed))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _complete(self, call: Call) -> Completion:
        answers = [finished_answer(self.model, call.request, choice) for choice in call.choices]
        reason = call.request.sampling.untrainable_reason(call.temperature)
        added = call.prompt.added(call.request.sent)
        rows = [
            _row(call, added, choice, CallStatus.COMPLETED, reason, answer)
            for choice, answer in zip(call.choices, answers, strict=True)
        ]
        await self._record(call, rows)
        # A later choice with the same text must not hide the first: agents go on with the first.
        for row, answer in reversed(list(zip(rows, answers, strict=True))):
            sampled = np.frombuffer(row.sampled_ids, dtype="<i4")
            said = parse_answer(answer.message)
            self._history.remember(call.door.key, row.id, call.prompt, said, sampled, added=added)
        _count(call, rows)
        return _completion(call, rows, answers)

    async def _record(self, call: Call, rows: Sequence[NewCall]) -> None:
        # From here on the write goes on whatever happens to whoever waits for it.
        call.is_recorded = True
        await self._recorder.record(rows)

    async def _record_unfinished(self, call: Call, status: CallStatus, reason: str) -> None:
        if call.is_recorded:
            return
        log.info("call unfinished", call_id=call.request_id, status=status, reason=reason)
        metrics.CALLS.labels(status).inc(len(call.choices))
        added = call.prompt.added(call.request.sent)
        with suppress(GatewayError):
            await self._record(call, [_row(call, added, choice, status, reason, None) for choice in call.choices])


def _row(
    call: Call, added: Added, choice: Choice, status: CallStatus, reason: str | None, answer: Answer | None
) -> NewCall:
    ended_at = choice.ended_at or time.perf_counter()
    versions = choice.policy_versions
    distinct = set(versions)
    return NewCall(
        run_id=call.door.run_id,
        id=choice.call_id,
        rollout_id=call.door.rollout_id,
        attempt=call.door.attempt,
        request_id=call.request_id,
        choice=choice.index,
        sequence=call.sequence,
        status=status,
        trainable=reason is None,
        untrainable_reason=reason,
        request_sha256=call.digest,
        dialect=Dialect.CHAT_COMPLETIONS,
        request=call.request.recorded,
        parent_call_id=added.continues,
        shared_turns=added.shared_turns,
        shared_tokens=added.shared_tokens,
        turns=call.request.turns[added.shared_turns :],
        tools=call.request.tools if added.continues is None else None,
        answer=None if answer is None else parse_answer(answer.message),
        prompt_ids=added.ids.astype("<i4", copy=False).data.cast("B"),
        sampled_ids=_packed("i", choice.sampled_ids),
        generator_logprobs=_packed("f", choice.logprobs),
        policy_versions=_packed("i", versions),
        prompt_tokens=call.prompt.tokens.length,
        completion_tokens=len(choice.sampled_ids),
        cached_tokens=choice.cached_tokens,
        min_policy_version=min(distinct, default=None),
        max_policy_version=max(distinct, default=None),
        temperature=call.temperature,
        finish_reason=None if answer is None else answer.finish_reason,
        trace_id=call.trace_id,
        parent_span_id=call.parent_span_id,
        queued_seconds=(choice.accepted_at or ended_at) - call.arrived_at,
        first_token_seconds=None if choice.first_token_at is None else choice.first_token_at - call.arrived_at,
        total_seconds=ended_at - call.arrived_at,
    )


def _packed(kind: str, values: list[int] | list[float]) -> bytes:
    """Little-endian numbers of 4 bytes: `struct` makes them of a list in half of an array's time, a quarter of numpy's.

    Args: kind: "i" or "f"
    """
    return struct.pack(f"<{len(values)}{kind}", *values)


def _completion(call: Call, rows: Sequence[NewCall], answers: Sequence[Answer]) -> Completion:
    versions = (row.max_policy_version for row in rows)
    version = max((version for version in versions if version is not None), default=None)
    return Completion(
        request_id=call.request_id,
        model=call.request.model,
        created=call.sequence // 1_000_000_000,
        fingerprint=None if version is None else weight_version(call.door.run_id, version),
        answers=tuple(answers),
        prompt_tokens=call.prompt.tokens.length,
        completion_tokens=sum(row.completion_tokens for row in rows),
        cached_tokens=call.choices[0].cached_tokens,
    )


def _count(call: Call, rows: Sequence[NewCall]) -> None:
    metrics.COMPLETED_CALLS.inc(len(rows))
    metrics.CALL_SECONDS.observe(time.perf_counter() - call.arrived_at)
    metrics.PROMPT_TOKENS.inc(sum(row.prompt_tokens for row in rows))
    metrics.CACHED_TOKENS.inc(sum(row.cached_tokens for row in rows))
    metrics.SAMPLED_TOKENS.inc(sum(row.completion_tokens for row in rows))
    metrics.UNTRAINABLE.inc(sum(not row.trainable for row in rows))
    first_tokens = [row.first_token_seconds for row in rows if row.first_token_seconds is not None]
    if first_tokens:
        metrics.FIRST_TOKEN_SECONDS.observe(min(first_tokens))
