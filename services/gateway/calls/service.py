"""Runs model calls: parse, join an earlier try or start, render, sample, record, then send the end of the answer.

A call runs in a task of its own, independent of its listeners: a retry of an SDK joins the call that its first try
started. When the last listener disconnects and no retry joins in time, the call is cancelled, aborted at the engine and
recorded as aborted.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from cachetools import LRUCache

from leyden.libs.capability import CapabilityError, Cause
from leyden.libs.contracts.conversation import CONVERSATION, Json
from leyden.libs.contracts.ids import is_training, new_call_id, weight_version
from leyden.libs.contracts.states import CONTEXT_EXCEEDED, CallStatus
from leyden.libs.faults import fault_point
from leyden.libs.store.attempts import AttemptKey
from leyden.libs.store.records.calls import EVER, CallDefaults
from leyden.libs.store.records.deliveries import UNREAD, NewDelivery
from leyden.libs.telemetry import logger, parse_traceparent
from leyden.services.gateway import metrics
from leyden.services.gateway.auth import refusal
from leyden.services.gateway.calls.context import (
    Agent,
    Attempt,
    CallContext,
    Completion,
    ModelRequest,
    SampledTokens,
    seed_of_call,
    seed_of_rollout,
)
from leyden.services.gateway.calls.override import overridden
from leyden.services.gateway.calls.prepare import NAME_HEADER, agent_of, role_of
from leyden.services.gateway.calls.retries import REPEAT_SECONDS, InFlightCall, Retry, RetryIndex
from leyden.services.gateway.dialects.base import WireFormat
from leyden.services.gateway.dialects.hosted import refuse_hosted
from leyden.services.gateway.engine.client import EngineClient
from leyden.services.gateway.errors import BadRequest, GatewayError, TooManyCalls, Unavailable, stopping
from leyden.services.gateway.prompt.models import PoolModels
from leyden.services.gateway.prompt.stored import Refusal, StoredCalls
from leyden.services.gateway.records.deliveries import Deliveries, Delivery
from leyden.services.gateway.records.reader import Reader
from leyden.services.gateway.records.writer import Recorder
from leyden.services.gateway.samplers.base import Sampler
from leyden.services.gateway.samplers.conversation import TaskConversation
from leyden.services.gateway.samplers.engine import EngineSampler, render
from leyden.services.gateway.samplers.provider import Providers, ProviderSampler
from leyden.services.gateway.samplers.replayed import ReplayedSampler
from leyden.services.gateway.settings import Settings

MAX_ENDED = 10_000
"""So many ended attempts are remembered for requests that are on their way to a call."""

log = logger()


class Caller(NamedTuple):
    """The agent that makes a call, its role in the run, and the run whose policy answers."""

    agent: Agent
    role: str | None
    policy_id: str


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that its client has sent completely. `delivery` watches it, also before it has a call."""

    attempt: Attempt
    wire_format: WireFormat
    request: ModelRequest
    headers: Mapping[str, str]
    retry: Retry
    delivery: Delivery

    @property
    def digest(self) -> bytes:
        """Identifies repeats of the request."""
        return self.delivery.row.request_sha256


