"""Strict JSON bodies: a refusal names the fault, its place and the remedy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, get_args, get_origin

from fastapi import Request, Response
from fastapi.routing import APIRoute

from leyden.libs.contracts.strict import BadJson, read_json
from leyden.libs.service.errors import Problem

JSON = "application/json"


class JsonRoute(APIRoute):
    """A route that reads its body with `leyden.libs.contracts.strict`: `APIRouter(route_class=JsonRoute)`.

    It answers 400 to a body that is no JSON or that Postgres cannot store, 415 to another content type and to a
    compressed body, 422 to an unknown or repeated parameter of the address.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler that FastAPI calls."""
        handle = super().get_route_handler()
        parameters = {field.alias: _is_list(field.field_info.annotation) for field in self.dependant.query_params}

        async def strictly(request: Request) -> Response:
            _check_query(request, parameters)
            if self.body_field is None:
                return await handle(request)
            strict = _StrictRequest(request.scope, request.receive)
            if await strict.body():
                _check_headers(strict)
            return await handle(strict)

        return strictly


class _StrictRequest(Request):
    async def json(self) -> Any:
        try:
            return read_json(await self.body())
        except BadJson as error:
            raise Problem(400, str(error), cause="json") from None


def _check_query(request: Request, parameters: Mapping[str, bool]) -> None:
    """Raises: Problem: a parameter is unknown, or comes twice and is no list"""
    counts = Counter(name for name, _ in request.query_params.multi_items())
    for name, count in counts.items():
        if name not in parameters:
            known = ", ".join(parameters) or "none"
            raise Problem(
                422, f"unknown parameter {name[:100]!r}: remove it; parameters here: {known}", cause="invalid"
            )
        if count > 1 and not parameters[name]:
            raise Problem(422, f"parameter {name!r} comes {count} times: send it once", cause="invalid")


def _is_list(annotation: Any) -> bool:
    return any(get_origin(part) is list for part in (annotation, *get_args(annotation)))


def _check_headers(request: Request) -> None:
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise Problem(415, f"content-encoding {encoding!r}: send the body as it is", cause="encoding_unknown")
    kind, _, parameters = request.headers.get("content-type", "").partition(";")
    if kind.strip().lower() != JSON:
        raise Problem(415, f"the content type is {kind!r}: send `content-type: {JSON}`", cause="content_type_unknown")
    _, _, charset = parameters.lower().partition("charset=")
    if charset.strip(' "') not in {"", "utf-8", "utf8", "us-ascii"}:
        raise Problem(415, f"the charset is {charset[:40]}: encode the body as UTF-8", cause="content_type_unknown")
