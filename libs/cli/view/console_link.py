"""The link that opens the console of a platform, signed in."""

from __future__ import annotations

from urllib.parse import quote

from rich.console import Group
from rich.text import Text

from leyden.libs.client import Client, Forbidden
from leyden.libs.contracts.api.tokens import ApiScope

HOURS = 12


def console_link(client: Client, url: str, page: str = "/") -> str:
    """A link that signs one browser in, with a token that may read, within half a day.

    The token stands in the fragment, which browsers never send: no log of a proxy holds it.
    """
    issued = client.create_token("console", [ApiScope.READ], expires_seconds=HOURS * 3600)
    return f"{url}/#sign-in={issued.token}&to={quote(page)}"


def run_line(client: Client, url: str, run_id: str) -> Group | str:
    """The link to a run's page, or the command that makes one where the client's token may make no tokens."""
    try:
        return link_line(console_link(client, url, f"/runs/{run_id}"))
    except Forbidden:
        return f"See it in a browser with an administrator's: leyden console {run_id}"


def link_line(link: str) -> Group:
    """The link on one line however narrow the terminal is, so that it can be copied whole."""
    # Why: rich joins texts that it prints itself, and the sum wraps; a group is no text.
    return Group(Text(f"console (signs in once): {link}", no_wrap=True, overflow="ignore"))
