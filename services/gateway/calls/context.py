"""Requests, samples and answers without any wire format: dialects translate requests to and answers from these."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from leyden.libs.contracts.conversation import Dialect, Json, Turn

TopLogprobs = list[tuple[float, int]]
"""Log-probability and token of the likeliest alternatives, best first."""

FinishReason = Literal["stop", "length"]


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

    `tools` are JSON objects in the form that chat templates read: {"type": "function", "function": {…}}. `parameters`
    is the request as the agent sent it, without conversation and tools. `body_sha256` identifies an SDK's retry.
    `raw_prompt`, text or token ids, is the prompt of a request without a conversation: no template renders it.
    `answer_schema` is the JSON Schema of the answer's text, and `required_tools` names tools of which one must be
    called: engines constrain decoding to them. `asks_for_reasoning`: it is split from the content even if the model's
    template shows none.
    """

    dialect: Dialect
    model: str
    turns: tuple[Turn, ...]
    tools: tuple[Json, ...]
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


@dataclass(slots=True, eq=False)
class SampledTokens:
    """The tokens of one choice while they arrive; each list has one entry a token. Times are `time.perf_counter()`."""

    call_id: str
    index: int
    seed: int | None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    cached_tokens: int = 0
    accepted_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None


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
    the stop string that ended the text.
    """

    index: int
    turn: Turn
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] | None
    stop: str | None = None


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
