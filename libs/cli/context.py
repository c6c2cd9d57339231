"""The settings of a command with its options laid over them, and the client that they name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from leyden.libs.cli.errors import CommandError, Exit
from leyden.libs.cli.record import PlatformRecord, read_record
from leyden.libs.cli.services import ADMIN_TOKEN
from leyden.libs.cli.settings import Settings
from leyden.libs.client import Client

Home = Annotated[
    Path | None,
    typer.Option("--home", help="Folder of the platform's files.", show_default="LEYDEN_HOME, or ~/.leyden"),
]


@dataclass(frozen=True)
class Context:
    """The settings of one command."""

    settings: Settings

    @property
    def home(self) -> Path:
        """The platform's folder."""
        return self.settings.home.expanduser()

    def record(self) -> PlatformRecord | None:
        """The record that the supervisor of this home wrote last."""
        return read_record(self.home)

    def client(self) -> Client:
        """A client of the platform that options, environment or the home name.

        Raises: CommandError: none of them names one
        """
        url, token, record = self.settings.url, self.settings.token, self.record()
        own_url = record.url if record is not None else None
        if url is None and record is not None and record.is_running():
            url = own_url
        if url is None:
            raise CommandError(
                f"no platform runs in {self.home}: start it with `leyden up`, or name one with --url or LEYDEN_URL",
                Exit.UNREACHABLE,
            )
        token_file = self.home / ADMIN_TOKEN
        # The home's own token goes to the home's own platform alone.
        if token is None and token_file.exists() and own_url is not None and own_url.rstrip("/") == url.rstrip("/"):
            token = token_file.read_text().strip()
        return Client(url, token)


def context_of(ctx: typer.Context, home: Path | None = None) -> Context:
    """The context that the root command made, with a command's own `--home` laid over it."""
    context = ctx.find_object(Context)
    assert context is not None
    return Context(context.settings.model_copy(update={"home": home})) if home is not None else context


def make_context(home: Path | None, url: str | None, token: str | None) -> Context:
    """Settings from the environment with the root options laid over them."""
    options = {"home": home, "url": url, "token": token}
    return Context(Settings().model_copy(update={name: value for name, value in options.items() if value is not None}))
