"""Sampling at an engine, through whatever happens to it: SGLang's native `/generate`, tokens in and tokens out.

An engine that dies, is paused with abort, or is given to another run costs a request nothing but time. The tokens that
came so far are kept, and another request asks for the rest after them: each token was sampled by the policy version
that its span names, after exactly the tokens before it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial

import numpy as np
import orjson

from leyden.libs.telemetry import inject, logger
from leyden.services.gateway.choice import Absorber, Choice, EngineLost, Job, Progressed, collecting, following, refusal
from leyden.services.gateway.connection import Connections, Parts, Refused, Stop, Take
from leyden.services.gateway.engines import Directory, Endpoint, Patience
from leyden.services.gateway.metrics import ENGINE_RETRIES
from leyden.services.gateway.request import Json, Sampling
from leyden.services.gateway.tokens import json_of

ABORT_SECONDS = 5.0
"""How long the rest of an aborted answer is waited for."""
RETRY_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0)

log = logger()


class Sampler:
    """Asks engines for tokens."""

    def __init__(
        self, connections: Connections, directory: Directory, *, api_key: str | None, hold_seconds: float
    ) -> None:
        self._connections = connections
        self._directory = directory
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._hold_seconds = hold_seconds

    async def sample(self, job: Job, choice: Choice, progressed: Progressed) -> None:
        """Fills the choice until it is finished; cancelled, it aborts at the engine and keeps what came until then.

        Args: progressed: called after new tokens; never when `job.stream` is false, save at the end
        Raises: Unavailable: no engine served the run for too long; BadRequest: the engine refuses the request
        """
        patience = Patience(self._hold_seconds)
        tries = failures = 0
        while choice.finish is None:
            endpoint = await self._directory.pick(job.run_id, job.rollout_id, patience)
            before = len(choice.sampled_ids)
            try:
                await self._one_request(endpoint, job, choice, _request_id(choice.call_id, tries), progressed)
            except EngineLost as lost:
                log.info("engine request lost", engine=endpoint.url, cause=lost.cause, detail=str(lost)[:200])
                ENGINE_RETRIES.labels(lost.cause).inc()
                if len(choice.sampled_ids) > before:
                    patience.renew()
                    failures = 0
                await self._step_back(endpoint, lost, patience, failures)
                failures += 1
            tries += 1
        choice.ended_at = time.perf_counter()

    async def _step_back(self, endpoint: Endpoint, lost: EngineLost, patience: Patience, failures: int) -> None:
        if lost.cause != "aborted":
            self._directory.suspect(endpoint.url)
        await asyncio.sleep(min(patience.left(), RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)]))

    async def _one_request(
        self, endpoint: Endpoint, job: Job, choice: Choice, rid: str, progressed: Progressed
    ) -> None:
        budget = job.max_tokens - len(choice.sampled_ids)
        if budget <= 0:
            choice.finish = "length"
            return
        answer = Absorber(job, choice, progressed)
        body = _engine_request(job, choice, rid, budget, endpoint.weight_version)
        take = (following if job.stream else collecting)(answer, time.perf_counter())
        await self._exchange(endpoint, body, take, partial(self._abort, endpoint, rid))
        if choice.finish is None:
            raise EngineLost(
                "aborted" if answer.was_aborted else "connection", "the answer ended before it was finished"
            )

    async def _exchange(self, endpoint: Endpoint, body: Parts, take: Take, stop: Stop) -> None:
        headers = self._headers
        if (traceparent := inject()) is not None:
            headers = {**headers, "traceparent": traceparent}
        try:
            await self._connections.post(f"{endpoint.url}/generate", body, headers, take, stop)
        except Refused as refused:
            raise refusal(refused.status, refused.text) from None
        # Whatever is wrong in an answer shows as one of these, before anything of it was taken.
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise EngineLost("malformed", f"{type(error).__name__}: {error}") from error
        except OSError as error:
            raise EngineLost("connection", f"{type(error).__name__}: {error}") from error

    async def _abort(self, endpoint: Endpoint, rid: str, rest: Callable[[], Awaitable[None]]) -> None:
        """Stops generation and waits shortly for the tokens made until then.

        An engine with another key for control routes refuses the gateway's, and stops when the connection is closed.
        """
        try:
            async with asyncio.timeout(ABORT_SECONDS):
                url, body = f"{endpoint.url}/abort_request", orjson.dumps({"rid": rid})
                await self._connections.post(url, [body], self._headers, lambda _: None)
                await rest()
        except (Refused, OSError) as error:
            log.info("abort not delivered", engine=endpoint.url, error=str(error))


def _engine_request(job: Job, choice: Choice, rid: str, budget: int, weight_version: str | None) -> Parts:
    sampling = job.sampling
    parameters: Json = {
        "temperature": job.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": budget,
        "stop": list(sampling.stop),
        "stop_token_ids": list(job.eos_ids),
        # Exact text: nothing hidden, nothing trimmed.
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
        **_rare_parameters(sampling, len(choice.sampled_ids)),
    }
    if choice.seed is not None:
        parameters["sampling_seed"] = choice.seed
    request: Json = {
        "rid": rid,
        "sampling_params": parameters,
        "return_logprob": True,
        "top_logprobs_num": job.top_logprobs,
        "stream": job.stream,
    }
    if weight_version is not None:
        # Keys and values of other weights must never serve as this prompt's prefix, whatever the engine flushed.
        request["extra_key"] = weight_version
    sampled = b"," + json_of(np.asarray(choice.sampled_ids, dtype=np.int32)) if choice.sampled_ids else b""
    return b'{"input_ids":[', job.prompt.json, b"%b],%b" % (sampled, orjson.dumps(request)[1:])


def _rare_parameters(sampling: Sampling, sampled: int) -> Json:
    rare: Json = {
        "min_p": sampling.min_p,
        "min_new_tokens": max(0, sampling.min_tokens - sampled),
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "logit_bias": sampling.logit_bias,
    }
    chosen = {name: value for name, value in rare.items() if value}
    if sampling.repetition_penalty != 1.0:
        chosen["repetition_penalty"] = sampling.repetition_penalty
    return chosen


def _request_id(call_id: str, tries: int) -> str:
    # An engine refuses a request id that is still live: each try has its own.
    return f"{call_id}-{tries}" if tries else call_id
