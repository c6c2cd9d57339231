"""Asks providers' models for scores, and repeats a vote that has none: a judge that fails gives no 0.

Calls of judges are no rows of `model_calls`, so that nothing can train on them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, TypeVar, cast

import httpx
from prometheus_client import Counter as Metric

from leyden.libs.contracts.config import graders
from leyden.libs.contracts.ledger import JudgeUse
from leyden.libs.contracts.states import ComponentState
from leyden.libs.grading.comparing import Group
from leyden.libs.grading.facts import AttemptFacts, MissingField
from leyden.libs.grading.grade import Grade, cut, of_missing
from leyden.libs.grading.judging import Question, grade_of, question_of, tokens_of
from leyden.libs.grading.pool import Graded
from leyden.libs.service.secrets import read_secret
from leyden.services.grader.prices import JudgeProvider, Payer

CALLS = Metric("grader_judge_calls_total", "Calls of judges by their result.", ["provider", "result"])
TOKENS = Metric("grader_judge_tokens_total", "Tokens that providers of judges counted.", ["provider", "kind"])

_Vote = TypeVar("_Vote")

MAX_ANSWER_TOKENS = 4096
MAX_ANSWER_BYTES = 2**20
MAX_WRONG_ANSWERS = 3
"""Answers without a score, after which a vote has failed."""
MAX_VOTES = 20_000
"""Votes that a process remembers."""
MAX_PAUSE_SECONDS = 60.0
PASSES = frozenset({408, 409, 425, 429})
"""Statuses beside 5xx that a later request need not meet."""


class NoVote(Exception):
    """A call has no score. `repeat`: whether another call may have one; `pause_seconds`: as the provider asks."""

    def __init__(self, cause: str, result: str, *, repeat: bool = True, pause_seconds: float = 0.0) -> None:
        super().__init__(cause)
        self.result = result
        self.repeat = repeat
        self.pause_seconds = pause_seconds


class Unread(NoVote):
    """A call whose question was sent, and whose answer was not read: its provider may charge for both."""


class Judge:
    """Grades while it is open.

    Args: calls: the most at once; seconds: the limit of one; patience_seconds: a vote whose provider does not answer
        has failed so long after its first try; pause_seconds: after the first failure, doubled with each
    """

    def __init__(
        self,
        providers: Mapping[str, JudgeProvider],
        *,
        calls: int,
        seconds: float,
        patience_seconds: float = 300.0,
        pause_seconds: float = 1.0,
    ) -> None:
        self._providers = providers
        self._keys = {name: read_secret(None, one.api_key_file) for name, one in providers.items()}
        self._room = asyncio.Semaphore(calls)
        self._patience_seconds = patience_seconds
        self._pause_seconds = pause_seconds
        self._votes: dict[bytes, asyncio.Task[Any]] = {}
        self._used: dict[str, JudgeUse] = {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=calls)
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(seconds, connect=5.0), limits=limits, trust_env=False)
        self._seconds = seconds

    async def grade(
        self, grader: graders.ScoreModel, facts: AttemptFacts, payer: Payer | None = None, least: float = 0.0
    ) -> Graded:
        """Returns the grade, which has failed if one of the votes has.

        Args: payer: None counts nothing; least: the value of an output without a text
        """
        began = time.perf_counter()
        try:
            question = question_of(grader, facts)
            found = grade_of(question, await self._all_votes(question, grader.votes, payer))
        except MissingField as error:
            found = of_missing(error, least)
        except NoVote as error:
            found = Grade(ComponentState.FAILED, explanation=cut(str(error)))
        return Graded(found, time.perf_counter() - began)

    def take_use(self, run_id: str) -> JudgeUse | None:
        """Returns what a run's judges have used since the last time."""
        return self._used.pop(run_id, None)

    def add_use(self, run_id: str, use: JudgeUse) -> None:
        """Adds what is to be counted the next time."""
        self._used[run_id] = self._used.get(run_id, JudgeUse()).plus(use)

    async def compare(
        self,
        grader: graders.RelativeModel,
        siblings: Sequence[AttemptFacts],
        payer: Payer | None = None,
        least: float = 0.0,
    ) -> list[Graded]:
        """Returns the grades of the attempts of a group, all of which have failed if one of the votes has."""
        began = time.perf_counter()
        group = Group(grader, siblings, least)
        question = group.question()
        try:
            found = group.grades(await self._all_votes(question, grader.votes, payer) if question else ())
        except NoVote as error:
            found = group.failed(str(error))
        return [Graded(one, time.perf_counter() - began) for one in found]

    async def duel(
        self, grader: graders.RelativeModel, mine: AttemptFacts, rival: AttemptFacts, payer: Payer | None = None
    ) -> Graded:
        """Returns 1 where the first of two attempts at a task wins, 0 where it loses, and 0.5 for a tie."""
        began = time.perf_counter()
        group = Group(grader, [mine, rival])
        try:
            votes = await asyncio.gather(*(self._all_votes(one, grader.votes, payer) for one in group.both_orders()))
            found = group.winner(votes)
        except NoVote as error:
            found = Grade(ComponentState.FAILED, explanation=cut(str(error)))
        return Graded(found, time.perf_counter() - began)

    async def close(self) -> None:
        """Ends all calls."""
        for task in self._votes.values():
            task.cancel()
        await asyncio.gather(*self._votes.values(), return_exceptions=True)
        await self._http.aclose()

    async def _all_votes(self, question: Question[_Vote], count: int, payer: Payer | None) -> list[_Vote]:
        provider = self._providers.get(question.provider)
        if payer is not None and payer.has_cap and provider is not None and provider.price is None:
            # Nothing would hold the run's cap.
            raise NoVote(
                f"provider {question.provider} has no price, and reward.judge_cost bounds the run: add `price` to it in"
                " GRADER_PROVIDERS",
                "unknown",
                repeat=False,
            )
        asked = (self._vote(question, number, payer) for number in range(count))
        # All of them to their ends, so that what they used counts for the run, also where one of them fails.
        votes = await asyncio.gather(*asked, return_exceptions=True)
        if failure := next((one for one in votes if isinstance(one, BaseException)), None):
            raise failure
        return cast(list[_Vote], votes)

    async def _vote(self, question: Question[_Vote], number: int, payer: Payer | None) -> _Vote:
        """Equal questions share their votes by number, so that equal texts have equal scores, and a retry costs
        nothing. The first asker pays."""
        key = hashlib.sha256(repr((question, number)).encode()).digest()
        if key not in self._votes:
            while len(self._votes) >= MAX_VOTES:
                del self._votes[next(iter(self._votes))]
            self._votes[key] = asyncio.create_task(self._ask(question, payer))
            self._votes[key].add_done_callback(lambda ended: self._forget_failure(key, ended))
        # Another attempt may wait for the same vote.
        vote: _Vote = await asyncio.shield(self._votes[key])
        return vote

    def _forget_failure(self, key: bytes, ended: asyncio.Task[Any]) -> None:
        if (ended.cancelled() or ended.exception() is not None) and self._votes.get(key) is ended:
            del self._votes[key]

    async def _ask(self, question: Question[_Vote], payer: Payer | None) -> _Vote:
        """Asks until an answer counts. Raises: NoVote"""
        ends = None
        wrong, pause = 0, self._pause_seconds
        while True:
            try:
                async with self._room:
                    vote = await self._answer(question, payer)
            except NoVote as error:
                CALLS.labels(question.provider, error.result).inc()
                wrong += error.result == "wrong"
                ends = ends or time.monotonic() + self._patience_seconds
                wait = max(error.pause_seconds, pause) * random.uniform(1.0, 1.25)  # noqa: S311
                if not error.repeat or wrong == MAX_WRONG_ANSWERS or time.monotonic() + wait > ends:
                    raise
            else:
                CALLS.labels(question.provider, "scored").inc()
                return vote
            await asyncio.sleep(wait)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    async def _answer(self, question: Question[_Vote], payer: Payer | None) -> _Vote:
        name = question.provider
        provider = self._providers.get(name)
        if provider is None:
            known = ", ".join(sorted(self._providers)) or "none"
            raise NoVote(
                f"the grader knows no provider {name!r}: GRADER_PROVIDERS names {known}", "unknown", repeat=False
            )
        asked = question.asked()
        size = len(json.dumps(asked.document))
        try:
            body = await self._body(name, provider, asked.document)
        except Unread:
            # The most that the answer may have: else a judge that never answers in time is asked for ever.
            self._count(payer, provider, (size // 4, MAX_ANSWER_TOKENS))
            raise
        self._count(payer, provider, tokens_of(body, size))
        try:
            vote, usage = asked.read(body)
        except ValueError as error:
            raise NoVote(f"provider {name}: {error}", "wrong") from error
        TOKENS.labels(name, "prompt").inc(usage.prompt_tokens or 0)
        TOKENS.labels(name, "completion").inc(usage.completion_tokens or 0)
        return vote

    def _count(self, payer: Payer | None, provider: JudgeProvider, used: tuple[int, int]) -> None:
        """Adds a call to what its run has used. Args: used: tokens of the question and of the answer"""
        if payer is not None:
            tokens, price = sum(used), provider.price
            use = JudgeUse(tokens, cost=price.cost(*used)) if price else JudgeUse(tokens, unpriced_tokens=tokens)
            self.add_use(payer.run_id, use)

    async def _body(self, name: str, provider: JudgeProvider, question: Mapping[str, Any]) -> bytes:
        """Raises: NoVote, Unread"""
        document = {**question, provider.max_tokens_name: MAX_ANSWER_TOKENS}
        key = self._keys[name]
        headers = {"authorization": f"Bearer {key}"} if key else {}
        url = f"{provider.url.rstrip('/')}/chat/completions"
        body = bytearray()
        try:
            # The limit of httpx is for each read: a server that sends byte by byte would hold the call for ever.
            async with (
                asyncio.timeout(self._seconds),
                self._http.stream("POST", url, json=document, headers=headers) as r,
            ):
                async for part in r.aiter_bytes():
                    body += part
                    if len(body) > MAX_ANSWER_BYTES:
                        raise Unread(f"provider {name} answers with more than {MAX_ANSWER_BYTES} bytes", "wrong")
        except TimeoutError as error:
            raise Unread(f"provider {name} gave no answer within {self._seconds:g} s", "away") from error
        except (httpx.ReadTimeout, httpx.ReadError, httpx.RemoteProtocolError) as error:
            raise Unread(f"provider {name} sends no whole answer ({type(error).__name__})", "away") from error
        except httpx.HTTPError as error:
            raise NoVote(f"provider {name} does not answer ({type(error).__name__})", "away") from error
        _check_status(name, r, bytes(body))
        return bytes(body)


def _check_status(name: str, response: httpx.Response, body: bytes) -> None:
    """Raises: NoVote, Unread"""
    status = response.status_code
    if status == 200:
        return
    if status in {401, 403}:
        # The body may repeat the key.
        cause = f"provider {name} refuses the key ({status}): check its api_key_file in GRADER_PROVIDERS"
        raise NoVote(cause, "refused", repeat=False)
    if status in PASSES or status >= 500:
        seconds = response.headers.get("retry-after", "")
        pause = min(float(seconds), MAX_PAUSE_SECONDS) if seconds.isdecimal() else 0.0
        kind = Unread if status == HTTPStatus.GATEWAY_TIMEOUT else NoVote
        raise kind(f"provider {name} answers {status}", "away", pause_seconds=pause)
    said = body[:200].decode(errors="replace")
    raise NoVote(f"provider {name} refuses the question ({status}): {said}", "refused", repeat=False)
