"""The collector's endpoints: `/v1/traces` and `/v1/logs` as OTLP/HTTP has them, `/reward` as plain JSON.

Each is there twice: below `/r/{rollout}/{attempt}`, and at the root, where the key alone names the attempt.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Header, Path, Request, Response
from fastapi.exceptions import RequestValidationError
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from prometheus_client import Counter
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.datastructures import State

from leyden.libs.capability import CapabilityError, Cause, KeyRing, key_from_headers, verify
from leyden.libs.contracts.capability import Capability, Scope
from leyden.libs.contracts.ids import NUMBER
from leyden.libs.contracts.rewards import RewardValue
from leyden.libs.contracts.strict import BadJson, read_json
from leyden.libs.queue.attempt_liveness import AttemptEnded, AttemptLiveness
from leyden.libs.service import Budget, JsonResponse, Problem, Share
from leyden.libs.service.body import read_body
from leyden.libs.service.json_body import JsonRoute
from leyden.libs.store.records.spans import ENDPOINT, NewReward
from leyden.services.collector.batch import TelemetryCommit
from leyden.services.collector.components import Components
from leyden.services.collector.conventions import Sender
from leyden.services.collector.decode import Decode, Rows, decode_logs, decode_traces
from leyden.services.collector.places import Places
from leyden.services.collector.quotas import REFUSED_ROWS, Quotas
from leyden.services.collector.settings import Settings
from leyden.services.collector.wire import BadBody, TooMany

JSON = "application/json"
PROTOBUF = "application/x-protobuf"
INVALID_ARGUMENT, UNAVAILABLE, UNKNOWN = 3, 14, 2
# Decoding more than this on the event loop would hold up everybody else's requests.
THREAD_BYTES = 256 * 1024
MAX_REWARD_BYTES = 256 * 1024
# JSON takes twenty times its size to read.
MAX_JSON_BYTES = 4 * 2**20
OVERLOADED = "too much is waiting to be stored: send again"
BODY_SECONDS = 30.0
"""A hundred rewards with the longest names take half of it."""
ROW_BYTES = 1024
"""Memory of a row without its texts."""

MISPLACED = Counter(
    "collector_misplaced_rewards_total", "Rewards in telemetry for answers or tool calls that their attempt lacks."
)
router = APIRouter(route_class=JsonRoute)

# Postgres stores no NUL.
Text = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00]*$")]
AttemptNumber = Annotated[str, Path(pattern=f"^({NUMBER.pattern})$")]
ExportResponse = ExportTraceServiceResponse | ExportLogsServiceResponse
Named = tuple[str, int] | None
"""Rollout and attempt in the path; None where the key alone names them."""


class RewardBody(BaseModel):
    """A reward for the rollout, or for the model answer or tool call that it names."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    value: RewardValue | None = None
    values: dict[Text, RewardValue] | None = Field(default=None, min_length=1, max_length=100)
    name: Text = "reward"
    key: Text | None = None
    response_id: Text | None = None
    tool_call_id: Text | None = None

    @model_validator(mode="after")
    def _one_or_several(self) -> RewardBody:
        if (self.value is None) == (self.values is None):
            raise ValueError("give either value (a number) or values (an object of names to numbers)")
        return self


@router.post("/r/{rollout_id}/{attempt}/v1/traces")
async def traces(rollout_id: str, attempt: AttemptNumber, request: Request) -> Response:
    """Stores the spans of an ExportTraceServiceRequest; 200 means durable."""
    return await _exported(request, (rollout_id, int(attempt)), decode_traces, ExportTraceServiceResponse())


@router.post("/v1/traces")
async def traces_by_key(request: Request) -> Response:
    """Stores the spans of an ExportTraceServiceRequest for the attempt that the key names; 200 means durable."""
    return await _exported(request, None, decode_traces, ExportTraceServiceResponse())


@router.post("/r/{rollout_id}/{attempt}/v1/logs")
async def logs(rollout_id: str, attempt: AttemptNumber, request: Request) -> Response:
    """Stores the evaluation results of an ExportLogsServiceRequest as rewards; other records are not kept."""
    return await _exported(request, (rollout_id, int(attempt)), decode_logs, ExportLogsServiceResponse())


@router.post("/v1/logs")
async def logs_by_key(request: Request) -> Response:
    """Stores the evaluation results of an ExportLogsServiceRequest for the attempt that the key names."""
    return await _exported(request, None, decode_logs, ExportLogsServiceResponse())


async def _exported(request: Request, attempt: Named, decode: Decode, response: ExportResponse) -> Response:
    rows = await _stored(request, attempt, decode)
    if is_json(request):
        rejected = "rejectedSpans" if isinstance(response, ExportTraceServiceResponse) else "rejectedLogRecords"
        partial_success = {rejected: rows.rejected, "errorMessage": rows.message}
        return JsonResponse({"partialSuccess": partial_success} if rows.message else {})
    return Response(export_response(response, rows), media_type=PROTOBUF)


