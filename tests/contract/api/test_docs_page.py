"""The page /docs needs nothing but the API itself."""

from __future__ import annotations

import re

import httpx


async def test_every_file_of_the_docs_page_comes_from_the_api(api_http: httpx.AsyncClient) -> None:
    page = await api_http.get("/docs")
    addresses = re.findall(r"""(?:src|href)=["']([^"']+)""", page.text) + re.findall(r"url: '([^']+)'", page.text)
    assert len(addresses) == 4
    for address in addresses:
        assert "://" not in address
        found = await api_http.get(f"/{address.removeprefix('/')}")
        assert (found.status_code, len(found.content) > 1000) == (200, True), address