class CallService:
    """Runs calls, at most `max_calls` of them at once; further calls wait.

    Args: clock: seconds since the epoch; all gateways must have one, because it orders the calls of an attempt
    """

    def __init__(
        self,
        models: PoolModels,
        *,
        engines: EngineClient,
        providers: Providers,
        recorder: Recorder,
        deliveries: Deliveries,
        reader: Reader,
        stored: StoredCalls,
        settings: Settings,
        clock: Callable[[], float],
    ) -> None:
        self.models = models
        self._engines = engines
        self._providers = providers
        self._recorder = recorder
        self._deliveries = deliveries
        self._reader = reader
        self._stored = stored
        self._retries = RetryIndex()
        self._settings = settings
        self._turns = asyncio.Semaphore(settings.max_calls)
        self._per_attempt: Counter[AttemptKey] = Counter()
        self._in_flight: dict[asyncio.Task[Completion], InFlightCall] = {}
        self._ended_attempts: LRUCache[AttemptKey, None] = LRUCache(MAX_ENDED)
        self._is_closing = False
        self._clock = clock
        self._sequence = 0
        self._started_at = time.monotonic()

    def arrive(self, attempt: Attempt, wire_format: WireFormat, body: bytes, headers: Mapping[str, str]) -> Arrival:
        """Reads a request, and watches how long it waits from now on.

        Raises: BadRequest: the body is invalid or unsupported
        """
        arrived_at = time.perf_counter()
        request = wire_format.parse(body, max_choices=self._settings.max_choices)
        retry = Retry.of(headers)
        digest = hashlib.sha256(retry.key.encode() + body).digest() if retry.key else request.body_sha256
        delivery = self._watch(attempt, digest, arrived_at)
        return Arrival(attempt, wire_format, request, headers, retry, delivery)

    def visit(self, attempt: Attempt) -> Delivery:
        """Watches a request of which only the attempt is known: it gets no call."""
        return self._watch(attempt, UNREAD, time.perf_counter())

    def give_up(self, attempt: Attempt) -> None:
        """Notes that the platform refused a request whose body it had no room for."""
        self._deliveries.end_early(self.visit(attempt), delivered=False)

    def _watch(self, attempt: Attempt, digest: bytes, arrived_at: float) -> Delivery:
        row = _delivery(attempt, new_call_id(), self._next_sequence(), digest)
        return self._deliveries.watch(row, arrived_at)

    async def start(self, arrival: Arrival) -> tuple[ModelRequest, InFlightCall | Completion]:
        """Returns the request with its call in flight, or with the stored answer of an earlier try.

        Raises: BadRequest: the request is unsupported, or an earlier try was refused; TooManyCalls: the attempt has too
            many calls in flight; KeyRefused: the attempt ended; Unavailable: the store is down, or the gateway stops
        """
        attempt, wire_format, request = arrival.attempt, arrival.wire_format, arrival.request
        with self._retries.starting((attempt.key, arrival.digest)) as earlier:
            if arrival.retry.may_be_answered:
                answered = await self._answered(arrival, earlier)
            else:
                answered = await self._undeclared(arrival)
            if isinstance(answered, Completion):
                await wire_format.remember(attempt, request, answered)
            elif answered is not None:
                # The row of the call that it joins says whether the answer arrives.
                self._deliveries.end_early(arrival.delivery, delivered=None)
            if answered is not None:
                # The body of the answer may repeat turns that the request refers to.
                return await wire_format.expand(attempt, request), answered
            self._recorder.check_room(attempt.key, request.choices)
            self._admit(attempt)
            try:
                request = await wire_format.expand(attempt, request)
                call = await self._prepare(arrival, request)
                # close() waits only for the calls that run when it starts: a later call would lose its record.
                if self._is_closing:
                    raise stopping()
                # end() cancels only the calls that run.
                if attempt.key in self._ended_attempts:
                    raise refusal(CapabilityError(Cause.ENDED))
                # Many requests at once have passed the check above before any of them is stored.
                prompt = call.context.prompt
                added = len(prompt.ids) - prompt.shared_tokens
                call.release_room = self._recorder.reserve(attempt.key, request.choices, added)
            except BaseException:
                self._release(attempt)
                raise
            self._run(call, wire_format)
            return request, call

    def _next_sequence(self) -> int:
        now = int(self._clock() * 1e9)
        if now == 0:
            # The store has been away since this gateway began. Later calls are ordered by the store's clock again.
            return time.time_ns()
        # A new reading of the store's clock may set it back a little.
        self._sequence = max(self._sequence + 1, now)
        return self._sequence

    async def count(self, attempt: Attempt, wire_format: WireFormat, body: bytes, headers: Mapping[str, str]) -> int:
        """Returns the length of the prompt that a request with this body would send. Raises: BadRequest."""
        request = wire_format.parse(body, max_choices=self._settings.max_choices)
        request = await wire_format.expand(attempt, request)
        caller = await self._caller(attempt, request, headers)
        served = await self.models.of_run(caller.policy_id)
        return len((await render(served, self._stored, attempt, request, caller.policy_id)).prompt.ids)

    def abandon(self, call: InFlightCall | Completion, attempt: Attempt, digest: bytes) -> None:
        """Notes that the client left before it could listen to the call: a repeat may join it for a while."""
        if isinstance(call, InFlightCall):
            call.abandon()
        self.lose(call, attempt, digest)

    def lose(self, call: InFlightCall | Completion, attempt: Attempt, digest: bytes) -> None:
        """Notes that a client hung up before the end of the answer, so that an equal request repeats it."""
        self._retries.undelivered[attempt.key, digest] = call.request_id
        if isinstance(call, InFlightCall) and call.task is not None and call.task.done():
            self._lose_delivery(call)

    def deliver(self, call: InFlightCall | Completion, attempt: Attempt, digest: bytes) -> None:
        """Notes that the end of an answer went to a client that was still connected."""
        self._retries.found((attempt.key, digest), call.request_id)
        if isinstance(call, InFlightCall):
            self._end_delivery(call, delivered=True)
            return
        sequence = call.created * 1_000_000_000
        self._deliveries.replayed(_delivery(attempt, call.request_id, sequence, digest))

    def _lose_delivery(self, call: InFlightCall) -> None:
        self._deliveries.lose(call.delivery, call.waited_seconds(), self._settings.abandoned_seconds)

    def _end_delivery(self, call: InFlightCall, *, delivered: bool) -> None:
        self._deliveries.end(call.delivery, delivered=delivered, waited_seconds=call.waited_seconds())

    def end(self, attempt: AttemptKey) -> None:
        """Cancels the calls of an ended attempt; they are recorded as aborted, and their clients get 403.

        Requests whose calls have not begun get 403, too.
        """
        self._ended_attempts[attempt] = None
        for task, call in self._in_flight.items():
            if call.context.attempt.key == attempt:
                call.has_attempt_ended = True
                task.cancel()
        self._deliveries.end_lost(attempt.rollout_id, attempt.attempt)

    def has_calls(self, attempt: AttemptKey) -> bool:
        """Whether the attempt has a call that runs or is prepared."""
        return attempt in self._per_attempt

    async def close(self) -> None:
        """Cancels the calls in flight; every one is recorded as aborted before this returns."""
        self._is_closing = True
        for task in self._in_flight:
            task.cancel()
        if self._in_flight:
            await asyncio.wait(self._in_flight)

    def _admit(self, attempt: Attempt) -> None:
        count = self._per_attempt[attempt.key]
        if count >= self._settings.max_calls_per_attempt:
            message = f"This attempt has {count} calls in flight; wait for some of them."
            raise TooManyCalls(message, code="rate_limit_exceeded", retry_after_seconds=1)
        self._per_attempt[attempt.key] += 1

    def _release(self, attempt: Attempt) -> None:
        self._per_attempt[attempt.key] -= 1
        if not self._per_attempt[attempt.key]:
            del self._per_attempt[attempt.key]

    async def _answered(self, arrival: Arrival, earlier: Sequence[asyncio.Event]) -> InFlightCall | Completion | None:
        key, retry = (arrival.attempt.key, arrival.digest), arrival.retry
        for event in earlier:
            await event.wait()
        call = self._retries.join(key, retry)
        if call is not None and call.may_complete:
            metrics.REPLAYS.labels("in_flight").inc()
            return call.joined()
        stored = await self._stored.completions(arrival.attempt, arrival.request, arrival.digest)
        found = next((done for done in stored if self._retries.claim(done.request_id, retry)), None)
        return None if found is None else _replayed(found)

    async def _undeclared(self, arrival: Arrival) -> InFlightCall | Completion | None:
        """Returns the call or the stored answer that this request repeats without saying so.

        The client of that answer hung up before its end, or the gateway that had it died: then its successor asks the
        store, for as long as a repeat may come, where the attempt is older than itself.
        """
        attempt, age = arrival.attempt, time.monotonic() - self._started_at
        key = attempt.key, arrival.digest
        if (running := self._retries.join_abandoned(key)) is not None:
            metrics.REPLAYS.labels("in_flight").inc()
            return running
        lost = self._retries.undelivered.get(key)
        if lost is None and age > REPEAT_SECONDS:
            return None
        # Those of a gateway that died; bounded in the store, because an agent may make many equal calls from then on.
        latest = self._clock() - age - 1
        if lost is None and await self._reader.began_at(attempt.key) > latest:
            return None
        arrived = (latest + 1 - REPEAT_SECONDS, latest) if lost is None else EVER
        for done in await self._stored.completions(attempt, arrival.request, arrival.digest, arrived):
            if self._retries.repeats(key, lost, done.request_id):
                return _replayed(done)
        return None

    async def _prepare(self, arrival: Arrival, request: ModelRequest) -> InFlightCall:
        attempt, headers, delivery = arrival.attempt, arrival.headers, arrival.delivery
        defaults = await self._reader.defaults(attempt.run_id)
        if defaults.refuses_hosted_tools:
            refuse_hosted(request.parameters)
        caller = await self._caller(attempt, request, headers)
        asked: Json | None = None
        if defaults.override is not None and _is_trained(attempt, caller, defaults):
            sampling, asked = overridden(request.sampling, defaults.override)
            request = replace(request, sampling=sampling)
        sampler = await self._sampler(attempt, request, caller, defaults)
        reroll = await self._reader.reroll(attempt.of_run) if defaults.rerolls else None
        if reroll is not None and reroll.repeats is not None:
            sampler = ReplayedSampler(sampler, reroll.repeats)
        request = sampler.request
        temperature = request.sampling.temperature
        metrics.PROMPTS.labels(sampler.indexed.continuation).inc()
        parent = parse_traceparent(headers.get("traceparent"))
        choices = _choices(request, attempt.rollout_id, delivery.row.request_id)
        context = CallContext(
            attempt=attempt,
            request=request,
            request_id=delivery.row.request_id,
            request_sha256=arrival.digest,
            prompt=sampler.indexed.prompt,
            constraint=sampler.constraint,
            temperature=defaults.temperature if temperature is None else temperature,
            asked=asked,
            defaults=defaults,
            trace_id=parent.trace_id if parent else None,
            parent_span_id=parent.span_id if parent else None,
            agent=caller.agent,
            role=caller.role,
            policy_id=caller.policy_id,
            continuation=sampler.indexed.continuation,
            arrived_at=delivery.arrived_at,
            sequence=delivery.row.sequence,
            is_reroll=reroll is not None,
        )
        return InFlightCall(context, choices, sampler, delivery, abandoned_seconds=self._settings.abandoned_seconds)

    async def _sampler(
        self, attempt: Attempt, request: ModelRequest, caller: Caller, defaults: CallDefaults
    ) -> Sampler:
        served = await self.models.of_run(caller.policy_id)
        policy = defaults.provided.get(caller.role or "")
        if policy is not None:
            is_own = policy.provider == CONVERSATION
            answerer = TaskConversation(self._reader, attempt) if is_own else self._providers
            return await ProviderSampler.prepare(answerer, policy, request, served, attempt)
        return await EngineSampler.prepare(self._engines, served, self._stored, attempt, request, caller.policy_id)

    async def _caller(self, attempt: Attempt, request: ModelRequest, headers: Mapping[str, str]) -> Caller:
        agent = agent_of(request, headers.get(NAME_HEADER))
        defaults = await self._reader.defaults(attempt.run_id)
        if any(role.agent_name for role in defaults.roles):
            agent = replace(agent, name=await self._reader.agent_name(attempt.run_id, agent.id, agent.name))
        role = role_of(defaults.roles, request, agent)
        return Caller(agent, role, defaults.policy_id(attempt.run_id, role))

    def _run(self, call: InFlightCall, wire_format: WireFormat) -> None:
        call.task = asyncio.create_task(self._serve(call, wire_format), name=f"call {call.request_id}")
        self._in_flight[call.task] = call
        call.delivery.has_call = True
        self._retries.add((call.context.attempt.key, call.context.request_sha256), call.request_id, call)
        metrics.IN_FLIGHT.inc()
        call.task.add_done_callback(lambda task: self._ended(call, task))

    def _ended(self, call: InFlightCall, task: asyncio.Task[Completion]) -> None:
        del self._in_flight[task]
        call.release_room()
        self._release(call.context.attempt)
        self._retries.remove((call.context.attempt.key, call.context.request_sha256), call)
        metrics.IN_FLIGHT.dec()
        # All clients may have disconnected: reading the exception avoids asyncio's "never retrieved" warning.
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            # The refusal of a bad request is its answer.
            self._end_delivery(call, delivered=isinstance(error, BadRequest) and bool(call.listeners))
        elif not call.listeners:
            self._lose_delivery(call)
        call.progressed()

    async def _serve(self, call: InFlightCall, wire_format: WireFormat) -> Completion:
        try:
            await self._wait_for_turn()
            try:
                await call.sampler.sample(call.context, call.choices, call.progressed)
            finally:
                self._turns.release()
            fault_point("gateway.answered")
            completion = await self._complete(call)
            try:
                await wire_format.remember(call.context.attempt, call.context.request, completion)
            except GatewayError:
                # The record holds an answer that its client does not get: an equal request does.
                self.lose(call, call.context.attempt, call.context.request_sha256)
                raise
            fault_point("gateway.recorded")
        except asyncio.CancelledError:
            otherwise = "the gateway was stopped" if self._is_closing else "the agent hung up"
            reason = "its attempt ended" if call.has_attempt_ended else otherwise
            await self._record_unfinished(call, CallStatus.ABORTED, reason)
            if not call.has_attempt_ended:
                raise
        except GatewayError as error:
            is_refused = isinstance(error, BadRequest) and not any(choice.ids for choice in call.choices)
            status = CallStatus.REFUSED if is_refused else CallStatus.FAILED
            reason = error.message + error.detail
            await self._record_unfinished(call, status, reason, error.code if is_refused else None)
            if is_refused:
                fault_point("gateway.refused")
            raise
        except Exception:
            await self._record_unfinished(call, CallStatus.FAILED, "an error of the gateway")
            raise
        if call.has_attempt_ended:
            raise refusal(CapabilityError(Cause.ENDED))
        return completion

    async def _wait_for_turn(self) -> None:
        """Raises: Unavailable: the call waited too long; its failed record excuses the agent's failure."""
        try:
            async with asyncio.timeout(self._settings.hold_seconds):
                await self._turns.acquire()
        except TimeoutError:
            raise Unavailable("Too many calls at once; try again.", code="overloaded", retry_after_seconds=1) from None

    async def _complete(self, call: InFlightCall) -> Completion:
        answers, prompt_tokens, completion_tokens = call.sampler.answered(call.context, call.choices)
        reason = call.context.untrainable_reason
        rows = [
            call.context.row(choice, CallStatus.COMPLETED, reason, answer)
            for choice, answer in zip(call.choices, answers, strict=True)
        ]
        call.is_recorded = True
        call.release_room()
        await self._recorder.record(rows)
        call.recorded_at = time.perf_counter()
        call.sampler.remember(call.context, call.choices, answers)
        version = max((version for choice in call.choices for version in choice.policy_versions), default=None)
        completion = Completion(
            request_id=call.request_id,
            model=call.context.request.model,
            created=call.created,
            weight_version=None if version is None else weight_version(call.context.policy_id, version),
            answers=tuple(answers),
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            cached_tokens=call.choices[0].cached_tokens,
        )
        _count(call, completion, is_trainable=reason is None)
        return completion

    async def _record_unfinished(
        self, call: InFlightCall, status: CallStatus, reason: str, code: str | None = None
    ) -> None:
        """Args: code: of the error that answers a refused call"""
        if call.is_recorded:
            return
        if code == CONTEXT_EXCEEDED:
            metrics.CONTEXT_OVERFLOWS.inc()
        log.info("call unfinished", call_id=call.request_id, status=status, reason=reason)
        metrics.CALLS.labels(status).inc(len(call.choices))
        call.is_recorded = True
        with suppress(GatewayError):
            rows = [call.context.row(choice, status, reason, None) for choice in call.choices]
            call.release_room()
            await self._recorder.record([replace(row, finish_reason=code) for row in rows])


