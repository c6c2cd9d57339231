"""Asks an engine for the log-probabilities of a version's canary, right after the version was delivered.

An engine may answer that it loaded a version, and compute with other weights. Its answer to the canary shows that
before a gateway sends it a call. Nobody asks before it continues: a paused engine answers no request, so that calls
that it held go on meanwhile.

An engine that cannot answer is served as before: unknown is not failed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import httpx
from prometheus_client import Counter, Gauge, Histogram

from leyden.libs.contracts.canary import Canary
from leyden.libs.contracts.canary.comparison import Comparison, compare
from leyden.libs.contracts.states import CanaryVerdict
from leyden.libs.faults import fault_point
from leyden.libs.store.database import Database, Refused
from leyden.libs.store.runs.canaries import CanaryAnswer, read_canaries, record_answer
from leyden.libs.telemetry import SECONDS_BUCKETS, logger
from leyden.services.controller.engines.client import EngineClient, EngineRefused
from leyden.services.controller.engines.targets import TargetVersion

log = logger()

CANARIES = Counter("controller_canaries_total", "Engines compared with the trainer after a delivery.", ["verdict"])
CANARY_SECONDS = Histogram("controller_canary_seconds", "Time of one comparison.", buckets=SECONDS_BUCKETS)
CANARY_GAP = Gauge("controller_canary_gap_nats", "Mean gap of the last canary: |trainer - engine| log-probability.")


class Verdict(NamedTuple):
    """Whether the question is settled, and why the engine serves something else, for users; None where it does not."""

    is_final: bool
    problem: str | None = None


class Canaries:
    """The canaries of all versions; `ask` asks every time."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._unanswered: set[str] = set()

    async def ask(self, client: EngineClient, target: TargetVersion, adapter: str | None = None) -> Verdict:
        """Compares an engine with the trainer, and records its answer.

        Not final: the trainer has recorded no canary yet, as for version 0 before it has loaded the model, or the
        engine does not answer in time.

        Args:   adapter: the one that serves the version
        Raises: httpx.HTTPError: the connection broke; StoreAway
        """
        async with self._database.read() as session:
            canary, before = await read_canaries(session, target.run_id, target.version)
        if canary is None:
            return Verdict(is_final=False)
        fault_point("controller.canary_begun")
        try:
            with CANARY_SECONDS.time():
                answers = _logprobs(await client.generate(_question(canary, adapter)), canary)
                in_float32 = await client.computes_in_float32()
        except httpx.TimeoutException as error:
            log.warning("canary not answered in time", url=client.url, cause=type(error).__name__)
            return Verdict(is_final=False)
        except (EngineRefused, ValueError) as error:
            await self._record_unanswered(client.url, target, str(error)[:500])
            return Verdict(is_final=True)
        if canary.rounds_updates and adapter is None:
            before = None
        found = compare(canary, answers, in_float32=in_float32, before=before)
        await self._record(client.url, target, found)
        return Verdict(is_final=True, problem=found.problem)

    async def _record_unanswered(self, url: str, target: TargetVersion, cause: str) -> None:
        if url not in self._unanswered:
            self._unanswered.add(url)
            log.warning("engine not compared with the trainer", url=url, cause=cause)
        await self._store(CanaryAnswer(url, target.run_id, target.version, CanaryVerdict.UNANSWERED, detail=cause))

    async def _record(self, url: str, target: TargetVersion, found: Comparison) -> None:
        self._unanswered.discard(url)
        if found.gap is not None:
            CANARY_GAP.set(found.gap)
        verdict = CanaryVerdict.EQUAL if found.problem is None else CanaryVerdict.OTHER
        answer = CanaryAnswer(url, target.run_id, target.version, verdict, found.tokens, found.gap, found.largest)
        await self._store(replace(answer, gap_limit=found.limit, moved=found.moved, detail=found.problem))

    async def _store(self, answer: CanaryAnswer) -> None:
        CANARIES.labels(answer.verdict).inc()
        # The run may have been deleted meanwhile.
        with suppress(Refused):
            async with self._database.session() as session:
                await record_answer(session, answer)


def _question(canary: Canary, adapter: str | None) -> dict[str, object]:
    """A request for the log-probabilities of the prompts. SGLang computes them all where it samples a token, too."""
    named = {} if adapter is None else {"lora_path": adapter}
    sampling = {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True}
    ids = [list(row) for row in canary.token_ids]
    return {"input_ids": ids, "return_logprob": True, "logprob_start_len": 0, "sampling_params": sampling, **named}


def _logprobs(answer: Any, canary: Canary) -> list[Sequence[float]]:
    """The log-probabilities of an answer, in the shape of the canary's. NaN for null, which is how JSON writes a NaN.

    Raises: ValueError: it has none, or those of other tokens
    """
    try:
        found = [one["meta_info"]["input_token_logprobs"][1:] for one in answer]
        token_ids = [[int(entry[1]) for entry in row] for row in found]
        logprobs = [[math.nan if entry[0] is None else float(entry[0]) for entry in row] for row in found]
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"its answer has no log-probabilities of the prompt ({error!r})") from error
    if token_ids != [list(row[1:]) for row in canary.token_ids]:
        raise ValueError("its answer has the log-probabilities of other tokens")
    return list(logprobs)
