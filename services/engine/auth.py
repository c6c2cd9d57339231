"""Checks SGLang's two keys, the API key and the admin key, by SGLang's rules."""

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
        "/load_lora_adapter",
        "/pause_generation",
        "/unload_lora_adapter",
        "/update_weight_version",
        "/update_weights_from_disk",
    }
)


def allowed(path: str, authorization: str | None, api_key: str | None, admin_api_key: str | None) -> bool:
    """Whether a request is authorized: health and metrics always, control routes by the admin key if there is one."""
    if path.startswith(_OPEN):
        return True
    needed = (admin_api_key or api_key) if path in CONTROL else api_key
    if needed is None:
        return True
    scheme, _, key = (authorization or "").partition(" ")
    return scheme.lower() == "bearer" and secrets.compare_digest(key.encode(), needed.encode())


class KeyCheck:
    """ASGI middleware that answers 401 to requests that are not `allowed`; it buffers no bodies."""

    def __init__(self, app: ASGIApp, *, api_key: str | None, admin_api_key: str | None) -> None:
        self._app, self._api_key, self._admin_api_key = app, api_key, admin_api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._allows(scope):
            await self._app(scope, receive, send)
        else:
            await JsonResponse({"error": "Unauthorized"}, 401)(scope, receive, send)

    def _allows(self, scope: Scope) -> bool:
        authorization = Headers(scope=scope).get("authorization")
        # As in SGLang: browsers send CORS preflight requests without a key.
        return scope["method"] == "OPTIONS" or allowed(scope["path"], authorization, self._api_key, self._admin_api_key)
