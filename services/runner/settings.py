"""Settings of the runner, read from `RUNNER_` variables."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from pydantic import AliasChoices, Field
from pydantic_settings import SettingsConfigDict

from leyden.libs.service import HttpAddress, ServiceSettings


class Settings(ServiceSettings):
    """How many attempts run at once, and what bounds them."""

    model_config = SettingsConfigDict(env_prefix="RUNNER_")

    gateway_url: HttpAddress = "http://127.0.0.1:8100"
    """Where agents find the gateway, as an agent's machine sees it; no trailing slash."""
    collector_url: HttpAddress = "http://127.0.0.1:8101"
    """Where agents find the collector."""
    concurrency: int = Field(default=32, ge=1, le=4096)
    """Attempts at once. Agents mostly wait for the model, so this may be far more than cores."""
    work_folder: Path = Field(default_factory=lambda: open_work_folder())
    """Where the fresh folders of attempts are made; what a killed runner left there is removed at the next start.
    Where agents' users could neither pass to it nor be shown it, a folder in /var/tmp takes its place."""
    hidden_paths: tuple[Path, ...] = ()
    """Folders that agents may not open: the platform's own. As JSON: `["/var/lib/leyden"]`."""
    agent_path: str = Field(default=os.defpath, validation_alias=AliasChoices("RUNNER_AGENT_PATH", "PATH"))
    """PATH of agents; the runner's own by default."""
    python: str = sys.executable
    """What `{python}` stands for as the first word of an agent's command."""
    agent_user: str = "own"
    """Whom agents become. `own`: each attempt a user of its own where the runner is root, else the runner's user.
    `same`: the runner's user, even root. Any other word names a user, which all attempts share; that needs
    root, and a user of nothing else: not `nobody`, whose an embedded Postgres is."""
    agent_uids_from: int | None = Field(default=None, ge=1000, le=2**31 - 2**16)
    """The first of the 20,000 user ids that attempts take in turn; nobody else may have them. Unset: 1,900,000,000, or
    30,000 in a user namespace that has fewer."""
    max_open_files: int = Field(default=4096, ge=64)
    """RLIMIT_NOFILE of agents."""
    max_processes: int | None = Field(default=512, ge=1)
    """RLIMIT_NPROC of agents, which counts all processes of their user: set only where that is not the runner's."""
    max_file_bytes: int | None = Field(default=16 * 2**30, ge=2**20)
    """RLIMIT_FSIZE of agents: the longest file one may write."""
    grace_seconds: float = Field(default=5.0, ge=0)
    """Between SIGTERM at an attempt's timeout and SIGKILL of its whole tree."""
    lease_seconds: float = Field(default=30.0, gt=0)
    """A lease not renewed for this long is lost; renewals happen three times as often."""
    poll_seconds: float = Field(default=2.0, gt=0)
    """Longest wait of one look into the task queue, and the pause after Redis or Postgres was away."""
    store_look_seconds: float = Field(default=5.0, gt=0)
    """How often a runner to which nothing is delivered looks for waiting rollouts in Postgres itself."""
    drain_seconds: float = Field(default=10.0, ge=0)
    """After SIGTERM: how long running attempts may finish before they are killed and given back for a retry."""
    key_seconds: int = Field(default=600, ge=1)
    """How long an agent's key outlives its attempt's timeout, for spans that arrive late."""


def open_work_folder() -> Path:
    """A work folder that every user can pass to.

    Not in /tmp where there is another place: agents write there, and may not directly above a hidden folder.
    """
    lasting = Path("/var/tmp")  # noqa: S108  # `Folders` takes only a folder that nobody else may write to
    parent = lasting if os.access(lasting, os.W_OK) else Path(tempfile.gettempdir())
    return parent / f"leyden-attempts-{os.getuid()}"
