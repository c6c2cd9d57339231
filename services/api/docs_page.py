"""The page /docs: the OpenAPI document in Swagger UI, whose files come from a wheel, so that it needs no internet."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import FileResponse, HTMLResponse

router = APIRouter(include_in_schema=False)

SCRIPT, STYLE, ICON = "swagger-ui-bundle.js", "swagger-ui.css", "favicon.png"


@router.get("/docs")
async def get_docs() -> HTMLResponse:
    """The page; its addresses are relative, so that it works below a proxy's prefix too."""
    return get_swagger_ui_html(
        openapi_url="openapi.json",
        title="Leyden",
        swagger_js_url=f"docs/{SCRIPT}",
        swagger_css_url=f"docs/{STYLE}",
        swagger_favicon_url=f"docs/{ICON}",
    )


@router.get(f"/docs/{SCRIPT}")
async def get_script() -> FileResponse:
    """Swagger UI."""
    return _asset(SCRIPT)


@router.get(f"/docs/{STYLE}")
async def get_style() -> FileResponse:
    """The style of Swagger UI."""
    return _asset(STYLE)


@router.get(f"/docs/{ICON}")
async def get_icon() -> FileResponse:
    """The page's icon."""
    return _asset(ICON)


def _asset(name: str) -> FileResponse:
    return FileResponse(str(files("fastapi_offline").joinpath("static", name)))
