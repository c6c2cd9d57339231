"""What every command needs: the settings with the options laid over them, and a client."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from leyden.libs.cli.errors import CommandError, Exit
from leyden.libs.cli.record import PlatformRecord, read_record
from leyden.libs.cli.settings import Settings
from leyden.libs.client import Client

Home = Annotated[
    Path | None, typer.Option("--home", help="Folder of the platform's files [default: LEYDEN_HOME or ~/.leyden].")
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
        """What the supervisor of this home wrote last."""
        return read_record(self.home)

    def client(self) -> Client:
        """A client of the platform that options, environment or the home name.

        Raises: CommandError: none is known
        """
        url, token = self.settings.url, self.settings.token
        record = self.record()
        if url is None:
            url = record.url if record is not None and record.running() else None
        if url is None:
            raise CommandError(
                f"no platform runs in {self.home}: start it with `leyden up`, or name one with --url or LEYDEN_URL",
                Exit.UNREACHABLE,
            )
        token_file = self.home / "secrets" / "admin-token"
        if token is None and token_file.exists() and (self.settings.url is None or _same(record, url)):
            token = token_file.read_text().strip()
        return Client(url, token)


def _same(record: PlatformRecord | None, url: str) -> bool:
    """The home's own token goes to the home's own platform alone."""
    return record is not None and record.url is not None and record.url.rstrip("/") == url.rstrip("/")


def context_of(ctx: typer.Context, home: Path | None = None) -> Context:
    """The context that the root command made, with a command's own `--home` laid over it."""
    found = ctx.find_object(Context)
    assert found is not None
    return Context(found.settings.model_copy(update={"home": home})) if home is not None else found


def make_context(home: Path | None, url: str | None, token: str | None) -> Context:
    """Settings from the environment with the root options laid over them."""
    options = {"home": home, "url": url, "token": token}
    return Context(Settings().model_copy(update={name: value for name, value in options.items() if value is not None}))
