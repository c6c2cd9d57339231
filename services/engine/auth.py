"""SGLang's rules for its two keys: the API key and the admin key."""

from __future__ import annotations

import secrets

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from leyden.libs.service import JsonResponse

_OPEN = ("/health", "/ready", "/metrics")
CONTROL = frozenset(
    {
        "/abort_request",
        "/continue_generation",
        "/flush_cache",
        "/pause_generation",
        "/update_weight_version",
        "/update_weights_from_disk",
    }
)


def allowed(path: str, authorization: str | None, api_key: str | None, admin_api_key: str | None) -> bool:
    """Whether a request may pass: health and metrics always, control routes with the admin key where there is one."""
    if path.startswith(_OPEN):
        return True
    needed = (admin_api_key or api_key) if path in CONTROL else api_key
    if needed is None:
        return True
    scheme, _, key = (authorization or "").partition(" ")
    return scheme.lower() == "bearer" and secrets.compare_digest(key.encode(), needed.encode())


class KeyCheck:
    """ASGI middleware that answers 401 where `allowed` says no; it buffers nothing."""

    def __init__(self, app: ASGIApp, *, api_key: str | None, admin_api_key: str | None) -> None:
        self._app, self._api_key, self._admin_api_key = app, api_key, admin_api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._allows(scope):
            await self._app(scope, receive, send)
        else:
            await JsonResponse({"error": "Unauthorized"}, 401)(scope, receive, send)

    def _allows(self, scope: Scope) -> bool:
        authorization = Headers(scope=scope).get("authorization")
        # As SGLang: a browser's question before a request brings no key.
        return scope["method"] == "OPTIONS" or allowed(scope["path"], authorization, self._api_key, self._admin_api_key)
