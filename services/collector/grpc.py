"""OTLP over gRPC with HTTP's keys, limits and rows. A gRPC target has no path, so the key names the attempt."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import grpc
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from starlette.datastructures import State

from leyden.libs.capability import CapabilityError, Cause, key_from_headers, verify
from leyden.libs.contracts.capability import Capability, Scope
from leyden.libs.service import Overloaded, Problem
from leyden.libs.service.errors import CannotListen
from leyden.libs.store.database import Refused, StoreAway
from leyden.libs.store.records.spans import AttemptEnded
from leyden.services.collector.decode import Decode, Rows, decode_logs, decode_traces
from leyden.services.collector.routes import confirmed, decoded_and_stored, export_response

PACKAGE = "opentelemetry.proto.collector"
STOP_SECONDS = 5.0
CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Refuses a call whose key is bad before its message is read."""

    def __init__(self, state: State) -> None:
        self._state = state

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        """The handler of the call, or one that refuses it."""
        try:
            _capability(self._state, details.invocation_metadata)
        except CapabilityError as error:
            cause = error

            async def refuse(_message: object, context: Any) -> None:
                await context.abort(CODES[cause.status], str(cause))

            return grpc.unary_unary_rpc_method_handler(refuse)
        return await continuation(details)


async def start_grpc(state: State, host: str, port: int) -> tuple[grpc.aio.Server, int]:
    """A serving server and its port.

    Args: state: of the application, for which HTTP keeps its settings, keys, budget and writer
    Raises: CannotListen
    """
    limit = ("grpc.max_receive_message_length", state.settings.max_body_bytes)
    server = grpc.aio.server(interceptors=[Guard(state)], options=[limit])
    server.add_generic_rpc_handlers(
        [
            _service(f"{PACKAGE}.trace.v1.TraceService", partial(_traces, state)),
            _service(f"{PACKAGE}.logs.v1.LogsService", partial(_logs, state)),
        ]
    )
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise CannotListen(f"cannot listen on {host}:{port} (COLLECTOR_GRPC_PORT): {error}") from error
    await server.start()
    return server, bound


def _service(name: str, export: Callable[[bytes, Any], Awaitable[bytes]]) -> grpc.GenericRpcHandler:
    return grpc.method_handlers_generic_handler(name, {"Export": grpc.unary_unary_rpc_method_handler(export)})


async def _traces(state: State, body: bytes, context: Any) -> bytes:
    return export_response(ExportTraceServiceResponse(), await _store(state, body, context, decode_traces))


async def _logs(state: State, body: bytes, context: Any) -> bytes:
    return export_response(ExportLogsServiceResponse(), await _store(state, body, context, decode_logs))


async def _store(state: State, body: bytes, context: Any, decode: Decode) -> Rows:
    try:
        capability = await confirmed(state, _capability(state, context.invocation_metadata()))
        with state.budget.share() as share:
            share.acquire(len(body))
            return await decoded_and_stored(state, capability, body, share, decode, json=False)
    except CapabilityError as error:
        status, detail = error.status, str(error)
    except Problem as error:
        status, detail = error.status_code, error.detail
    except AttemptEnded:
        status, detail = 403, str(CapabilityError(Cause.ENDED))
    except Refused as error:
        status, detail = 400, str(error)
    except (StoreAway, Overloaded) as error:
        status, detail = 503, f"send again: {error}"
    await context.abort(CODES.get(status, grpc.StatusCode.UNKNOWN), detail)
    raise AssertionError("abort raises")


def _capability(state: State, metadata: Any) -> Capability:
    """Raises: CapabilityError"""
    key = key_from_headers({name.lower(): value for name, value in metadata or ()})
    return verify(state.key_ring, key, rollout_id=None, attempt=None, scope=Scope.TELEMETRY)
