"""SGLang's `/generate`: writes the body of a request, and parses answers into validated tokens.

Every value is validated here, because recorded tokens become training data without another check.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from leyden.libs.contracts.conversation import Json
from leyden.libs.contracts.ids import parse_weight_version
from leyden.libs.contracts.samples import RoutedExperts
from leyden.libs.contracts.states import CONTEXT_EXCEEDED
from leyden.services.gateway.calls.context import SampledTokens, Sampling
from leyden.services.gateway.engine.routing import Chosen, cut_experts, decode_experts, read_experts, request_fields
from leyden.services.gateway.errors import BadRequest, Unavailable
from leyden.services.gateway.metrics import OTHER_PROMPTS

MIN_LOGPROB = -1e4
"""Least accepted log-probability of a sampled token; a sampler cannot draw one that is near it."""
MIN_ALTERNATIVE = -3.5e38
"""Least accepted log-probability of a likely alternative: SGLang has float32's least for one that a grammar forbids."""
MAX_LOGPROB = 0.01
"""Largest accepted log-probability: rounding can lift one above 0."""

PIECE_TOKENS = 1024
"""The engine sends an answer that its client wants in one piece by so many tokens, and the first token at once."""

_NO_ADAPTER = "lora adapter"
_OVERFLOW_HINTS = ("context length", "longer than", "exceeds the maximum", "maximum allowed length")


