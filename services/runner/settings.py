"""Settings of the runner, read from `RUNNER_` variables."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal

from pydantic import AliasChoices, Field, model_validator
from pydantic_settings import SettingsConfigDict

from leyden.libs.contracts.agent_rules import AgentRules
from leyden.libs.sandbox.place import open_work_folder
from leyden.libs.service import HttpAddress, ServiceSettings


class Settings(ServiceSettings):
    """The number of attempts at once, and their bounds."""

    model_config = SettingsConfigDict(env_prefix="RUNNER_")

    gateway_url: HttpAddress = "http://127.0.0.1:8100"
    """The gateway's address as agents see it; no trailing slash."""
    collector_url: HttpAddress = "http://127.0.0.1:8101"
    """The collector's address as agents see it."""
    collector_grpc_url: HttpAddress | None = None
    """The collector's gRPC address (COLLECTOR_GRPC_PORT), for agents of runs that set OTEL_EXPORTER_OTLP_PROTOCOL to
    `grpc`."""
    backend: Literal["process", "kubernetes"] = "process"
    """The place of agents: this machine, for runs with `runner.type` process and container, or Jobs of the Kubernetes
    cluster."""
    namespace: str | None = None
    """Kubernetes: the namespace of agents' Jobs."""
    pod_template_file: Path | None = None
    """Kubernetes: a PodTemplateSpec in YAML, with a container `agent`. The runner adds image, command, variables,
    labels and the task."""
    shared_pod_template_file: Path | None = None
    """Kubernetes: the same for pods that several attempts share (`runner.attempts_per_pod`), whose volume at
    /opt/leyden-server has the server. Its container `agent` runs as root with CHOWN, KILL, SETGID and SETUID alone."""
    release: str = Field(default="leyden", pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")
    """Kubernetes: the label `app.kubernetes.io/instance` of agents' Jobs. Two platforms in one namespace need two."""
    owner_role: str | None = None
    """Kubernetes: a Role of the namespace that owns agents' Jobs: `helm uninstall` ends them with it."""
    agent_rules: AgentRules = Field(
        default_factory=AgentRules, validation_alias=AliasChoices("RUNNER_AGENT_RULES", "API_AGENT_RULES")
    )
    """Images and what else a run may name, by default API_AGENT_RULES: a pod or container of another run does not
    start."""
    start_seconds: float = Field(default=300.0, gt=0)
    """The longest wait of an agent's pod for quota, a node or its image, and of a container for its image. Then the
    attempt fails with the reason, and is tried again."""
    container_program: str | None = None
    """Containers: podman or docker, by name or path. Unset: podman where it is installed, else docker."""
    container_network: str = Field(default="host", pattern=r"^[A-Za-z0-9][\w.:-]*$")
    """Containers: the network of agents, as `--network` of podman and docker. On `host` they reach every port of the
    machine, the platform's among them, as processes do; another one must lead to RUNNER_GATEWAY_URL and
    RUNNER_COLLECTOR_URL."""
    concurrency: int = Field(default=32, ge=1, le=4096)
    """Attempts at once. Agents mostly wait for the model, so this may be far more than cores. Kubernetes: agents of a
    runner that is gone are adopted beyond it."""
    work_folder: Path = Field(default_factory=open_work_folder)
    """Parent of the attempts' fresh folders; the next start removes those that a killed runner left. If agents' own
    users cannot pass to it, the runner uses a folder in /var/tmp instead."""
    hidden_paths: tuple[Path, ...] = ()
    """Folders that agents may not open: the platform's own. As JSON: `["/var/lib/leyden"]`."""
    agent_roots: tuple[Path, ...] = ()
    """Folders below which a run's `agent.directory` may lie; none by default, because the runner, perhaps root, copies
    it for agents. As JSON: `["/srv/agents"]`. `leyden up --agents DIR` adds one."""
    max_directory_bytes: int = Field(default=2**30, ge=2**12)
    """The files of an `agent.directory` in sum; each file or folder counts 4 KiB at least."""
    agent_path: str = Field(default=os.defpath, validation_alias=AliasChoices("RUNNER_AGENT_PATH", "PATH"))
    """PATH of agents; the runner's own by default."""
    python: str = sys.executable
    """The interpreter for `{python}` as the first word of an agent's command."""
    agent_user: Literal["auto", "own", "same"] = "auto"
    """The user of an agent. `own`: one of its own per attempt, which needs a runner that runs as root and an
    interpreter that other users can pass to. `same`: the runner's user; as root without capabilities. `auto`: `own`
    where that is possible, else `same`."""
    agent_uids_from: int | None = Field(default=None, ge=1000, le=2**31 - 2**16)
    """The first of the 20,000 user ids of agents' own users; nobody else may have them. Unset: 1,900,000,000, or
    30,000 in a user namespace that has fewer."""
    max_open_files: int = Field(default=4096, ge=64)
    """RLIMIT_NOFILE of agents."""
    max_processes: int | None = Field(default=512, ge=1)
    """RLIMIT_NPROC of agents with a user of their own; it counts all processes of a user."""
    max_file_bytes: int | None = Field(default=16 * 2**30, ge=2**20)
    """RLIMIT_FSIZE of agents: the longest file one may write."""
    grace_seconds: float = Field(default=5.0, ge=0)
    """Between SIGTERM at an attempt's timeout and SIGKILL of its process tree."""
    lease_seconds: float = Field(default=30.0, gt=0)
    """A lease not renewed for this long is lost; renewals happen three times as often."""
    poll_seconds: float = Field(default=2.0, gt=0)
    """Longest wait for the task queue, and the pause after Redis or Postgres was away."""
    drain_seconds: float = Field(default=10.0, ge=0)
    """After SIGTERM: how long running attempts may finish before they are killed and given back for a retry. Below
    RUNNER_SHUTDOWN_SECONDS, so that giving them back has time, too."""

    @model_validator(mode="after")
    def _shutdown_outlasts_the_drain(self) -> Settings:
        if self.drain_seconds >= self.shutdown_seconds:
            raise ValueError(
                f"RUNNER_DRAIN_SECONDS {self.drain_seconds:g} needs a higher RUNNER_SHUTDOWN_SECONDS than"
                f" {self.shutdown_seconds:g}: set it to {self.drain_seconds + 10:g}"
            )
        return self

    @model_validator(mode="after")
    def _kubernetes_needs_its_settings(self) -> Settings:
        needed = {"NAMESPACE": self.namespace, "POD_TEMPLATE_FILE": self.pod_template_file}
        unset = [f"RUNNER_{name}" for name, value in needed.items() if value is None]
        if self.backend == "kubernetes" and unset:
            raise ValueError(f"RUNNER_BACKEND=kubernetes needs {', '.join(unset)}")
        shares_pods = self.backend == "kubernetes" and self.agent_rules.attempts_per_pod > 1
        if shares_pods and self.shared_pod_template_file is None:
            raise ValueError("attempts_per_pod in RUNNER_AGENT_RULES needs RUNNER_SHARED_POD_TEMPLATE_FILE")
        return self
