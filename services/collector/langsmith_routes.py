"""LangSmith's endpoints, at `LANGSMITH_ENDPOINT`: `/info` and the ingest of runs, which become spans.

Its client for Python sends OpenTelemetry where `LANGSMITH_OTEL_ENABLED` says so; all others, and LangChain.js, post.
"""

from __future__ import annotations

from email.message import Message
from functools import partial

from fastapi import APIRouter, Request, Response

from leyden.libs.contracts.capability import Scope
from leyden.libs.service import Budget, JsonResponse, Problem
from leyden.libs.service.body import read_body
from leyden.libs.service.json_body import JsonRoute
from leyden.services.collector.decode import Decode
from leyden.services.collector.langsmith import Multipart, decode_batch, decode_run
from leyden.services.collector.routes import (
    BODY_SECONDS,
    MAX_JSON_BYTES,
    AttemptNumber,
    Named,
    decoded_and_stored,
    verified,
)

langsmith_router = APIRouter(route_class=JsonRoute)
BATCH = {
    "use_multipart_endpoint": True,
    "scale_up_qsize_trigger": 1000,
    "scale_up_nthreads_limit": 4,
    "scale_down_nempty_trigger": 4,
    "size_limit": 100,
    "size_limit_bytes": MAX_JSON_BYTES // 2,
}
"""How clients batch: a body is at most half of what the collector reads of one, but for a run that alone is longer."""
BY_PATH, BY_KEY = "/r/{rollout_id}/{attempt}/langsmith", "/langsmith"


@langsmith_router.get(f"{BY_PATH}/info")
async def info(rollout_id: str, attempt: AttemptNumber, request: Request) -> Response:
    """The ways of ingest that clients ask for before their first run."""
    return await _info(request, (rollout_id, int(attempt)))


@langsmith_router.get(f"{BY_KEY}/info")
async def info_by_key(request: Request) -> Response:
    """The ways of ingest, for any valid key."""
    return await _info(request, None)


@langsmith_router.post(f"{BY_PATH}/runs/multipart")
async def multipart(rollout_id: str, attempt: AttemptNumber, request: Request) -> Response:
    """Stores the runs that end in a multipart form as spans; 202 means durable."""
    return await _multipart(request, (rollout_id, int(attempt)))


@langsmith_router.post(f"{BY_KEY}/runs/multipart")
async def multipart_by_key(request: Request) -> Response:
    """Stores the runs of a multipart form for the attempt that the key names."""
    return await _multipart(request, None)


@langsmith_router.post(f"{BY_PATH}/runs/batch")
async def batch(rollout_id: str, attempt: AttemptNumber, request: Request) -> Response:
    """Stores the runs that end in a JSON batch as spans; 202 means durable."""
    return await _stored(request, (rollout_id, int(attempt)), decode_batch)


@langsmith_router.post(f"{BY_KEY}/runs/batch")
async def batch_by_key(request: Request) -> Response:
    """Stores the runs of a JSON batch for the attempt that the key names."""
    return await _stored(request, None, decode_batch)


@langsmith_router.post(f"{BY_PATH}/runs")
@langsmith_router.patch(f"{BY_PATH}/runs/{{run_id}}")
async def run(rollout_id: str, attempt: AttemptNumber, request: Request) -> Response:
    """Stores a run that has ended as a span; 202 means durable."""
    return await _stored(request, (rollout_id, int(attempt)), _decode_run(request))


@langsmith_router.post(f"{BY_KEY}/runs")
@langsmith_router.patch(f"{BY_KEY}/runs/{{run_id}}")
async def run_by_key(request: Request) -> Response:
    """Stores a run that has ended for the attempt that the key names."""
    return await _stored(request, None, _decode_run(request))


def _decode_run(request: Request) -> Decode:
    """The JavaScript client names the run of a PATCH in the path alone."""
    return partial(decode_run, run_id=request.path_params.get("run_id"))


async def _info(request: Request, attempt: Named) -> Response:
    await verified(request, attempt, Scope.TELEMETRY)
    return JsonResponse({"version": "0.0.0", "batch_ingest_config": BATCH, "instance_flags": {}})


async def _multipart(request: Request, attempt: Named) -> Response:
    header = Message()
    header["content-type"] = request.headers.get("content-type", "")
    boundary = header.get_boundary()
    if header.get_content_type() != "multipart/form-data" or not boundary:
        raise Problem(415, "send multipart/form-data with a boundary", cause="content_type_unknown")
    return await _stored(request, attempt, Multipart(boundary))


async def _stored(request: Request, attempt: Named, decode: Decode) -> Response:
    capability = await verified(request, attempt, Scope.TELEMETRY)
    budget: Budget = request.app.state.budget
    encoding = request.headers.get("content-encoding", "").strip().lower()
    with budget.share() as share:
        body = await read_body(request.stream(), encoding, share, max_bytes=MAX_JSON_BYTES, seconds=BODY_SECONDS)
        rows = await decoded_and_stored(request.app.state, capability, body, share, decode, json=True)
    return JsonResponse({"rejected": rows.rejected, "message": rows.message} if rows.message else {}, 202)
