"""The nouns of a call, without any wire format: attempt, agent, request, prompt, samples, answer, row."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

import numpy as np
import numpy.typing as npt

from leyden.libs.contracts import untrainable
from leyden.libs.contracts.conversation import Dialect, Json, Tool, Turn
from leyden.libs.contracts.ids import is_training
from leyden.libs.contracts.samples import RoutedExperts
from leyden.libs.contracts.states import CallStatus, Continuation
from leyden.libs.store.attempts import AttemptKey
from leyden.libs.store.records.agent_objects import AttemptOfRun
from leyden.libs.store.records.calls import CallDefaults, NewCall

TopLogprobs = list[tuple[float, int]]
"""Log-probability and token of the likeliest alternatives, best first."""

FinishReason = Literal["stop", "length"]
GREEDY_BELOW = 1e-6
"""Temperatures that engines treat as 0 (SGLang's own bound)."""
TOKEN_SECONDS = 0.1
"""A token's time at an engine that has not answered yet; that of a slow one, so that no healthy one seems to stall."""
LATE_SECONDS = 1.0
LATE_FACTOR = 2.0
REMEMBERED_EVENTS = 31


@dataclass(frozen=True, slots=True)
class Attempt:
    """The attempt whose agent sends the request."""

    run_id: str
    rollout_id: str
    attempt: int
    is_greedy: bool = False

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(self.rollout_id, self.attempt)

    @property
    def of_run(self) -> AttemptOfRun:
        return AttemptOfRun(self.run_id, self.rollout_id, self.attempt)


def seed_of_rollout(seed: int, rollout_id: str) -> int:
    """Returns the seed that engines get for an agent's seed, from 0 to 2^62 - 1: another one in each rollout.

    Agents send one seed in all rollouts. Siblings would sample equal answers, and a group of equals teaches nothing.
    """
    return _hash62(f"{seed}:{rollout_id}")


def seed_of_call(call_id: str) -> int:
    """Returns the seed that engines get where an agent sends none, from 0 to 2^62 - 1: another one for each call.

    SGLang gives all requests without a seed the same one where it infers deterministically: siblings would be equal.
    """
    return _hash62(call_id)


def _hash62(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 2


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent's fingerprint. `id` hashes instructions, tool names and header to 16 hex digits; `name` may be None."""

    id: str
    name: str | None


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters. `temperature` and `max_tokens` are None where the request does not set them."""

    temperature: float | None = None
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    min_tokens: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Json = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    seed: int | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A validated request to the model, independent of its wire format.

    `parameters` is the request as the agent sent it, without conversation and tools. `body_sha256` identifies an SDK's
    retry. `raw_prompt`, text or token ids, is the prompt of a request without a conversation: no template renders it.
    `answer_schema` is the JSON Schema of the answer's text, and `required_tools` names tools of which one must be
    called: engines constrain decoding to them. `asks_for_reasoning`: it is split from the content even if the model's
    template shows none.
    """

    dialect: Dialect
    model: str
    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...]
    parses_tool_calls: bool
    parallel_tool_calls: bool
    stream: bool
    include_usage: bool
    choices: int
    logprobs: bool
    top_logprobs: int
    sampling: Sampling
    template_options: Json
    parameters: Json
    body_sha256: bytes
    raw_prompt: str | tuple[int, ...] | None = field(default=None, kw_only=True)
    answer_schema: Json | None = field(default=None, kw_only=True)
    required_tools: tuple[str, ...] = field(default=(), kw_only=True)
    asks_for_reasoning: bool = field(default=False, kw_only=True)

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar constrains the answer."""
        return self.answer_schema is not None or bool(self.required_tools)


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """The prompt's tokens, and how much of the prompt the call's row refers to in its parent call's row.

    `ids` is int32[prompt_tokens]. The row omits the first `shared_turns` turns and `shared_tokens` tokens: they equal
    the beginning of the parent call with its answer. `is_fork`: the conversation contains an earlier answer of this
    attempt, but the prompt could not reuse its tokens.
    """

    ids: npt.NDArray[np.int32]
    parent_call_id: str | None
    shared_turns: int
    shared_tokens: int
    is_fork: bool


class Stalls:
    """The times after a choice's first token in which its engine sampled nothing: the client waits for the platform.

    An event with n tokens is late when it comes more than a second after twice the time that n tokens usually take. The
    time beyond their usual one is then a stall. A token usually takes the median of the answer's own tokens; the
    engine's median counts twice among them, so that it decides where the answer has hardly begun. After the loss of an
    engine all time since the last token is a stall, because the client gets nothing of it.

    Times are `time.perf_counter()`. `paces`: seconds a token of the latest events.
    """

    __slots__ = ("_found", "_is_lost", "_last_at", "_piece", "_usual", "paces")

    def __init__(self) -> None:
        self.paces: deque[float] = deque(maxlen=REMEMBERED_EVENTS)
        self._found: list[tuple[float, float]] = []
        self._last_at: float | None = None
        self._is_lost = False
        self._usual = TOKEN_SECONDS
        self._piece = 1

    def begin(self, usual: float, piece: int) -> None:
        """Another request to an engine begins. usual: its seconds a token; piece: tokens of its events at most."""
        self.paces.clear()
        self._usual, self._piece = usual, piece

    def arrived(self, at: float, count: int) -> None:
        """Notes an event with so many new tokens; 0 for the end of an answer."""
        if (last_at := self._last_at) is not None:
            gap = at - last_at
            if self._is_lost:
                self._found.append((last_at, at))
            elif gap > LATE_SECONDS and (stalled := self._stalled(gap, count)):
                # Nobody knows whether it came before the tokens or after them.
                self._found.append((last_at, last_at + stalled))
            if count and not self._is_lost:
                self.paces.append(gap / count)
        elif not count:
            return
        self._last_at, self._is_lost = at, False

    def lose(self) -> None:
        """The engine was lost: all time until the next token is a stall."""
        self._is_lost = True

    def seconds(self, until: float) -> float:
        """How long they lasted up to a moment."""
        found = sum(max(0.0, min(end, until) - begin) for begin, end in self._found)
        if self._last_at is None or until <= self._last_at:
            return found
        gap = until - self._last_at
        return found + (gap if self._is_lost else self._stalled(gap, self._piece))

    def _stalled(self, gap: float, count: int) -> float:
        due = count * median([self._usual, self._usual, *self.paces])
        return gap - due if gap > LATE_SECONDS + LATE_FACTOR * due else 0.0


@dataclass(slots=True, eq=False)
class SampledTokens:
    """The tokens of one choice while they arrive; each list has one entry a token. Times are `time.perf_counter()`.

    `written_ids`: the answer of another provider as the run's own model would write it; `routed_experts`: those of
    prompt and answer from `CallContext.routed_from` on.
    """

    call_id: str
    index: int
    seed: int | None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    cached_tokens: int = 0
    written_ids: npt.NDArray[np.int32] | None = None
    routed_experts: RoutedExperts | None = None
    accepted_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    stalls: Stalls = field(default_factory=Stalls)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token as text, its natural log-probability, and the likeliest tokens in its place."""

    text: str
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished choice: the assistant's turn as it is stored, and its finish reason.

    `finish_reason` is stop, length or tool_calls. `logprobs` is None where the request does not ask for them. `stop` is
    the stop string that ended the text. `reasoning_tokens` of the answer's tokens are its reasoning and the marks
    around it; None where their number is unknown.
    """

    index: int
    turn: Turn
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] | None
    stop: str | None = None
    reasoning_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A complete answer with all its choices. `created` is in seconds since the epoch.

    `weight_version` names the newest weights that sampled a token. `cached_tokens` of the prompt came from the engine's
    prefix cache.
    """

    request_id: str
    model: str
    created: int
    weight_version: str | None
    answers: tuple[Answer, ...]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def reasoning_tokens(self) -> int | None:
        """Those of all answers; None where one has an unknown number."""
        counts = [answer.reasoning_tokens for answer in self.answers]
        return None if None in counts else sum(filter(None, counts))


@dataclass(frozen=True, slots=True)
class CallContext:
    """The facts of a call before its first token. `arrived_at` is `perf_counter()`, `sequence` the store's time in ns.

    `request_id` is the id of its first choice, which names the answer; `policy_id` the policy that answers.
    """

    attempt: Attempt
    request: ModelRequest
    request_id: str
    request_sha256: bytes
    prompt: Prompt
    constraint: dict[str, str]
    temperature: float
    asked: Json | None
    defaults: CallDefaults
    trace_id: str | None
    parent_span_id: str | None
    agent: Agent
    role: str | None
    policy_id: str
    continuation: Continuation
    arrived_at: float
    sequence: int
    is_reroll: bool = False

    @property
    def untrainable_reason(self) -> str | None:
        """Why the call cannot train: its role, or parameters that make the log-probabilities differ from the policy's.

        Greedy decoding does not sample from the policy. None: the call trains.
        """
        if self.attempt.is_greedy:
            return untrainable.GREEDY_ROLLOUT
        if self.is_reroll:
            return untrainable.REROLL
        if self.role is not None and self.role in self.defaults.frozen:
            return untrainable.of_frozen_policy(self.role)
        if self.defaults.train is not None and self.role not in self.defaults.train:
            return untrainable.of_role(self.role)
        request, sampling = self.request, self.request.sampling
        leaves_out = self.defaults.constrained_calls == "leave_out"
        changed = {
            "temperature": self.temperature < GREEDY_BELOW,
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

    @property
    def routed_from(self) -> int | None:
        """Position of the first token of which the row needs the experts; None where the trainer replays none.

        The parent's row has those before it: of its own last token there is no record, because nothing followed.
        """
        trains = is_training(self.attempt.rollout_id) and not self.attempt.is_greedy and not self.is_reroll
        if not (self.defaults.replays_routing and trains and self.policy_id == self.attempt.run_id):
            return None
        return max(0, self.prompt.shared_tokens - 1)

    def row(self, sampled: SampledTokens, status: CallStatus, reason: str | None, answer: Answer | None) -> NewCall:
        """Returns the row of one choice: the turns and tokens that it adds to its parent call, or all without a parent.

        Args: reason: why its tokens cannot train; None when they can
        """
        prompt, request = self.prompt, self.request
        ended_at = sampled.ended_at or time.perf_counter()
        versions = sampled.policy_versions
        return NewCall(
            run_id=self.attempt.run_id,
            id=sampled.call_id,
            rollout_id=self.attempt.rollout_id,
            attempt=self.attempt.attempt,
            request_id=self.request_id,
            choice=sampled.index,
            sequence=self.sequence,
            status=status,
            trainable=reason is None,
            untrainable_reason=reason,
            masks_forced=request.is_constrained and self.defaults.constrained_calls == "mask",
            request_sha256=self.request_sha256,
            dialect=request.dialect,
            request=request.parameters,
            parent_call_id=prompt.parent_call_id,
            shared_turns=prompt.shared_turns,
            shared_tokens=prompt.shared_tokens,
            turns=request.turns[prompt.shared_turns :],
            tools=[tool.document for tool in request.tools] if prompt.parent_call_id is None else None,
            answer=None if answer is None else answer.turn,
            prompt_ids=prompt.ids[prompt.shared_tokens :].astype("<i4").tobytes(),
            sampled_ids=np.asarray(sampled.ids, dtype="<i4").tobytes(),
            written_ids=None if sampled.written_ids is None else sampled.written_ids.astype("<i4").tobytes(),
            routed_experts=None if sampled.routed_experts is None else sampled.routed_experts.stored(),
            generator_logprobs=np.asarray(sampled.logprobs, dtype="<f4").tobytes(),
            policy_versions=np.asarray(versions, dtype="<i4").tobytes(),
            prompt_tokens=len(prompt.ids),
            completion_tokens=len(sampled.ids),
            cached_tokens=sampled.cached_tokens,
            min_policy_version=min(versions, default=None),
            max_policy_version=max(versions, default=None),
            temperature=self.temperature,
            asked=self.asked,
            finish_reason=None if answer is None else answer.finish_reason,
            trace_id=self.trace_id,
            parent_span_id=self.parent_span_id,
            agent=self.agent.id,
            agent_name=self.agent.name,
            role=self.role,
            continuation=self.continuation,
            queued_seconds=(sampled.accepted_at or ended_at) - self.arrived_at,
            first_token_seconds=None if sampled.first_token_at is None else sampled.first_token_at - self.arrived_at,
            total_seconds=ended_at - self.arrived_at,
        )
