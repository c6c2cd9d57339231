"""The backends that execute attempts: processes or containers of a machine, Jobs of a cluster, or clients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError, model_validator

from leyden.libs.contracts.config.document import (
    BrokenDocument,
    Document,
    LabelName,
    PinnedImage,
    Resources,
    stored_object,
)

VariableName = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^=\x00]+$")]
SecretName = Annotated[str, Field(max_length=253, pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$")]
LabelValue = Annotated[str, Field(max_length=63, pattern=r"^[A-Za-z0-9._-]*$")]

RESERVED_NAMES = frozenset(
    {
        *("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY", "OPENAI_CUSTOM_HEADERS"),
        *("ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_CUSTOM_HEADERS"),
        *("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_RESOURCE_ATTRIBUTES", "TRACEPARENT"),
    }
)
"""Variables of agents that carry the platform's addresses, keys and ids, beside those in `LEYDEN_`."""


def reserved_names(names: Iterable[str]) -> list[str]:
    """Those that the platform sets in every agent's environment."""
    return sorted(name for name in names if name.startswith("LEYDEN_") or name in RESERVED_NAMES)


class _Runner(Document):
    timeout_seconds: float = Field(default=300.0, gt=0, le=86_400)
    """Maximum wall time of one attempt; then SIGTERM, a grace period, SIGKILL, and the outcome `timeout`."""
    output_bytes: int = Field(default=1_000_000, ge=1_000, le=100_000_000)
    """The bytes of stdout and of stderr that are stored, from the end; the runner drops the rest."""
    grant_reward: bool = False
    """Whether the agent may post its own reward (LEYDEN_REWARD_URL)."""
    stdout_reward: bool = True
    """Whether the last line of the agent's stdout may hold its own reward. False: no line is read, a success
    starts from 0, and rewards come from outside, telemetry with `grant_reward`, or `credit.air`."""


OF_REWARDS = ("grant_reward", "stdout_reward")
"""The fields of a runner that say where rewards come from: all agents of a run have the same."""


class ProcessRunner(_Runner):
    """Each attempt is a process tree on the runner's machine, for agents whose code is trusted."""

    type: Literal["process"] = "process"
    memory_bytes: int | None = Field(default=4 * 2**30, ge=2**24, le=2**60)
    """Resident memory of the agent's processes in sum, read twice a second; null for no limit."""
    cpu_seconds: int | None = Field(default=None, ge=1, le=10**9)
    """CPU time of each process of the agent (RLIMIT_CPU); null for no limit."""


class ContainerRunner(_Runner):
    """Each attempt is a container of podman or docker on the runner's machine, of an image that holds the agent."""

    type: Literal["container"] = "container"
    image: PinnedImage
    """The image that holds the agent, with a tag other than `latest`, or a digest. The runner pulls one that its
    machine lacks."""
    memory_bytes: int | None = Field(default=4 * 2**30, ge=2**24, le=2**60)
    """Memory of the container, its files in tmpfs and page cache included; the kernel ends an agent that needs more: an
    `infra_error`, since it may have been the machine's want of memory. null for no limit."""
    cpu_seconds: int | None = Field(default=None, ge=1, le=10**9)
    """CPU time of each process of the agent (RLIMIT_CPU); null for no limit."""


class Toleration(Document):
    """A taint of nodes on which the agent may run, as Kubernetes defines it."""

    key: LabelName | None = None
    operator: Literal["Equal", "Exists"] = "Equal"
    value: LabelValue | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None


class SecretKey(Document):
    """A key of a Secret in the agents' namespace."""

    name: SecretName
    key: Annotated[str, Field(max_length=253, pattern=r"^[A-Za-z0-9._-]+$")]


class KubernetesRunner(_Runner):
    """Each attempt is a Job of the Kubernetes cluster, in a pod of its own, for agents whose code is not trusted."""

    type: Literal["kubernetes"] = "kubernetes"
    image: PinnedImage
    """The image that holds the agent, with a tag other than `latest`, or a digest: attempts of one run are alike."""
    resources: Resources = Field(default_factory=Resources)
    """Added to those of the platform's pod template. The kernel ends an agent that needs more than `limits.memory`:
    an `infra_error`, since it may have been the node's want of memory."""
    secrets: dict[VariableName, SecretKey] = Field(default_factory=dict, max_length=50)
    """Variables of the agent whose values are in Secrets of its namespace, as
    `{"TOOL_KEY": {"name": "tools", "key": "api-key"}}`. The operator allows Secrets by name (chart:
    `rollouts.allow.secrets`)."""
    node_selector: dict[LabelName, LabelValue] = Field(default_factory=dict, max_length=20)
    """Labels that the agent's node must have."""
    tolerations: list[Toleration] = Field(default_factory=list, max_length=20)
    attempts_per_pod: int = Field(default=1, ge=1, le=1000)
    """1: a pod of its own for each attempt. Above: so many attempts of the run share a pod at once, which serves others
    after them; each is a fresh process with a user and a folder of its own, and may use its share of the pod's memory.
    The operator allows it (chart: `rollouts.attemptsPerPod`), and the image needs Python as `python3`."""

    @model_validator(mode="after")
    def _platform_names_are_reserved(self) -> KubernetesRunner:
        if reserved := reserved_names(self.secrets):
            raise ValueError(f"secrets sets {reserved}, which the platform sets itself: remove them")
        return self


class ExternalRunner(_Runner):
    """Leyden starts no agent: clients lease attempts by `POST /v1/runs/{run}/attempts`, and report their ends."""

    type: Literal["external"] = "external"
    lease_seconds: float = Field(default=60.0, ge=5, le=3600)
    """So long an attempt lives without a heartbeat of its client; then another client may have its task."""


def _process_by_default(document: Any) -> Any:
    return {"type": "process", **document} if isinstance(document, dict) else document


RunnerConfig = Annotated[
    ProcessRunner | ContainerRunner | KubernetesRunner | ExternalRunner,
    Field(discriminator="type"),
    BeforeValidator(_process_by_default),
]
"""The backend that executes a run's attempts, by `type`."""
_RUNNER: TypeAdapter[RunnerConfig] = TypeAdapter(RunnerConfig)


def stored_runner(document: object, *path: str) -> RunnerConfig:
    """Returns the runner of a stored document, without what a newer version has added to it.

    Args:   path: of the document in that of the run, where it is a part of it
    Raises: BrokenDocument
    """
    runner = stored_object(document).get("runner")
    try:
        return _RUNNER.validate_python(runner or {}, extra="ignore")
    except ValidationError as error:
        raise BrokenDocument.of(error, *path, "runner") from error
