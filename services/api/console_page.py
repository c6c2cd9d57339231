"""The console: the built page below `/`, which talks to the API as any client does.

`make console` builds `services/api/console` into the folder `static`; wheels and images hold it.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse, PlainTextResponse, Response

from leyden.libs.service import Problem

router = APIRouter(include_in_schema=False)

STATIC = Path(__file__).with_name("static")
MISSING = "The console is not built: run `make console` in the checkout, or install Leyden's wheel or images.\n"
# Agents' texts are on this page: nothing but its own files may run or be asked.
HEADERS = {
    "content-security-policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


@router.get("/")
async def get_page() -> Response:
    """The page; its addresses are relative, so that it works below a proxy's prefix too."""
    page = STATIC / "index.html"
    if not page.is_file():
        return PlainTextResponse(MISSING, 404, HEADERS)
    return FileResponse(page, headers={**HEADERS, "cache-control": "no-cache"})


@router.get("/assets/{name}")
async def get_asset(name: str) -> Response:
    """A script, a style or an image of the page; another content has another name."""
    asset = STATIC / "assets" / name
    if not asset.is_file():
        raise Problem(404, "the console has no such file: reload its page", cause="unknown")
    return FileResponse(asset, headers={**HEADERS, "cache-control": "public, max-age=31536000, immutable"})