class EngineLost(Exception):
    """An engine did not finish a request; the client may send it again. `cause` is a label of the retry metric."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(detail)
        self.cause = cause


class UnknownVersion(EngineLost):
    """The engine names a policy version that is newer than the newest one known."""

    def __init__(self, version: int) -> None:
        super().__init__("unknown_version", f"the engine names policy version {version}, which does not exist")


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """The parameters that all choices of a model call share. `max_tokens` already fits into the context.

    Args: prompt_ids: [T] every id is in the vocabulary, because SGLang crashes on any other; constraint: SGLang's
        parameter with the grammar of the answer, or nothing; stream: the client reads the tokens as they come;
        routed_from: the engine returns the experts of the tokens from this position on; None: of none; version: alone
        may sample, None: any
    """

    run_id: str
    rollout_id: str
    pool: str
    prompt_ids: npt.NDArray[np.int32]
    sampling: Sampling
    temperature: float
    max_tokens: int
    vocab_size: int
    top_logprobs: int
    eos_ids: Sequence[int]
    stream: bool
    constraint: dict[str, str] = field(default_factory=dict)
    routed_from: int | None = None
    version: int | None = None


def request_body(
    request: EngineRequest,
    tokens: SampledTokens,
    request_id: str,
    weight_version: str | None,
    adapter: str | None = None,
) -> bytes:
    """Returns the JSON body for `/generate` that requests the tokens after those already sampled.

    Args: adapter: the name of the LoRA adapter that samples them
    """
    sampling, sampled = request.sampling, len(tokens.ids)
    parameters: Json = {
        "temperature": request.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": request.max_tokens - sampled,
        "stop": list(sampling.stop),
        "stop_token_ids": list(request.eos_ids),
        # SGLang would otherwise hide special tokens and cut the stop string from the text.
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
        **_shaping(sampling, sampled),
        **request.constraint,
    }
    if not request.stream:
        parameters["stream_interval"] = PIECE_TOKENS
    if tokens.seed is not None:
        parameters["sampling_seed"] = tokens.seed
    body: Json = {
        "input_ids": np.concatenate([request.prompt_ids, np.asarray(tokens.ids, dtype=np.int32)]),
        "rid": request_id,
        "sampling_params": parameters,
        "return_logprob": True,
        "top_logprobs_num": request.top_logprobs,
        # Always: the first event says when the engine began.
        "stream": True,
        **request_fields(request.routed_from),
    }
    if weight_version is not None:
        # Separates the prefix cache by weights: keys and values of other weights must not serve this prompt.
        body["extra_key"] = weight_version
    if adapter is not None:
        body["lora_path"] = adapter
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def _shaping(sampling: Sampling, sampled: int) -> Json:
    """Returns every parameter that changes the distribution, neutral ones too: SGLang would take those that are left
    out from its `--preferred-sampling-params`, and the tokens would train as if it had not."""
    values: Json = {
        "min_p": sampling.min_p,
        "min_new_tokens": max(0, sampling.min_tokens - sampled),
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
    }
    return values | ({"logit_bias": sampling.logit_bias} if sampling.logit_bias else {})


@dataclass(frozen=True, slots=True)
class Event:
    """A parsed event of an answer, and not validated."""

    meta: Json
    ids: list[int]
    experts: Chosen | None


def read_event(data: bytes) -> Event:
    """Parses an event; for threads where it is long.

    Raises: EngineLost: it is malformed, or the engine's error; BadRequest: the engine refuses the request
    """
    with _malformed():
        rest, encoded = cut_experts(data)
        document = orjson.loads(rest)
        if "error" in document:
            error = document["error"]
            raise refusal(int(error.get("code") or 500), str(error.get("message")))
        experts = None if encoded is None else decode_experts(encoded)
        return Event(document["meta_info"], document.get("output_ids") or [], experts)


@contextmanager
def _malformed() -> Iterator[None]:
    """Raises: EngineLost: for each error that a malformed value raises"""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise EngineLost("malformed", f"{type(error).__name__}: {error}") from error


class SampleBuilder:
    """Adds the tokens of one engine request to a choice.

    An event is cumulative (it repeats all tokens of the request so far) or incremental (it has the new tokens alone,
    as with `--incremental-streaming-output`).

    Versions: SGLang 0.5.23 reports the spans of weight versions with the last event alone. Until then the tokens of an
    event have the older one of the versions that this event and the one before it name, so that tokens of an engine
    that is lost before its last event never look newer than they are.

    `newest_version`: the builder believes no newer version of the run; infinite by default.

    Args: weight_version: that of every token, for an engine that several runs share; None: the engine reports it
    """

    def __init__(
        self,
        request: EngineRequest,
        tokens: SampledTokens,
        on_progress: Callable[[], None],
        weight_version: str | None = None,
    ) -> None:
        self._weight_version = weight_version
        self.was_aborted = False
        self.newest_version = math.inf
        self._request = request
        self._tokens = tokens
        self._on_progress = on_progress
        self._base = len(tokens.ids)
        self._sent_at = time.perf_counter()
        self._named: int | None = None
        """The version that the last event named."""

    def add_event(self, event: Event) -> None:
        """Adds the event's new tokens: all of them, or none of a malformed event.

        Raises: EngineLost: the answer is malformed, or another run's weights sampled a part of it (the tokens before
            that part are added); UnknownVersion; BadRequest: the engine refuses the request
        """
        # A malformed value raises before any token of the event is added.
        with _malformed():
            self._add(event.meta, event.ids, event.experts)

    def _add(self, meta: Json, ids: list[int], experts: Chosen | None) -> None:
        entries = meta.get("output_token_logprobs") or []
        finish = _finish_of(meta.get("finish_reason"))
        # An engine counts none for a request that it aborts in its queue.
        if finish != "abort":
            self._check_prompt(meta.get("prompt_tokens"))
        received = len(self._tokens.ids) - self._base
        total = meta.get("completion_tokens")
        start = 0 if total is None else total - len(ids)
        if len(ids) != len(entries):
            if finish == "abort":
                # SGLang repeats the last token of an incremental stream when it aborts a queued request.
                ids, entries, start = [], [], received
            elif finish is not None:
                raise ValueError(f"{len(ids)} tokens with {len(entries)} log-probabilities")
        end = start + min(len(ids), len(entries))
        self._check_range(start, end, received, finish)
        routed = None if finish in {None, "abort"} else self._routed(experts, self._base + max(end, received))
        self._extend(meta, ids, entries, start, end, is_last=finish is not None)
        if finish is not None:
            self._tokens.stalls.arrived(time.perf_counter(), 0)
        if finish == "abort":
            self.was_aborted = True
        elif finish is not None:
            self._check_stop(meta["finish_reason"].get("matched"))
            self._tokens.routed_experts = routed
            self._tokens.accepted_at = self._tokens.accepted_at or self._sent_at
            if not self._base:
                self._accepted(meta)
            self._tokens.finish = "length" if finish == "length" else "stop"

    def _routed(self, experts: Chosen | None, sampled: int) -> RoutedExperts | None:
        """The experts of the prompt and of so many sampled tokens; None where the request asks for none.

        Raises: Unavailable: the request asked for experts, and the engine returned none
        """
        if (start := self._request.routed_from) is None:
            return None
        return read_experts(experts, start, len(self._request.prompt_ids) + sampled)

    def _accepted(self, meta: Json) -> None:
        """Moves the acceptance to the moment at which the engine began, by its own count of seconds."""
        worked = meta.get("e2e_latency")
        if isinstance(worked, float | int) and worked >= 0:
            began = time.perf_counter() - worked + max(0.0, float(meta.get("queue_time") or 0.0))
            latest = self._tokens.first_token_at or time.perf_counter()
            self._tokens.accepted_at = min(max(began, self._sent_at), latest)

    def _check_prompt(self, prompt_tokens: int | None) -> None:
        """Raises: Unavailable: the engine saw another prompt than the one that would be recorded and trained"""
        sent = len(self._request.prompt_ids) + self._base
        if prompt_tokens is not None and prompt_tokens != sent:
            OTHER_PROMPTS.inc()
            raise Unavailable(
                f"The engine was sent {sent} prompt tokens and reports {prompt_tokens}: it saw another prompt than the"
                " one of the record, so the call failed. Start the engine without options that change prompts.",
                code="engine_prompt_mismatch",
                retry_after_seconds=1,
            )

    def _check_stop(self, matched: Any) -> None:
        """Raises: Unavailable: the engine names the token that ended the answer, and left it out"""
        if type(matched) is int and matched != self._tokens.ids[-1]:
            raise Unavailable(
                f"The engine says that token {matched} ended the answer, whose last token is {self._tokens.ids[-1]}: an"
                " answer without its stop token cannot be recorded exactly, so the call failed. Use an engine that"
                " obeys `no_stop_trim`.",
                code="engine_stop_stripped",
                retry_after_seconds=1,
            )

    def _check_range(self, start: int, end: int, received: int, finish: str | None) -> None:
        """Raises: ValueError: the event's tokens [start, end) cannot follow the received ones"""
        budget = self._request.max_tokens - self._base
        if not 0 <= start <= received:
            raise ValueError(f"tokens from number {start} on after {received} tokens")
        if end > budget:
            raise ValueError(f"{end} tokens where {budget} were asked for")
        if finish in {"stop", "length"} and not 0 < end >= received:
            raise ValueError(f"an answer of {end} tokens after {received} tokens")

    def _extend(
        self, meta: Json, ids: list[int], entries: list[Sequence[Any]], start: int, end: int, *, is_last: bool
    ) -> None:
        tokens, run_id = self._tokens, self._request.run_id
        received = len(tokens.ids) - self._base
        end = max(end, received)
        reported = None if self._weight_version else meta.get("weight_versions")
        version = self._weight_version or meta.get("weight_version")
        spans = reported or [{"version": version, "start": received, "end": end}]
        first = 0 if is_last and spans[0]["start"] == 0 else received
        versions = _policy_versions(spans, first, end, run_id)
        if max(versions, default=0) > self.newest_version:
            raise UnknownVersion(max(versions))
        if versions and not reported:
            named = versions[-1]
            older = named if self._named is None else min(self._named, named)
            versions = [older] * len(versions)
            self._named = named
        own_end = first + len(versions)
        if own_end < received:
            # The agent may have read these tokens already, so the call cannot drop them.
            message = "The engine was given to another run while it answered; try again."
            raise Unavailable(message, code="engine_unavailable", retry_after_seconds=1)
        new = slice(received - start, own_end - start)
        logprobs = [self._logprob(token, entry) for token, entry in zip(ids[new], entries[new], strict=True)]
        tops = self._top_logprobs(meta, new, len(logprobs)) if self._request.top_logprobs else []
        cached = int(meta.get("cached_tokens") or 0)
        if not 0 <= cached <= len(self._request.prompt_ids) + self._base:
            raise ValueError(f"{cached} cached tokens of a prompt of {len(self._request.prompt_ids)}")
        tokens.policy_versions[self._base + first :] = versions
        if logprobs:
            now = time.perf_counter()
            if not tokens.ids:
                tokens.accepted_at = self._sent_at
                tokens.first_token_at = now
                tokens.cached_tokens = cached
            tokens.ids += ids[new]
            tokens.logprobs += logprobs
            tokens.top_logprobs += tops
            tokens.stalls.arrived(now, len(logprobs))
            self._on_progress()
        if own_end < end:
            raise EngineLost("wrong_run", "the engine has changed to another run")

    def _top_logprobs(self, meta: Json, new: slice, count: int) -> list[list[tuple[float, int]]]:
        tops = (meta.get("output_top_logprobs") or [])[new]
        if len(tops) != count:
            raise ValueError(f"{count} tokens with {len(tops)} lists of likely alternatives")
        return [
            [(self._logprob(entry[1], entry, least=MIN_ALTERNATIVE), entry[1]) for entry in top or []] for top in tops
        ]

    def _logprob(self, token: int, entry: Sequence[Any], least: float = MIN_LOGPROB) -> float:
        """Returns the log-probability of a token once both are valid."""
        logprob, named = entry[0], entry[1]
        if type(token) is not int or named != token or not 0 <= token < self._request.vocab_size:
            raise ValueError(f"{token!r} with the log-probability of {named!r} is no token")
        if type(logprob) not in {float, int} or not least <= logprob <= MAX_LOGPROB:
            raise ValueError(f"{logprob!r} is no log-probability")
        return float(logprob)


