"""Settings of the grader, read from `GRADER_…` and the shared `LEYDEN_…`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal

from pydantic import AliasChoices, Field, model_validator
from pydantic_settings import SettingsConfigDict

from leyden.libs.sandbox.place import open_work_folder
from leyden.libs.service import ServiceSettings
from leyden.services.grader.prices import JudgeProvider


class Settings(ServiceSettings):
    """The number of gradings at once, and their bounds."""

    model_config = SettingsConfigDict(env_prefix="GRADER_")

    processes: int = Field(default=2, ge=1, le=256)
    """Processes that run built-in graders; each grades one attempt at a time."""
    component_seconds: float = Field(default=10.0, gt=0)
    """Limit on the processor time of one component of one attempt; then its process ends. It holds for what a grader
    computes before it reads the output, as from a task's references, which fails the component, and from then on,
    which earns the worst."""
    providers: dict[str, JudgeProvider] = Field(default_factory=dict)
    """Servers of OpenAI's chat completions whose models judge (graders `score_model` and `relative_model`), as a JSON
    object by name: `{"judge": {"url": "https://api.openai.com/v1", "api_key_file": "/secrets/judge"}}`. `"price":
    {"prompt": 0.25, "completion": 2}` is that of a million tokens, for `reward.judge_cost`."""
    judge_calls: int = Field(default=16, ge=1, le=4096)
    """Calls of judges that run at once, attempts that wait for a score, and groups that wait for a comparison; attempts
    of other runs do not wait for them."""
    judge_seconds: float = Field(default=120.0, gt=0)
    """Limit on one call of a judge; then it is repeated."""
    code_processes: int = Field(default=2, ge=0, le=256)
    """Graders of the operator's own code (`python`, `command`) that run at once; attempts of other runs do not wait
    for them. 0: this service runs none, as in a cluster, and such a component fails."""
    code_roots: tuple[Path, ...] = ()
    """Folders below which the `directory` of a grader may lie; none by default. As JSON: `["/srv/graders"]`.
    `leyden up --graders DIR` adds one, and hides it from agents; name it in RUNNER_HIDDEN_PATHS, too, where you start
    services yourself."""
    max_directory_bytes: int = Field(default=2**26, ge=2**12)
    """The files of a grader's `directory` in sum, copied for each grading; a file or folder counts 4 KiB at least."""
    work_folder: Path = Field(default_factory=open_work_folder)
    """Parent of the fresh folders in which the operator's code runs, as RUNNER_WORK_FOLDER."""
    hidden_paths: tuple[Path, ...] = ()
    """Folders that the operator's code may not open: the platform's own. As JSON: `["/var/lib/leyden"]`."""
    code_path: str = Field(default=os.defpath, validation_alias=AliasChoices("GRADER_CODE_PATH", "PATH"))
    """PATH of the operator's code; the grader's own by default."""
    python: str = sys.executable
    """The interpreter of `python` graders, and for `{python}` as the first word of a command."""
    code_user: Literal["auto", "own", "same"] = "auto"
    """The user of the operator's code, as RUNNER_AGENT_USER."""
    code_uids_from: int | None = Field(default=None, ge=1000, le=2**31 - 2**16)
    """The first of the user ids of its own users, as RUNNER_AGENT_UIDS_FROM."""
    container_jobs: int = Field(default=0, ge=0, le=4096)
    """Graders of type `container` that run at once, each a Job of the Kubernetes cluster; attempts of other runs do not
    wait for them. 0: this service starts none, as on one machine, and such a component fails."""
    namespace: str | None = None
    """Kubernetes: the namespace of graders' Jobs."""
    pod_template_file: Path | None = None
    """Kubernetes: a PodTemplateSpec in YAML, with a container `collect`, and init containers `unpack` and `verifier`.
    The grader adds image, command, labels and files."""
    release: str = Field(default="leyden", pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")
    """Kubernetes: the label `app.kubernetes.io/instance` of graders' Jobs. Two platforms in one namespace need two."""
    owner_role: str | None = None
    """Kubernetes: a Role of the namespace that owns graders' Jobs: `helm uninstall` ends them with it."""
    start_seconds: float = Field(default=300.0, gt=0)
    """Kubernetes: the longest wait of a grader's pod for quota, a node or its image. Then the grading has failed."""
    lease_seconds: float = Field(default=30.0, gt=0)
    """Duration of a lease, which the grader renews three times within it. After that another grader takes the
    attempt."""
    poll_seconds: float = Field(default=2.0, gt=0)
    """Seconds between polls for attempts without a wake-up."""
    database_pool_size: int = Field(default=3, ge=2)
    """Connections to Postgres: for leases, renewals and results."""

    @model_validator(mode="after")
    def _containers_need_their_settings(self) -> Settings:
        needed = {"NAMESPACE": self.namespace, "POD_TEMPLATE_FILE": self.pod_template_file}
        unset = [f"GRADER_{name}" for name, value in needed.items() if value is None]
        if self.container_jobs and unset:
            raise ValueError(f"GRADER_CONTAINER_JOBS needs {', '.join(unset)}")
        return self
