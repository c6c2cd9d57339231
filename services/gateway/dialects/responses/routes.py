"""HTTP routes of what the Responses API stores: responses with their input items, conversations with their items."""

from __future__ import annotations

import secrets
import time

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from leyden.libs.contracts.conversation import Json
from leyden.libs.service import JsonResponse
from leyden.services.gateway.calls.context import Attempt
from leyden.services.gateway.calls.retries import Retry
from leyden.services.gateway.dialects.body import Wire, read_object, validated
from leyden.services.gateway.dialects.responses.dialect import Responses, found, input_items, response_of
from leyden.services.gateway.dialects.responses.items import Item, stored_items
from leyden.services.gateway.errors import BadRequest
from leyden.services.gateway.prompt.stored import StoredAnswer
from leyden.services.gateway.records.agent_objects import AgentObjects
from leyden.services.gateway.requests import BASE, authenticate, body_of

MAX_ITEMS = 100
DEFAULT_ITEMS = 20


async def response(request: Request) -> Response:
    """Returns a response of this attempt."""
    if request.query_params.get("stream") == "true":
        message = "A stored response is not streamed: read it without 'stream'."
        raise BadRequest(message, param="stream", code="unsupported_parameter")
    stored = await _stored(request)
    return JsonResponse(response_of(stored.parameters, stored.conversation.tools, stored.completion))


async def delete_response(request: Request) -> Response:
    """Deletes a response for its agent; the record of its call stays."""
    response_id = f"resp_{(await _stored(request)).completion.request_id}"
    await _objects(request).add((await authenticate(request)).of_run, response_id, {response_id: None})
    return JsonResponse({"id": response_id, "object": "response", "deleted": True})


async def response_input_items(request: Request) -> Response:
    """Lists the items of a response's conversation before its answer."""
    return JsonResponse(page(request, input_items(await _stored(request))))


async def cancel(request: Request) -> Response:
    """Refuses: as at OpenAI, only responses in the background can be cancelled, and there are none."""
    await _stored(request)
    raise BadRequest("Only background responses can be cancelled: close the connection instead.", code="invalid_value")


async def create_conversation(request: Request) -> Response:
    """Makes a conversation, with items if the body has some."""
    attempt = await authenticate(request)
    body = await _read(request, attempt)
    conversation_id = f"conv_{secrets.token_hex(12)}"
    own = {"id": conversation_id, "object": "conversation", "created_at": int(time.time()), "metadata": body.metadata}
    items = stored_items(body.items, secrets.token_hex(12))
    await _objects(request).add(attempt.of_run, conversation_id, {conversation_id: own, **items})
    return JsonResponse(own)


async def conversation(request: Request) -> Response:
    """Returns a conversation."""
    _, [own, *_] = await _conversation(request)
    return JsonResponse(own)


async def update_conversation(request: Request) -> Response:
    """Replaces the metadata of a conversation."""
    attempt, [own, *_] = await _conversation(request)
    own |= {"metadata": (await _read(request, attempt)).metadata}
    await _objects(request).replace(attempt.of_run, own["id"], own["id"], own)
    return JsonResponse(own)


async def delete_conversation(request: Request) -> Response:
    """Deletes a conversation with its items."""
    attempt, [own, *_] = await _conversation(request)
    await _objects(request).delete(attempt.of_run, own["id"])
    return JsonResponse({"id": own["id"], "object": "conversation.deleted", "deleted": True})


async def conversation_items(request: Request) -> Response:
    """Lists the items of a conversation."""
    _, [_, *items] = await _conversation(request)
    return JsonResponse(page(request, items))


async def add_items(request: Request) -> Response:
    """Appends items to a conversation; a client's retry of the last ones returns those."""
    attempt, [own, *items] = await _conversation(request)
    new = list(stored_items((await _read(request, attempt)).items, secrets.token_hex(12)).values())
    last = items[-len(new) :] if new else []
    is_repeat = Retry.of(request.headers).may_be_answered and list(map(_content, last)) == list(map(_content, new))
    if is_repeat:
        new = last
    else:
        await _objects(request).add(attempt.of_run, own["id"], {item["id"]: item for item in new})
    return JsonResponse(_list(new, has_more=False))


async def conversation_item(request: Request) -> Response:
    """Returns an item of a conversation."""
    _, [_, *items] = await _conversation(request)
    return JsonResponse(_item(request, items))


async def delete_item(request: Request) -> Response:
    """Deletes an item of a conversation, and returns the conversation."""
    attempt, [own, *items] = await _conversation(request)
    await _objects(request).delete(attempt.of_run, own["id"], _item(request, items)["id"])
    return JsonResponse(own)


def page(request: Request, items: list[Json]) -> Json:
    """Returns a page of a list by the parameters `order`, `after` and `limit`. Raises: BadRequest."""
    query = request.query_params
    limit = query.get("limit", str(DEFAULT_ITEMS))
    if not limit.isdecimal() or len(limit) > 3 or not 1 <= int(limit) <= MAX_ITEMS:
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
    return _list(data, has_more=len(items) > len(data))


def _list(data: list[Json], *, has_more: bool) -> Json:
    first, last = (data[0]["id"], data[-1]["id"]) if data else ("", "")
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": has_more}


def _content(item: Json) -> Json:
    return {name: value for name, value in item.items() if name != "id"}


def _item(request: Request, items: list[Json]) -> Json:
    name = request.path_params["item_id"]
    return found(next((item for item in items if item["id"] == name), None), "item", name, "item_id")


class _Body(Wire):
    items: list[Item] = Field(default_factory=list)
    metadata: dict[str, str] = Field(default_factory=dict)


async def _read(request: Request, attempt: Attempt) -> _Body:
    with request.app.state.budget.share(attempt.key) as share:
        return validated(_Body, read_object(await body_of(request, share), param="items"), {})


async def _conversation(request: Request) -> tuple[Attempt, list[Json]]:
    attempt = await authenticate(request)
    responses: Responses = request.app.state.responses
    return attempt, await responses.conversation(attempt, request.path_params["conversation_id"])


def _objects(request: Request) -> AgentObjects:
    objects: AgentObjects = request.app.state.agent_objects
    return objects


async def _stored(request: Request) -> StoredAnswer:
    attempt = await authenticate(request)
    responses: Responses = request.app.state.responses
    return await responses.stored(attempt, request.path_params["response_id"])


RESPONSE = BASE + "/responses/{response_id}"
CONVERSATION = BASE + "/conversations/{conversation_id}"
RESPONSE_ROUTES = (
    Route(RESPONSE, response, methods=["GET"]),
    Route(RESPONSE, delete_response, methods=["DELETE"]),
    Route(RESPONSE + "/input_items", response_input_items, methods=["GET"]),
    Route(RESPONSE + "/cancel", cancel, methods=["POST"]),
    Route(BASE + "/conversations", create_conversation, methods=["POST"]),
    Route(CONVERSATION, conversation, methods=["GET"]),
    Route(CONVERSATION, update_conversation, methods=["POST"]),
    Route(CONVERSATION, delete_conversation, methods=["DELETE"]),
    Route(CONVERSATION + "/items", conversation_items, methods=["GET"]),
    Route(CONVERSATION + "/items", add_items, methods=["POST"]),
    Route(CONVERSATION + "/items/{item_id}", conversation_item, methods=["GET"]),
    Route(CONVERSATION + "/items/{item_id}", delete_item, methods=["DELETE"]),
)