def export_response(response: ExportResponse, rows: Rows) -> bytes:
    """Full success leaves `partial_success` unset, as the specification asks."""
    if rows.message:
        response.partial_success.error_message = rows.message
        if isinstance(response, ExportTraceServiceResponse):
            response.partial_success.rejected_spans = rows.rejected
        else:
            response.partial_success.rejected_log_records = rows.rejected
    return response.SerializeToString()  # type: ignore[no-any-return]


_BODY = {"requestBody": {"required": True, "content": {JSON: {"schema": RewardBody.model_json_schema()}}}}


IdempotencyKey = Annotated[str | None, Header(max_length=200)]


@router.post("/r/{rollout_id}/{attempt}/reward", openapi_extra=_BODY)
async def reward(
    rollout_id: str, attempt: AttemptNumber, request: Request, idempotency_key: IdempotencyKey = None
) -> Response:
    """Stores a reward; 200 means durable.

    Idempotent by `key`, else by the Idempotency-Key header, else by the body itself: a repeat changes nothing, and the
    key with another reward is 409. An id that no answer of the attempt has is 422.
    """
    return await _reward(request, (rollout_id, int(attempt)), idempotency_key)


@router.post("/reward", openapi_extra=_BODY)
async def reward_by_key(request: Request, idempotency_key: IdempotencyKey = None) -> Response:
    """Stores a reward as below `/r/{rollout}/{attempt}`, for the attempt that the key names."""
    return await _reward(request, None, idempotency_key)


async def _reward(request: Request, attempt: Named, idempotency_key: str | None) -> Response:
    capability = await verified(request, attempt, Scope.REWARD)
    # Read here, not by the framework: without a key nobody's body is looked at.
    budget: Budget = request.app.state.budget
    with budget.share() as share:
        content = await read_body(request.stream(), "", share, max_bytes=MAX_REWARD_BYTES, seconds=BODY_SECONDS)
    body = _reward_body(content)
    key = body.key or idempotency_key or hashlib.sha256(body.model_dump_json().encode()).hexdigest()[:32]
    sender = _sender(capability)
    rewards = _reward_rows(body, key, sender)
    await _check_place(request.app.state, sender, rewards[0])
    quotas: Quotas = request.app.state.quotas
    await quotas.submit_rewards(request.app.state.commit, sender, rewards)
    return JsonResponse({"key": key, "rewards": len(rewards)})


def is_json(request: Request) -> bool:
    """Whether the request speaks OTLP's JSON; answers then do too."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == JSON


def status_response(request: Request, status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """An error as OTLP has it: a google.rpc.Status in the request's own format."""
    code = {400: INVALID_ARGUMENT, 422: INVALID_ARGUMENT, 503: UNAVAILABLE}.get(status, UNKNOWN)
    if is_json(request):
        return JsonResponse({"code": code, "message": message}, status, headers)
    return Response(Status(code=code, message=message).SerializeToString(), status, headers, media_type=PROTOBUF)


async def _stored(request: Request, attempt: Named, decode: Decode) -> Rows:
    capability = await verified(request, attempt, Scope.TELEMETRY)
    if not is_json(request) and not _is_protobuf(request):
        raise Problem(415, f"send {PROTOBUF} or {JSON}", cause="content_type_unknown")
    settings: Settings = request.app.state.settings
    budget: Budget = request.app.state.budget
    encoding = request.headers.get("content-encoding", "").strip().lower()
    with budget.share() as share:
        body = await read_body(
            request.stream(), encoding, share, max_bytes=settings.max_body_bytes, seconds=BODY_SECONDS
        )
        if is_json(request) and len(body) > MAX_JSON_BYTES:
            detail = f"a JSON body exceeds {MAX_JSON_BYTES} bytes: send {PROTOBUF}, or smaller batches"
            raise Problem(413, detail, cause="too_large")
        return await decoded_and_stored(request.app.state, capability, body, share, decode, json=is_json(request))


async def decoded_and_stored(
    state: State, capability: Capability, body: bytes, share: Share, decode: Decode, *, json: bool
) -> Rows:
    """The rows of a protobuf or JSON body, once they are durable.

    Raises: Problem; Overloaded; StoreAway; Refused; AttemptEnded
    """
    commit: TelemetryCommit = state.commit
    sender = _sender(capability)
    granted = not capability.scopes.isdisjoint((Scope.REWARD, Scope.FEEDBACK))
    read = partial(decode, body, json=json, sender=sender, rewards_granted=granted)
    rows = await _decoded(read, len(body), state.decoding)
    if Scope.REWARD in capability.scopes:
        await _leave_out_misplaced(state, sender, rows)
    else:
        components: Components = state.components
        await components.give(sender, rows)
    # Rows wait for their commit longer than they take to decode.
    share.acquire(len(rows) * ROW_BYTES)
    quotas: Quotas = state.quotas
    await quotas.submit(commit, sender, rows)
    return rows


