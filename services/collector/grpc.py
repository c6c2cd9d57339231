"""OTLP over gRPC with HTTP's keys, limits and rows. A gRPC target has no path, so the key names the attempt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import grpc
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from starlette.datastructures import State

from leyden.libs.capability import CapabilityError, Cause, key_from_headers, verify
from leyden.libs.contracts.capability import Capability, Scope
from leyden.libs.service import Overloaded, Problem, Share
from leyden.libs.service.errors import CannotListen
from leyden.libs.store.attempts import AttemptKey
from leyden.libs.store.database import Refused, StoreAway
from leyden.libs.store.records.spans import AttemptEnded
from leyden.services.collector.decode import Decode, Rows, decode_logs, decode_traces
from leyden.services.collector.routes import BODY_SECONDS, OVERLOADED, confirmed, decoded_and_stored, export_response
from leyden.services.collector.settings import Settings

PACKAGE = "opentelemetry.proto.collector"
STOP_SECONDS = 5.0
MAX_MESSAGE_BYTES = 16 * 2**20
"""Twice the longest span, and four times what OpenTelemetry's own collector takes."""
MESSAGE_SECONDS = 10.0
"""A message arrives within this time once its turn has come: exporters send it with the call."""
ATTEMPT_MESSAGES = 2
"""Messages of one attempt that are read at once: its traces and its logs."""
CONNECTION_CALLS = 100
CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}


class Messages:
    """Reads the messages of calls.

    - Nothing of a message is read before its key is verified and its attempt is known to run.
    - gRPC tells the length of a message once all of it is in memory. Until then it counts as the longest one, so that
      the budget of HTTP's bodies bounds messages, too.
    - Calls take turns: all messages that are read count as at most half of the budget, and further calls wait for
      theirs, because many agents that export at once are no overload.
    - Calls of one attempt take turns, so that those which send nothing keep little of the budget.
    """

    def __init__(self, settings: Settings) -> None:
        self.most_bytes = min(MAX_MESSAGE_BYTES, settings.max_body_bytes, settings.max_bytes_in_flight)
        self._readers = asyncio.Semaphore(max(1, settings.max_bytes_in_flight // (2 * self.most_bytes)))
        self._turns: WeakValueDictionary[AttemptKey, asyncio.Semaphore] = WeakValueDictionary()

    async def read(self, context: Any, capability: Capability, share: Share) -> bytes:
        """The one message of a call, counted against the share.

        Raises: Overloaded; Problem: 400 there is none, 408 too slow
        """
        attempt = AttemptKey(capability.rollout_id, capability.attempt)
        turn = self._turns.setdefault(attempt, asyncio.Semaphore(ATTEMPT_MESSAGES))
        async with self._turn(turn), self._turn(self._readers):
            share.acquire(self.most_bytes)
            try:
                message = await asyncio.wait_for(context.read(), MESSAGE_SECONDS)
            except TimeoutError as error:
                detail = f"the message did not arrive within {MESSAGE_SECONDS:g} s"
                raise Problem(408, detail, cause="too_slow") from error
            arrived = 0 if message is grpc.aio.EOF else len(message)
            share.acquire(arrived - self.most_bytes)
        if message is grpc.aio.EOF:
            raise Problem(400, "the call has no message: send one export request", cause="bad_body")
        return bytes(message)

    @asynccontextmanager
    async def _turn(self, turn: asyncio.Semaphore) -> AsyncIterator[None]:
        """Raises: Overloaded: the turn does not come"""
        try:
            await asyncio.wait_for(turn.acquire(), BODY_SECONDS)
        except TimeoutError as error:
            raise Overloaded from error
        try:
            yield
        finally:
            turn.release()


async def start_grpc(state: State, host: str, port: int) -> tuple[grpc.aio.Server, int]:
    """A serving server and its port.

    Args: state: of the application, for which HTTP keeps its settings, keys, budget and writer
    Raises: CannotListen
    """
    messages = Messages(state.settings)
    options = [
        ("grpc.max_receive_message_length", messages.most_bytes),
        # Clients wait with further calls by themselves: none is lost.
        ("grpc.max_concurrent_streams", CONNECTION_CALLS),
        # Else the window of each call grows with the speed of the network, and unread calls take megabytes.
        ("grpc.http2.bdp_probe", 0),
    ]
    server = grpc.aio.server(options=options)
    server.add_generic_rpc_handlers(
        [
            _service(f"{PACKAGE}.trace.v1.TraceService", partial(_traces, state, messages)),
            _service(f"{PACKAGE}.logs.v1.LogsService", partial(_logs, state, messages)),
        ]
    )
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise CannotListen(f"cannot listen on {host}:{port} (COLLECTOR_GRPC_PORT): {error}") from error
    await server.start()
    return server, bound


def _service(name: str, export: Callable[[Any, Any], Awaitable[bytes]]) -> grpc.GenericRpcHandler:
    """A service whose handler reads the message itself: that of a unary call starts with all of it in memory."""
    return grpc.method_handlers_generic_handler(name, {"Export": grpc.stream_unary_rpc_method_handler(export)})


async def _traces(state: State, messages: Messages, _requests: object, context: Any) -> bytes:
    return export_response(ExportTraceServiceResponse(), await _store(state, messages, context, decode_traces))


async def _logs(state: State, messages: Messages, _requests: object, context: Any) -> bytes:
    return export_response(ExportLogsServiceResponse(), await _store(state, messages, context, decode_logs))


async def _store(state: State, messages: Messages, context: Any, decode: Decode) -> Rows:
    try:
        capability = await confirmed(state, _capability(state, context.invocation_metadata()))
        with state.budget.share() as share:
            body = await messages.read(context, capability, share)
            return await decoded_and_stored(state, capability, body, share, decode, json=False)
    except CapabilityError as error:
        status, detail = error.status, str(error)
    except Problem as error:
        status, detail = error.status_code, error.detail
    except AttemptEnded:
        status, detail = 403, str(CapabilityError(Cause.ENDED))
    except Refused as error:
        status, detail = 400, str(error)
    except StoreAway as error:
        status, detail = 503, f"send again: {error}"
    except Overloaded:
        status, detail = 503, OVERLOADED
    await context.abort(CODES.get(status, grpc.StatusCode.UNKNOWN), detail)
    raise AssertionError("abort raises")


def _capability(state: State, metadata: Any) -> Capability:
    """Raises: CapabilityError"""
    key = key_from_headers({name.lower(): value for name, value in metadata or ()})
    return verify(state.key_ring, key, rollout_id=None, attempt=None, scope=Scope.TELEMETRY)
