"""Tokens on the page Platform: made, rotated and revoked; a secret is shown once and stays in no address and store."""

from __future__ import annotations

import re
from collections.abc import Callable

import httpx
from playwright.sync_api import Page, expect

from leyden.libs.client import Client
from leyden.libs.contracts.api.tokens import ApiScope
from tests.contract.console.conftest import SHOWN
from tests.fakes.served_api import TOKEN
from tests.support.browser import Visitor

MARKUP = "<img src=x onerror=window.hacked=1>"
SHOWN_MARKUP = SHOWN[: len(MARKUP)]


def sign_in(page: Page, api_url: str, token: str = TOKEN) -> None:
    page.goto(f"{api_url}/#/platform")
    page.get_by_role("textbox", name="Token").fill(token)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Tokens")).to_be_visible()


def shown_secret(page: Page) -> str:
    """The secret on the page, which neither its address nor the browser's storage has."""
    secret = page.locator("code", has_text=re.compile("^leyden_")).inner_text()
    kept = page.evaluate("JSON.stringify([location.href, {...localStorage}, {...sessionStorage}, document.cookie])")
    assert secret not in kept
    return secret


def status_of(api_url: str, secret: str) -> int:
    headers = {"authorization": f"Bearer {secret}"}
    return httpx.get(f"{api_url}/v1/runs", headers=headers, timeout=60).status_code


def test_an_administrator_makes_rotates_and_revokes_tokens(open_page: Callable[[str], Visitor], api_url: str) -> None:
    visitor = open_page("/platform")
    page = visitor.page
    # The link signs in with a token that reads.
    expect(page.get_by_text("sign in with one of scope admin")).to_be_visible()
    page.get_by_role("button", name="Sign out").click()
    sign_in(page, api_url)
    region = page.get_by_role("region", name="Tokens", exact=True)
    page.get_by_label("Name of the person or script").fill(MARKUP)
    page.get_by_label("Days").fill("2")
    page.keyboard.press("Enter")
    expect(page.get_by_text("It is shown here once")).to_be_visible()
    first = shown_secret(page)
    assert status_of(api_url, first) == 200
    row = region.locator("tbody tr", has_text=SHOWN_MARKUP)
    expect(row).to_have_count(1)
    expect(row.get_by_role("cell").nth(0)).to_have_text("read")
    expect(row.get_by_role("cell").nth(3)).to_have_text("none")
    assert visitor.violations() == []

    page.get_by_role("button", name="Put it away").click()
    assert first not in page.content()
    row.get_by_role("button", name="Rotate").click()
    page.get_by_role("button", name="Yes, rotate").click()
    expect(page.get_by_text("It is shown here once")).to_be_visible()
    second = shown_secret(page)
    assert (status_of(api_url, first), status_of(api_url, second)) == (401, 200)
    page.reload()
    expect(page.get_by_role("heading", name="Tokens")).to_be_visible()
    assert second not in page.content()

    valid = region.locator("tbody tr", has_text="valid").filter(has_text=SHOWN_MARKUP)
    valid.get_by_role("button", name="Revoke").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_text("Whoever has it is refused at the next request")).to_be_visible()
    assert visitor.violations() == []
    page.get_by_role("button", name="Yes, revoke").click()
    expect(region.locator("tbody tr", has_text="revoked").filter(has_text=SHOWN_MARKUP)).to_have_count(2)
    assert status_of(api_url, second) == 401


def test_who_rotates_the_own_token_sees_its_new_secret_and_stays_signed_in(
    visit: Callable[[], Visitor], api_url: str
) -> None:
    with Client(api_url, TOKEN) as client:
        old = client.create_token("ann", [ApiScope.ADMIN]).token
    page = visit().page
    sign_in(page, api_url, old)
    page.get_by_role("button", name="Rotate ann").click()
    page.get_by_role("button", name="Yes, rotate").click()
    # The list is asked again with the new cookie.
    region = page.get_by_role("region", name="Tokens", exact=True)
    expect(region.locator("tbody tr", has_text="revoked")).to_have_count(1)
    expect(page.get_by_text("It is shown here once")).to_be_visible()
    assert (status_of(api_url, old), status_of(api_url, shown_secret(page))) == (401, 200)
    page.reload()
    expect(page.get_by_role("heading", name="Tokens")).to_be_visible()
