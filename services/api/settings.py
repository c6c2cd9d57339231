"""Settings of the API, read from `API_` variables."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr
from pydantic_settings import SettingsConfigDict

from leyden.libs.contracts.addresses import HttpAddress
from leyden.libs.contracts.agent_rules import AgentRules
from leyden.libs.contracts.judgements import Machine
from leyden.libs.service import HttpSettings
from leyden.libs.service.secrets import read_secret
from leyden.libs.weights import StoreSettings


class Settings(HttpSettings, StoreSettings):
    """Addresses, the first administrator, and bounds on requests."""

    model_config = SettingsConfigDict(env_prefix="API_")

    port: int = Field(default=8000, ge=0, le=65535)
    """HTTP port; 0 takes a free one."""
    admin_token: SecretStr | None = None
    """A bearer token with every scope, for the first administrator; further tokens are made through the API."""
    admin_token_file: Path | None = None
    """File that holds the admin token, instead of `admin_token`."""
    gateway_url: HttpAddress | None = None
    """The gateway's address, as external agents and this API reach it; no trailing slash. Without it and
    `collector_url`, the API refuses runs with `runner.type: external`, and questions of the playground."""
    collector_url: HttpAddress | None = None
    """The collector's address as external agents see it."""
    runner_types: frozenset[Literal["process", "container", "kubernetes"]] | None = None
    """Values of `runner.type` that the platform's runners execute, as a JSON list. The API
    refuses runs with another; unset, their rollouts wait for a runner of that type."""
    one_machine: bool = False
    """Whether runners, trainers and engines are on this API's machine, as by `leyden up`. The API then refuses runs
    whose `agent.directory`, model or grader's `directory` is missing; elsewhere it warns of the former two, because
    their machines may have the folder."""
    code_graders: bool = True
    """Whether the platform's graders run the operator's own code (`python`, `command`); false where their
    GRADER_CODE_PROCESSES is 0, as in a cluster. The API then refuses runs with such a grader."""
    container_graders: bool = False
    """Whether the platform's graders start containers: their GRADER_CONTAINER_JOBS is above 0, as in a cluster with
    `grader.containers.enabled`. The API refuses runs with a grader of type `container` elsewhere."""
    container_internet: bool = False
    """Whether such a container may have `network: true`, as with the chart's `grader.containers.allowInternet`, which
    opens their network. The API refuses it elsewhere."""
    judges: frozenset[str] | None = None
    """Names of the graders' GRADER_PROVIDERS, as a JSON list, which `leyden up` sets. The API refuses runs with a judge
    of another one; unset, such a component fails."""
    providers: frozenset[str] | None = None
    """Names of the gateway's GATEWAY_PROVIDERS, as `judges`, for the providers of `policies` and `embeddings`."""
    grader_roots: tuple[Path, ...] | None = None
    """The graders' GRADER_CODE_ROOTS, as `judges`: the API refuses runs with a grader's `directory` elsewhere."""
    agent_rules: AgentRules = AgentRules()
    """Secrets, images, nodes, tolerations and resources that a run with `runner.type: kubernetes` may name, as JSON:
    `{"secrets": ["tools"], "images": ["registry.example/*"], "limits": {"cpu": "4"}}`. Its images bind
    `runner.type: container`, too."""
    machine: Machine = Machine(gpus=0)
    """The trainer's hosts, as JSON: `{"gpus": 8, "hosts": 1, "gpu_bytes": "80Gi", "host_bytes": "512Gi"}`. The API
    refuses runs whose weights, gradients and moments exceed a size, and warns of others; a size left out is not
    judged."""
    max_upload_bytes: int = Field(default=512 * 2**20, ge=1024)
    """Size of one dataset upload."""
    upload_silence_seconds: float = Field(default=30.0, gt=0)
    """How long the sender of an upload may pause before it is given up."""

    def first_admin_token(self) -> str | None:
        """The bootstrap token; None when only tokens in the database open the API.

        Raises: SecretError: its file is missing, empty, or open to other users
        """
        return read_secret(self.admin_token, self.admin_token_file)