def _finish_of(reason: Json | None) -> str | None:
    """None, "abort", "length", or "stop" for any other type.

    Raises: EngineLost, BadRequest: the engine aborted the request because of an error
    """
    if reason is None:
        return None
    kind = str(reason["type"])
    if kind == "abort" and (status := reason.get("status_code")) is not None:
        raise refusal(int(status), str(reason.get("message")))
    return kind if kind in {"abort", "length"} else "stop"


def _policy_versions(spans: list[Json], start: int, end: int, run_id: str) -> list[int]:
    """Returns the policy versions of the tokens [start, end), up to the first token of another run's weights.

    Raises: ValueError: the spans omit tokens; EngineLost: the engine does not report `run:version`
    """
    versions: list[int] = []
    for span in spans:
        first, last = max(span["start"], start), min(span["end"], end)
        if last <= first:
            continue
        if first != start + len(versions):
            raise ValueError("spans of weight versions do not follow one another")
        try:
            serving, version = _parsed_version(str(span["version"]))
        except ValueError as error:
            raise EngineLost("wrong_run", str(error)) from error
        if serving != run_id:
            return versions
        versions += [version] * (last - first)
    if len(versions) < end - start:
        raise ValueError("spans of weight versions end before the tokens")
    return versions


@lru_cache(maxsize=1024)
def _parsed_version(text: str) -> tuple[str, int]:
    # Cached: every event of a stream repeats the weight version.
    return parse_weight_version(text)


def refusal(status: int, text: str) -> Exception:
    """Returns the exception for an engine's error: `BadRequest` when the request is at fault, else `EngineLost`."""
    message = _message(text)
    if status not in {400, 413, 422}:
        return EngineLost("refused", f"HTTP {status}: {message}")
    if _NO_ADAPTER in message.lower():
        # An engine that restarted has none until the controller loads them again.
        return EngineLost("adapter", message)
    overflow = any(hint in message.lower() for hint in _OVERFLOW_HINTS)
    return BadRequest(
        f"The engine refuses the request: {message}",
        param="messages" if overflow else None,
        code=CONTEXT_EXCEEDED if overflow else "engine_refused",
    )


def _message(text: str) -> str:
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text[:500]
    if isinstance(document, dict):
        inner = document.get("error")
        found = inner.get("message") if isinstance(inner, dict) else document.get("message", inner)
        return str(found or text)[:500]
    return text[:500]
