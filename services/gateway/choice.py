"""One answer while it grows: what an engine tells of it, looked at before it is taken.

What is wrong in an engine's answer must be seen here: recorded, it would be trained.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import orjson

from leyden.libs.contracts.ids import parse_weight_version
from leyden.services.gateway.columns import Columns, whole_document
from leyden.services.gateway.connection import Take
from leyden.services.gateway.errors import BadRequest
from leyden.services.gateway.request import Json, Sampling
from leyden.services.gateway.tokens import Tokens
from leyden.services.gateway.told import Events, Told

_OVERFLOW_HINTS = ("context length", "longer than", "exceeds the maximum", "maximum allowed length")

LEAST_LOGPROB = -1e30
ROUNDING = 0.01
"""How far above 0 a log-probability may come by rounding."""

Finish = Literal["stop", "length", "abort"]
Progressed = Callable[[], None]
TopLogprobs = list[tuple[float, int]]


@dataclass(frozen=True, slots=True)
class Job:
    """What the choices of one request have in common. `max_tokens` already fits into the context."""

    run_id: str
    rollout_id: str
    prompt: Tokens
    sampling: Sampling
    temperature: float
    max_tokens: int
    vocab_size: int
    top_logprobs: int
    eos_ids: Sequence[int]
    stream: bool


@dataclass(slots=True, eq=False)
class Choice:
    """One answer while it grows; lists have one entry per sampled token. Times are `time.perf_counter()`."""

    call_id: str
    index: int
    seed: int | None
    sampled_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    finish: Literal["stop", "length"] | None = None
    cached_tokens: int = 0
    accepted_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None


class EngineLost(Exception):
    """An engine did not finish a request; the request may be sent again. `cause` is a metric's label."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(detail)
        self.cause = cause


class Absorber:
    """Moves what one engine request has told into the choice."""

    # As `Told` has them, and for the same reason.
    __slots__ = (
        "_base", "_budget", "_progressed", "_run_id", "_stream", "_top", "_vocab_size",
        "choice", "was_aborted",
    )  # fmt: skip

    def __init__(self, job: Job, choice: Choice, progressed: Progressed) -> None:
        self.choice = choice
        self.was_aborted = False
        self._run_id = job.run_id
        self._base = len(choice.sampled_ids)
        self._budget = job.max_tokens - self._base
        self._vocab_size = job.vocab_size
        self._top = job.top_logprobs
        self._progressed = progressed
        self._stream = job.stream

    @property
    def wants_tops(self) -> bool:
        """Whether likely alternatives to each token are of interest."""
        return self._top > 0

    def absorb(self, document: Json, began: float, first: int = 0) -> None:
        """Takes the tokens that are new.

        Args: first: how many tokens of this request come before those that the document lists
        Raises: EngineLost: the engine serves another run, or its answer lacks what must be recorded
        """
        if "error" in document:
            error = document["error"]
            raise refusal(int(error.get("code") or 500), str(error.get("message")))
        meta = document["meta_info"]
        ids, entries = document.get("output_ids") or [], meta.get("output_token_logprobs") or []
        told = meta.get("finish_reason")
        finish = None if told is None else _finish(told)
        if finish is not None and len(ids) != len(entries):
            raise ValueError(f"{len(ids)} tokens with {len(entries)} log-probabilities")
        if finish in {"stop", "length"} and not first + len(ids):
            raise ValueError("an answer of no tokens")
        if first + len(ids) > self._budget:
            raise ValueError(f"{first + len(ids)} tokens where {self._budget} were asked for")
        self._take(ids, entries, meta, first, began)
        if finish is not None:
            self._end(finish)

    def add(self, ids: list[int], entries: list[list[Any]]) -> None:
        """Takes new tokens that differ from the last one before them by nothing that an engine tells of tokens.

        Args: entries: of each token its log-probability and its id
        Raises: ValueError, LookupError, TypeError: there are too many, or one is none
        """
        choice = self.choice
        total = len(choice.sampled_ids) - self._base + len(ids)
        if total > self._budget:
            raise ValueError(f"{total} tokens where {self._budget} were asked for")
        logprobs = list(map(self._logprob, ids, entries))
        choice.sampled_ids += ids
        choice.logprobs += logprobs
        choice.policy_versions += choice.policy_versions[-1:] * len(ids)
        self._progressed()

    def _take(self, ids: list[int], entries: list[list[Any]] | Columns, meta: Json, first: int, began: float) -> None:
        choice = self.choice
        known, total = len(choice.sampled_ids) - self._base, first + min(len(ids), len(entries))
        versions = _policy_versions(meta, known, total, self._run_id)
        until = known + len(versions)
        if until > known:
            new = slice(known - first, until - first)
            tokens = ids[new]
            if isinstance(entries, Columns):
                logprobs = self._logprobs(tokens, entries[new])
            else:
                logprobs = list(map(self._logprob, tokens, entries[new]))
            tops = self._tops(meta, new) if self._top else ()
            if choice.accepted_at is None:
                choice.accepted_at = began
            if choice.first_token_at is None:
                choice.first_token_at = time.perf_counter() if self._stream else None
                choice.cached_tokens = int(meta.get("cached_tokens") or 0)
            choice.sampled_ids += tokens
            choice.logprobs += logprobs
            choice.policy_versions += versions
            choice.top_logprobs += tops
            self._progressed()
        if until < total:
            raise EngineLost("wrong_run", "the engine has changed to another run")

    def _tops(self, meta: Json, new: slice) -> list[TopLogprobs]:
        told = (meta.get("output_top_logprobs") or [])[new]
        return [[(self._logprob(entry[1], entry), entry[1]) for entry in top or []] for top in told]

    def _logprobs(self, tokens: list[int], columns: Columns) -> list[float]:
        """As `_logprob` of each of many, in a third of the time."""
        logprobs = columns.logprobs
        with suppress(struct.error):
            ids = np.frombuffer(struct.pack(f"<{len(tokens)}I", *tokens), "<u4")
            numbers = np.frombuffer(struct.pack(f"<{len(logprobs)}d", *logprobs), "<f8")
            are_ids = {*map(type, tokens)} == {int} and np.maximum.reduce(ids) < self._vocab_size
            # The reductions alone: numpy's methods take as long again to come to them.
            if are_ids and np.minimum.reduce(numbers) >= LEAST_LOGPROB and np.maximum.reduce(numbers) <= ROUNDING:
                return logprobs
        return list(map(self._logprob, tokens, zip(logprobs, columns.tokens, strict=True)))

    def _logprob(self, token: int, entry: Sequence[Any]) -> float:
        """A token's log-probability, once both are what they must be: recorded, a wrong one would be trained."""
        logprob, named = entry[0], entry[1]
        if type(token) is not int or named != token or not 0 <= token < self._vocab_size:
            raise ValueError(f"{token!r} with the log-probability of {named!r} is no token")
        if type(logprob) not in {float, int} or not LEAST_LOGPROB <= logprob <= ROUNDING:
            raise ValueError(f"{logprob!r} is no log-probability")
        return float(logprob)

    def _end(self, finish: Finish) -> None:
        if finish == "abort":
            self.was_aborted = True
            return
        self.choice.accepted_at = self.choice.accepted_at or time.perf_counter()
        self.choice.finish = finish


