"""Settings of the runner, read from `RUNNER_` variables."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from pydantic import AliasChoices, Field
from pydantic_settings import SettingsConfigDict

from libs.service import ServiceSettings


class Settings(ServiceSettings):
    """How many attempts run at once, and what bounds them."""

    model_config = SettingsConfigDict(env_prefix="RUNNER_")

    gateway_url: str = "http://127.0.0.1:8100"
    """Where agents find the gateway, as an agent's machine sees it; no trailing slash."""
    collector_url: str = "http://127.0.0.1:8101"
    """Where agents find the collector."""
    concurrency: int = Field(default=32, ge=1, le=4096)
    """Attempts at once. Agents mostly wait for the model, so this may be far more than cores."""
    work_folder: Path = Field(default_factory=lambda: Path(tempfile.gettempdir()) / f"leyden-attempts-{os.getuid()}")
    """Where the fresh folders of attempts are made; what a killed runner left there is removed at the next start."""
    agent_path: str = Field(default=os.defpath, validation_alias=AliasChoices("RUNNER_AGENT_PATH", "PATH"))
    """PATH of agents; the runner's own by default."""
    python: str = sys.executable
    """What `{python}` stands for as the first word of an agent's command."""
    agent_user: str | None = None
    """User that agents become, as `name`; needs root. Unset, agents run as the runner's user: right on a laptop, where
    agents are the operator's own code."""
    max_open_files: int = Field(default=4096, ge=64)
    """RLIMIT_NOFILE of agents."""
    max_processes: int | None = Field(default=None, ge=1)
    """RLIMIT_NPROC of agents: counted over all processes of their user, so set it only with an `agent_user`."""
    grace_seconds: float = Field(default=5.0, ge=0)
    """Between SIGTERM at an attempt's timeout and SIGKILL of its whole tree."""
    lease_seconds: float = Field(default=30.0, gt=0)
    """A lease not renewed for this long is lost; renewals happen three times as often."""
    poll_seconds: float = Field(default=2.0, gt=0)
    """Longest wait of one look into the task queue, and the pause after Redis or Postgres was away."""
    drain_seconds: float = Field(default=10.0, ge=0)
    """After SIGTERM: how long running attempts may finish before they are killed and given back for a retry."""
    key_seconds: int = Field(default=600, ge=1)
    """How long an agent's key outlives its attempt's timeout, for spans that arrive late."""
