"""The settings of a command with its options laid over them, and the client that they name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from leyden.libs.cli.cluster.kubectl import Kubectl
from leyden.libs.cli.cluster.release import API_PORT, Release, find_release
from leyden.libs.cli.errors import CommandError, Exit
from leyden.libs.cli.local.record import PlatformRecord, read_record
from leyden.libs.cli.local.services import ADMIN_TOKEN
from leyden.libs.cli.settings import Settings
from leyden.libs.client import Client

Home = Annotated[
    Path | None,
    typer.Option("--home", help="Folder of the platform's files.", show_default="LEYDEN_HOME, or ~/.leyden"),
]

CLUSTER = frozenset({"kube_context", "kube_namespace", "release"})
"""The settings that name a release on a cluster."""


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

    @property
    def on_cluster(self) -> bool:
        """Whether options or environment name a cluster."""
        return any(getattr(self.settings, name) is not None for name in CLUSTER)

    def kubectl(self) -> Kubectl:
        """kubectl with the context that options or environment name, else with the current one."""
        return Kubectl(self.settings.kube_context)

    def release(self) -> Release:
        """The platform's release on the cluster. Raises: CommandError: none or several match"""
        return find_release(self.kubectl(), self.settings.kube_namespace, self.settings.release)

    @contextmanager
    def client(self, *, patience_seconds: float = 10.0) -> Iterator[Client]:
        """A client of the platform that options, environment or the home name.

        Args: patience_seconds: see `Client`

        Raises: CommandError: none of them names one
        """
        if self.on_cluster:
            release = self.release()
            token = self.settings.token or release.token()
            target = f"service/{release.api}"
            forward = release.kubectl.forward(release.namespace, target, API_PORT)
            with forward as url, Client(url, token, patience_seconds=patience_seconds) as client:
                yield client
            return
        with Client(*self.address(), patience_seconds=patience_seconds) as client:
            yield client

    def address(self) -> tuple[str, str | None]:
        url, token, record = self.settings.url, self.settings.token, self.record()
        own_url = record.url if record is not None else None
        if url is None and record is not None and record.is_running():
            url = own_url
        if url is None:
            raise CommandError(
                f"no platform runs in {self.home}: start it with `leyden up` (`leyden up --agents FOLDER` for"
                " agents of your own), or name one with --url (LEYDEN_URL) or --context (LEYDEN_KUBE_CONTEXT)",
                Exit.UNREACHABLE,
            )
        token_file = self.home / ADMIN_TOKEN
        # The home's own token goes to the home's own platform alone.
        if token is None and token_file.exists() and own_url is not None and own_url.rstrip("/") == url.rstrip("/"):
            token = token_file.read_text().strip()
        return url, token


def context_of(ctx: typer.Context, home: Path | None = None) -> Context:
    """The context that the root command made, with a command's own `--home` laid over it."""
    context = ctx.find_object(Context)
    assert context is not None
    return Context(context.settings.model_copy(update={"home": home})) if home is not None else context


def make_context(**options: object) -> Context:
    """Settings from the environment with the root options laid over them.

    Raises: CommandError: they name a cluster and an address
    """
    given = {name: value for name, value in options.items() if value is not None}
    context = Context(Settings().model_copy(update=given))
    if not context.on_cluster or context.settings.url is None:
        return context
    cluster = bool(given.keys() & CLUSTER)
    if cluster == ("url" in given):
        raise CommandError("choose --url (LEYDEN_URL) or --context (LEYDEN_KUBE_CONTEXT), not both", Exit.USAGE)
    # Options replace the environment, with the token that belongs to the environment's platform.
    unused = ({"url"} if cluster else CLUSTER) | ({"token"} - given.keys())
    return Context(context.settings.model_copy(update=dict.fromkeys(unused)))
