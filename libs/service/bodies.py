"""JSON bodies as our doors read them: strictly, and refused with what is wrong, where, and what to write."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from libs.contracts.strict import BadJson, read_json
from libs.service.problems import Problem

JSON = "application/json"


class JsonRoute(APIRoute):
    """A route whose body is read by `libs.contracts.strict`: `APIRouter(route_class=JsonRoute)`.

    400 for what is not JSON that can be kept, 415 for another content type and for compressed bodies.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler that FastAPI calls."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle

        async def strictly(request: Request) -> Response:
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