def _replayed(stored: Completion | Refusal) -> Completion:
    """Raises: BadRequest: the stored answer is a refusal"""
    metrics.REPLAYS.labels("store").inc()
    if isinstance(stored, Refusal):
        raise stored.error
    return stored


def _is_trained(attempt: Attempt, caller: Caller, defaults: CallDefaults) -> bool:
    """Whether a policy that trains answers, in a rollout that trains."""
    return is_training(attempt.rollout_id) and not attempt.is_greedy and caller.role not in defaults.frozen


def _delivery(attempt: Attempt, request_id: str, sequence: int, digest: bytes) -> NewDelivery:
    return NewDelivery(attempt.run_id, request_id, attempt.rollout_id, attempt.attempt, "", sequence, digest)


def _choices(request: ModelRequest, rollout_id: str, first_id: str) -> list[SampledTokens]:
    seed, call_ids = request.sampling.seed, [first_id, *(new_call_id() for _ in range(request.choices - 1))]
    if seed is None:
        return [SampledTokens(call_id, index, seed_of_call(call_id)) for index, call_id in enumerate(call_ids)]
    first = seed_of_rollout(seed, rollout_id)
    return [SampledTokens(call_id, index, first + index) for index, call_id in enumerate(call_ids)]


def _count(call: InFlightCall, completion: Completion, *, is_trainable: bool) -> None:
    count = len(call.choices)
    metrics.CALLS.labels(CallStatus.COMPLETED).inc(count)
    metrics.CALL_SECONDS.observe(time.perf_counter() - call.context.arrived_at)
    metrics.TOKENS.labels("prompt").inc(completion.prompt_tokens * count)
    metrics.TOKENS.labels("cached").inc(sum(choice.cached_tokens for choice in call.choices))
    metrics.TOKENS.labels("sampled").inc(completion.completion_tokens)
    metrics.UNTRAINABLE.inc(0 if is_trainable else count)
    first_tokens = [choice.first_token_at for choice in call.choices if choice.first_token_at is not None]
    if first_tokens:
        metrics.FIRST_TOKEN_SECONDS.observe(min(first_tokens) - call.context.arrived_at)
