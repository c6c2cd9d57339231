"""HTTP routes of what the Responses API stores: responses and their input items."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from leyden.libs.contracts.conversation import Json
from leyden.libs.service import JsonResponse
from leyden.services.gateway.dialects.responses import Responses, input_items, response_of
from leyden.services.gateway.errors import BadRequest
from leyden.services.gateway.records.reader import StoredAnswer
from leyden.services.gateway.routes import BASE, authenticate

MAX_ITEMS = 100
DEFAULT_ITEMS = 20


async def response(request: Request) -> Response:
    """Returns a response of this attempt."""
    if request.query_params.get("stream") == "true":
        message = "A stored response is not streamed: read it without 'stream'."
        raise BadRequest(message, param="stream", code="unsupported_parameter")
    stored = await _stored(request)
    return JsonResponse(response_of(stored.parameters, stored.conversation.tools, stored.completion))


async def response_input_items(request: Request) -> Response:
    """Lists the items of a response's conversation before its answer."""
    return JsonResponse(page(request, input_items(await _stored(request))))


async def cancel(request: Request) -> Response:
    """Refuses: as at OpenAI, only responses in the background can be cancelled, and there are none."""
    await _stored(request)
    raise BadRequest("Only background responses can be cancelled: close the connection instead.", code="invalid_value")


def page(request: Request, items: list[Json]) -> Json:
    """Returns a page of a list by the parameters `order`, `after` and `limit`. Raises: BadRequest."""
    query = request.query_params
    limit = query.get("limit", str(DEFAULT_ITEMS))
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= MAX_ITEMS:
        raise BadRequest(f"limit must be between 1 and {MAX_ITEMS}.", param="limit", code="invalid_value")
    if (order := query.get("order", "desc")) not in {"asc", "desc"}:
        raise BadRequest("order must be 'asc' or 'desc'.", param="order", code="invalid_value")
    items = items if order == "asc" else items[::-1]
    if after := query.get("after"):
        ids = [item["id"] for item in items]
        if after not in ids:
            raise BadRequest(f"after names no item of the list: '{after[:100]}'.", param="after", code="invalid_value")
        items = items[ids.index(after) + 1 :]
    data = items[: int(limit)]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": "", "last_id": ""}
    return {"object": "list", "data": data, **ends, "has_more": len(items) > len(data)}


async def _stored(request: Request) -> StoredAnswer:
    attempt = await authenticate(request)
    responses: Responses = request.app.state.responses
    return await responses.stored(attempt, request.path_params["response_id"])


RESPONSE = BASE + "/responses/{response_id}"
RESPONSE_ROUTES = (
    Route(RESPONSE, response, methods=["GET"]),
    Route(RESPONSE + "/input_items", response_input_items, methods=["GET"]),
    Route(RESPONSE + "/cancel", cancel, methods=["POST"]),
)