async def _decoded(read: Callable[[], Rows], size: int, decoding: asyncio.Semaphore) -> Rows:
    try:
        if size > THREAD_BYTES:
            # One after another: what a body grows to while it is decoded is bounded for one, not for many.
            async with decoding:
                return await asyncio.to_thread(read)
        return read()
    except BadBody as error:
        raise Problem(400, str(error), cause="bad_body") from error
    except TooMany as error:
        raise Problem(413, str(error), cause="too_many") from error


def _is_protobuf(request: Request) -> bool:
    return request.headers.get("content-type", PROTOBUF).partition(";")[0].strip().lower() == PROTOBUF


async def verified(request: Request, attempt: Named, scope: Scope) -> Capability:
    """The capability in the request's key, for a running attempt.

    Raises: CapabilityError; StoreAway: nobody can say whether the attempt runs
    """
    ring: KeyRing = request.app.state.key_ring
    key = key_from_headers(request.headers)
    rollout_id, number = attempt or (None, None)
    capability = verify(ring, key, rollout_id=rollout_id, attempt=number, scope=scope)
    return await confirmed(request.app.state, capability)


async def confirmed(state: State, capability: Capability) -> Capability:
    """The capability, once its attempt is known to run.

    Raises: CapabilityError; StoreAway: nobody can say whether the attempt runs
    """
    liveness: AttemptLiveness = state.liveness
    try:
        await liveness.confirm(capability.rollout_id, capability.attempt)
    except AttemptEnded as error:
        raise CapabilityError(Cause.ENDED) from error
    return capability


def _sender(capability: Capability) -> Sender:
    return Sender(capability.run_id, capability.rollout_id, capability.attempt)


def _reward_body(content: bytes) -> RewardBody:
    try:
        return RewardBody.model_validate(read_json(content))
    except BadJson as error:
        raise Problem(422, str(error), cause="invalid") from error
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from error


def _reward_rows(body: RewardBody, key: str, sender: Sender) -> list[NewReward]:
    single = {} if body.value is None else {body.name: body.value}
    return [
        NewReward(
            rollout_id=sender.rollout_id,
            attempt=sender.attempt,
            key=key if body.values is None else f"{key}:{name}",
            run_id=sender.run_id,
            source=ENDPOINT,
            name=name,
            value=value,
            response_id=body.response_id,
            tool_call_id=body.tool_call_id,
        )
        for name, value in (body.values or single).items()
    ]


async def _leave_out_misplaced(state: State, sender: Sender, rows: Rows) -> None:
    """Leaves out rewards for an answer or a tool call which the attempt does not have, and counts them.

    A span names them for its rewards, too: one of another model's answer is no answer of the attempt.
    """
    quotas: Quotas = state.quotas
    named = [one for one in rows.rewards if _has_place(one)]
    if not named:
        return
    if reason := await quotas.look_up_refusal(sender):
        REFUSED_ROWS.labels("reward").inc(len(named))
        rows.leave_out(named, reason)
        return
    places: Places = state.places
    unknown = await places.unknown(sender, named)
    if misplaced := [one for one in named if unknown.of(one) is not None]:
        MISPLACED.inc(len(misplaced))
        quotas.count_misplaced(sender)
        rows.leave_out(misplaced, _no_answer(next(filter(None, map(unknown.of, misplaced)))))


def _has_place(reward: NewReward) -> bool:
    return reward.response_id is not None or reward.tool_call_id is not None


def _no_answer(has: str) -> str:
    return f"no answer of this attempt has {has}: send an id of one, or none for a reward of the rollout"


async def _check_place(state: State, sender: Sender, reward: NewReward) -> None:
    """Raises: Problem: 422: no answer of the attempt has an id that the reward names, or none is looked up any more."""
    quotas: Quotas = state.quotas
    if not _has_place(reward):
        return
    if reason := await quotas.look_up_refusal(sender):
        REFUSED_ROWS.labels("reward").inc()
        raise Problem(422, reason, cause="attempt_limit")
    places: Places = state.places
    unknown = await places.unknown(sender, [reward])
    for name, one, ids in (
        ("response_id", reward.response_id, unknown.response_ids),
        ("tool_call_id", reward.tool_call_id, unknown.tool_call_ids),
    ):
        if one in ids:
            quotas.count_misplaced(sender)
            raise Problem(422, _no_answer(f"{name} {one!r}"), cause="unknown_call")