def following(answer: Absorber, began: float) -> Take:
    """Takes a stream's pieces: what each tells is absorbed at once."""
    events, told = Events(), Told(cuts=not answer.wants_tops)

    def take(piece: bytes) -> None:
        whole = events.of(piece)
        if len(whole) == 1 and (more := told.more(whole[0])) is not None:
            answer.add(*more)
            return
        for document, first in told.documents(whole):
            answer.absorb(document, began, first)

    return take


def collecting(answer: Absorber, began: float) -> Take:
    """Takes an answer's pieces, and absorbs it once it is whole."""
    pieces: list[bytes] = []

    def take(piece: bytes) -> None:
        if piece:
            pieces.append(piece)
        else:
            answer.absorb(whole_document(b"".join(pieces)), began)

    return take


def _finish(told: Json) -> Finish:
    kind = told["type"]
    return kind if kind in {"abort", "length"} else "stop"


def _policy_versions(meta: Json, start: int, end: int, run_id: str) -> list[int]:
    """The policy version of each token in [start, end), cut before the first that another run's weights sampled.

    Raises: EngineLost: the engine does not say which weights it serves
    """
    spans = meta.get("weight_versions") or [{"version": meta.get("weight_version"), "start": 0, "end": end}]
    versions: list[int] = []
    for span in spans:
        first, last = span["start"], span["end"]
        first, last = (first if first > start else start), (last if last < end else end)
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
    return versions


@lru_cache(maxsize=1024)
def _parsed_version(text: str) -> tuple[str, int]:
    # Each event of a stream names it again.
    return parse_weight_version(text)


def refusal(status: int, text: str) -> Exception:
    """What an engine's error means: the request's fault, or the engine's."""
    message = _message(text)
    if status not in {400, 413, 422}:
        return EngineLost("refused", f"HTTP {status}: {message}")
    overflow = any(hint in message.lower() for hint in _OVERFLOW_HINTS)
    return BadRequest(
        f"The engine refuses the request: {message}",
        param="messages" if overflow else None,
        code="context_length_exceeded" if overflow else "engine_refused",
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
