"""Writes the durable record of calls: an answer leaves only after the transaction of its row has committed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from leyden.libs.contracts import untrainable
from leyden.libs.contracts.states import CallStatus, Continuation
from leyden.libs.store.attempts import AttemptKey
from leyden.libs.store.database import Database, Refused, StoreAway
from leyden.libs.store.group_commit import GroupCommit
from leyden.libs.store.records.calls import CallDefaults, NewCall, write_calls
from leyden.libs.telemetry import logger
from leyden.services.gateway.auth import Attempt
from leyden.services.gateway.calls.context import Answer, ModelRequest, Prompt, SampledTokens
from leyden.services.gateway.calls.prepare import Agent
from leyden.services.gateway.errors import GatewayError, Unavailable
from leyden.services.gateway.metrics import RECORD_ROWS, RECORD_SECONDS
from leyden.services.gateway.records.quotas import CALL_BYTES, AttemptQuota, call_bytes

MAX_ROWS = 512
GREEDY_BELOW = 1e-6
"""Temperatures that engines treat as 0 (SGLang's own bound)."""

log = logger()


@dataclass(frozen=True, slots=True)
class CallContext:
    """The facts of a call before its first token. `arrived_at` is `perf_counter()`, `sequence` the store's time in ns.

    `request_id` is the id of its first choice, which names the answer; `policy_run` the run whose policy answers.
    """

    attempt: Attempt
    request: ModelRequest
    request_id: str
    request_sha256: bytes
    prompt: Prompt
    constraint: dict[str, str]
    temperature: float
    defaults: CallDefaults
    trace_id: str | None
    parent_span_id: str | None
    agent: Agent
    role: str | None
    policy_run: str
    continuation: Continuation
    arrived_at: float
    sequence: int


class Recorder:
    """Writes calls that end at about the same time in one transaction.

    Args: hold_seconds: how long a call waits while the store is down; quota: of the calls of an attempt
    """

    def __init__(self, database: Database, *, hold_seconds: float, quota: AttemptQuota) -> None:
        self._database = database
        self._quota = quota
        self._commits = GroupCommit[NewCall](self._write, max_items=MAX_ROWS, hold_seconds=hold_seconds)
        self.run = self._commits.run
        self.drain = self._commits.drain

    def check_room(self, attempt: AttemptKey, choices: int) -> None:
        """Passes an attempt that may store so many more calls. Raises: BadRequest."""
        self._quota.check(attempt, [CALL_BYTES] * choices)

    async def record(self, rows: Sequence[NewCall]) -> None:
        """Returns once the rows, the choices of one request, are durable. Cancelling the wait does not stop the write.

        Raises: Unavailable: the store was down for longer than `hold_seconds`; GatewayError: the store refuses the rows
        """
        started = time.perf_counter()
        attempt = AttemptKey(rows[0].rollout_id, rows[0].attempt)
        try:
            with self._quota.storing(attempt, list(map(call_bytes, rows))):
                await self._commits.submit(rows)
        except StoreAway as error:
            message = "The call's record could not be stored, so its answer is withheld; try again."
            raise Unavailable(message, code="store_unavailable", retry_after_seconds=5) from error
        except Refused as error:
            log.error("call refused by the store", call_id=rows[0].id, error=str(error))
            raise GatewayError("The call's record was refused by the store.", code="record_refused") from error
        RECORD_SECONDS.observe(time.perf_counter() - started)

    async def _write(self, rows: Sequence[NewCall], may_exist: bool) -> None:
        await write_calls(self._database, rows, may_exist)
        RECORD_ROWS.observe(len(rows))


def untrainable_reason(call: CallContext) -> str | None:
    """Why the call cannot train: its role, or parameters that make the log-probabilities differ from the policy's.

    Greedy decoding does not sample from the policy. None: the call trains.
    """
    if call.attempt.is_greedy:
        return untrainable.GREEDY_ROLLOUT
    if call.role is not None and call.role in call.defaults.frozen:
        return untrainable.of_frozen_policy(call.role)
    if call.defaults.train is not None and call.role not in call.defaults.train:
        return untrainable.of_role(call.role)
    request, sampling = call.request, call.request.sampling
    leaves_out = call.defaults.constrained_calls == "leave_out"
    changed = {
        "temperature": call.temperature < GREEDY_BELOW,
        "top_p": sampling.top_p != 1.0,
        "top_k": sampling.top_k > 0,
        "min_p": sampling.min_p > 0,
        "min_tokens": sampling.min_tokens > 0,
        "frequency_penalty": sampling.frequency_penalty != 0,
        "presence_penalty": sampling.presence_penalty != 0,
        "repetition_penalty": sampling.repetition_penalty != 1.0,
        "logit_bias": bool(sampling.logit_bias),
        "json_schema": leaves_out and request.answer_schema is not None,
        "tool_choice": leaves_out and bool(request.required_tools),
    }
    names = [name for name, is_changed in changed.items() if is_changed]
    return untrainable.of_parameters(names) if names else None


def call_row(
    call: CallContext, sampled: SampledTokens, status: CallStatus, reason: str | None, answer: Answer | None
) -> NewCall:
    """Returns the row of one choice: the turns and tokens that it adds to its parent call, or all without a parent.

    Args: reason: why its tokens cannot train; None when they can
    """
    prompt, request = call.prompt, call.request
    ended_at = sampled.ended_at or time.perf_counter()
    versions = sampled.policy_versions
    return NewCall(
        run_id=call.attempt.run_id,
        id=sampled.call_id,
        rollout_id=call.attempt.rollout_id,
        attempt=call.attempt.attempt,
        request_id=call.request_id,
        choice=sampled.index,
        sequence=call.sequence,
        status=status,
        trainable=reason is None,
        untrainable_reason=reason,
        masks_forced=request.is_constrained and call.defaults.constrained_calls == "mask",
        request_sha256=call.request_sha256,
        dialect=request.dialect,
        request=request.parameters,
        parent_call_id=prompt.parent_call_id,
        shared_turns=prompt.shared_turns,
        shared_tokens=prompt.shared_tokens,
        turns=request.turns[prompt.shared_turns :],
        tools=request.tools if prompt.parent_call_id is None else None,
        answer=None if answer is None else answer.turn,
        prompt_ids=prompt.ids[prompt.shared_tokens :].astype("<i4").tobytes(),
        sampled_ids=np.asarray(sampled.ids, dtype="<i4").tobytes(),
        generator_logprobs=np.asarray(sampled.logprobs, dtype="<f4").tobytes(),
        policy_versions=np.asarray(versions, dtype="<i4").tobytes(),
        prompt_tokens=len(prompt.ids),
        completion_tokens=len(sampled.ids),
        cached_tokens=sampled.cached_tokens,
        min_policy_version=min(versions, default=None),
        max_policy_version=max(versions, default=None),
        temperature=call.temperature,
        finish_reason=None if answer is None else answer.finish_reason,
        trace_id=call.trace_id,
        parent_span_id=call.parent_span_id,
        agent=call.agent.id,
        agent_name=call.agent.name,
        role=call.role,
        continuation=call.continuation,
        queued_seconds=(sampled.accepted_at or ended_at) - call.arrived_at,
        first_token_seconds=None if sampled.first_token_at is None else sampled.first_token_at - call.arrived_at,
        total_seconds=ended_at - call.arrived_at,
    )
