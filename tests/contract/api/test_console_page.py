"""The API serves the console's files with a strict policy, and says how to build them where they are missing."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from leyden.services.api import console_page


@pytest.fixture
def static(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(console_page, "STATIC", tmp_path / "static")
    return tmp_path / "static"


async def test_a_page_that_is_not_built_says_how_to_build_it(api_http: httpx.AsyncClient, static: Path) -> None:
    answer = await api_http.get("/")
    assert (answer.status_code, answer.headers["content-type"]) == (404, "text/plain; charset=utf-8")
    assert "make console" in answer.text


async def test_page_and_files_come_with_a_strict_policy_and_without_a_token(
    api_http: httpx.AsyncClient, static: Path
) -> None:
    (static / "assets").mkdir(parents=True)
    (static / "index.html").write_text("<script src=./assets/a.js></script>")
    (static / "assets" / "a.js").write_text("1")
    (static / "secret").write_text("s")
    del api_http.headers["authorization"]
    page, script = await api_http.get("/"), await api_http.get("/assets/a.js")
    for answer, kind in ((page, "html"), (script, "javascript")):
        assert answer.status_code == 200 and kind in answer.headers["content-type"]
        assert answer.headers["content-security-policy"].startswith("default-src 'self'; object-src 'none'")
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert (page.headers["cache-control"], "immutable" in script.headers["cache-control"]) == ("no-cache", True)
    for name in ("none.js", "..%2fsecret", "%2e%2e%2fsecret"):
        assert (await api_http.get(f"/assets/{name}")).status_code in {404, 405}, name
