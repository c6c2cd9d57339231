"""A browser signs in with a token, and its cookie opens the API to pages of the API's own address alone."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

ORIGIN = {"origin": "http://api.test"}


async def issued(http: httpx.AsyncClient, *scopes: str) -> dict[str, Any]:
    made: dict[str, Any] = (
        await http.post("/v1/tokens", json={"name": "ann", "scopes": list(scopes), "expires_seconds": 3600})
    ).json()
    return made


async def signed_in(http: httpx.AsyncClient, *scopes: str, **more: object) -> httpx.Response:
    """Without the first administrator's header from then on."""
    token = (await issued(http, *scopes))["token"]
    del http.headers["authorization"]
    http.base_url = httpx.URL(ORIGIN["origin"])
    return await http.post("/v1/session", json={"token": token, **more}, headers=ORIGIN)


async def test_a_token_becomes_a_cookie_that_scripts_and_other_sites_cannot_use(api_http: httpx.AsyncClient) -> None:
    answer = await signed_in(api_http, "read")
    assert (answer.status_code, answer.json()["name"], answer.json()["scopes"]) == (200, "ann", ["read"])
    words = answer.headers["set-cookie"].lower().split("; ")
    assert {"httponly", "samesite=strict", "path=/"} <= set(words) and "secure" not in words
    assert any(word.startswith("expires=") for word in words)
    assert (await api_http.get("/v1/runs")).status_code == 200
    assert (await api_http.get("/v1/tokens")).status_code == 403
    assert (await api_http.get("/v1/session")).json() == answer.json()


async def test_behind_tls_the_cookie_never_travels_in_clear(api_http: httpx.AsyncClient) -> None:
    made = await issued(api_http, "read")
    answer = await api_http.post("/v1/session", json={"token": made["token"]}, headers={"origin": "https://a.example"})
    assert "secure" in answer.headers["set-cookie"].lower().split("; ")


@pytest.mark.parametrize("origin", [None, "null", "http://evil.test", "http://api.test.evil.test", "http://api.test:1"])
async def test_a_change_with_a_cookie_needs_the_apis_own_page(api_http: httpx.AsyncClient, origin: str | None) -> None:
    await signed_in(api_http, "admin")
    body = {"name": "stolen", "scopes": ["admin"]}
    foreign = {} if origin is None else {"origin": origin}
    for refused in (
        await api_http.post("/v1/tokens", json=body, headers=foreign),
        await api_http.delete("/v1/session", headers=foreign),
    ):
        assert (refused.status_code, refused.json()["cause"]) == (403, "origin")
    assert (await api_http.post("/v1/tokens", json=body, headers=ORIGIN)).status_code == 201


async def test_a_repeated_create_with_a_cookie_gets_the_first_secret(api_http: httpx.AsyncClient) -> None:
    await signed_in(api_http, "admin")
    headers = {**ORIGIN, "idempotency-key": "k"}
    answers = [
        await api_http.post("/v1/tokens", json={"name": "ci", "scopes": ["read"]}, headers=headers) for _ in "12"
    ]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert answers[0].json() == answers[1].json()


async def test_a_link_signs_in_once_and_the_list_of_changes_says_so(api_http: httpx.AsyncClient) -> None:
    admin = {"authorization": api_http.headers["authorization"]}
    made = await issued(api_http, "read")
    answers = [await api_http.post("/v1/session", json={"token": made["token"], "once": True}) for _ in "12"]
    assert [answer.status_code for answer in answers] == [200, 401]
    assert made["token"] not in answers[0].headers["set-cookie"]
    # It ends with the token that was lent: no holder may renew his own.
    assert answers[0].json()["expires_at"] == made["expires_at"]
    del api_http.headers["authorization"]
    assert (await api_http.get("/v1/runs")).status_code == 200
    [entry] = (await api_http.get("/v1/audit", params={"action": "create_session"}, headers=admin)).json()["items"]
    assert (entry["token_name"], entry["subject"]) == ("ann", made["id"])


async def test_a_token_without_an_end_is_replaced_by_an_administrator_alone(api_http: httpx.AsyncClient) -> None:
    made = (await api_http.post("/v1/tokens", json={"name": "ci", "scopes": ["read"]})).json()
    refused = await api_http.post("/v1/session", json={"token": made["token"], "once": True})
    assert (refused.status_code, "set-cookie" in refused.headers) == (409, False)


async def test_the_first_administrators_token_is_never_used_up(api_http: httpx.AsyncClient) -> None:
    first = api_http.headers["authorization"].removeprefix("Bearer ")
    refused = await api_http.post("/v1/session", json={"token": first, "once": True})
    assert (refused.status_code, "set-cookie" in refused.headers) == (409, False)
    assert (await api_http.post("/v1/session", json={"token": first})).status_code == 200


async def test_signing_out_removes_the_cookie(api_http: httpx.AsyncClient) -> None:
    await signed_in(api_http, "read")
    for _ in range(2):
        assert (await api_http.delete("/v1/session", headers=ORIGIN)).status_code == 204
    assert (await api_http.get("/v1/runs")).status_code == 401


@pytest.mark.parametrize("token", ["wrong", "é", "a\nb"])
async def test_an_unknown_token_sets_no_cookie(api_http: httpx.AsyncClient, token: str) -> None:
    refused = await api_http.post("/v1/session", json={"token": token})
    assert (refused.status_code, "set-cookie" in refused.headers) == (401, False)


async def test_who_rotates_the_own_token_stays_signed_in(api_http: httpx.AsyncClient) -> None:
    other = await issued(api_http, "read")
    await signed_in(api_http, "admin")
    [own] = [one["id"] for one in (await api_http.get("/v1/tokens")).json()["items"] if one["scopes"] == ["admin"]]
    answer = await api_http.post(f"/v1/tokens/{other['id']}/rotate", headers=ORIGIN)
    assert (answer.status_code, "set-cookie" in answer.headers) == (201, False)
    answer = await api_http.post(f"/v1/tokens/{own}/rotate", headers=ORIGIN)
    assert answer.status_code == 201
    words = answer.headers["set-cookie"].lower().split("; ")
    assert {"httponly", "samesite=strict", "path=/"} <= set(words) and any(one.startswith("expires=") for one in words)
    assert (await api_http.get("/v1/tokens")).status_code == 200


async def test_a_script_that_rotates_its_own_token_gets_no_cookie(api_http: httpx.AsyncClient) -> None:
    own = await issued(api_http, "admin")
    headers = {"authorization": f"Bearer {own['token']}"}
    answer = await api_http.post(f"/v1/tokens/{own['id']}/rotate", headers=headers)
    assert (answer.status_code, "set-cookie" in answer.headers) == (201, False)
