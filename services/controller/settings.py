"""Settings of the controller, read from `CONTROLLER_` variables."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from leyden.libs.contracts.addresses import EngineAddress
from leyden.libs.contracts.config import DEFAULT_POOL, PoolName
from leyden.libs.service import ServiceSettings
from leyden.libs.weights import StoreSettings


class PoolSettings(BaseModel):
    """A pool: its model and its engines, by URL or by a headless Service."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())

    model_path: Path | None = None
    """Hugging Face folder of the model, the same for trainers, gateways and engines. `default` may do without."""
    context_length: int | None = Field(default=None, ge=16)
    """Tokens of prompt and answer together, where the engines allow fewer than the model's config.json."""
    engine_urls: frozenset[EngineAddress] = frozenset()
    engine_service: str | None = None
    adapters: int | None = Field(default=None, ge=1, le=1000)
    """So many runs share the engines, each with a LoRA adapter of its own: SGLang with `--enable-lora` and room for
    three adapters a run (`--max-loaded-loras`), two of them and the base model in a batch (`--max-loras-per-batch`).
    Unset: runs take turns, and the engines load a run's weights."""
    max_adapter_rank: int | None = Field(default=None, ge=1)
    """The engines' `--max-lora-rank`; a run with a larger rank is refused."""
    embeddings: bool = False
    """The engines embed and get no weights: SGLang with `--is-embedding`, for `embeddings: {pool: NAME}` of runs. Needs
    no `model_path`."""

    @model_validator(mode="after")
    def _engines_are_found_in_one_way(self) -> PoolSettings:
        if bool(self.engine_urls) == bool(self.engine_service):
            raise ValueError("a pool needs either engine_urls or engine_service")
        if self.max_adapter_rank is not None and self.adapters is None:
            raise ValueError("max_adapter_rank needs adapters")
        if self.embeddings and (self.adapters is not None or self.context_length is not None):
            raise ValueError("the engines of a pool with embeddings get no weights: leave out adapters, context_length")
        return self


class Settings(ServiceSettings, StoreSettings):
    """Intervals, engines and trainers of the controller."""

    model_config = SettingsConfigDict(env_prefix="CONTROLLER_")

    tick_seconds: float = Field(default=0.3, gt=0)
    """Longest pause between two ticks; a notification shortens it."""
    engine_urls: list[EngineAddress] = Field(default_factory=lambda: ["http://127.0.0.1:30000"])
    """Every engine of the platform, as a JSON list; no trailing slashes."""
    pools: dict[PoolName, PoolSettings] | None = Field(default=None, min_length=1)
    """Pools of engines as a JSON object by name, such as `{"small": {"model_path": "/models/small", "engine_urls":
    ["http://a:30000"]}}`, or with `engine_service` (Kubernetes). Unset: one pool, `default`, with the engines of
    `engine_urls` or `engine_service` and the model that trainers and gateways are set to."""
    engine_api_key: SecretStr | None = None
    """Bearer key of the engines' inference routes, where they ask for one."""
    engine_api_key_file: Path | None = None
    """File that holds the engines' API key, instead of `engine_api_key`."""
    engine_admin_key: SecretStr | None = None
    """Bearer key of the engines' control routes; the API key where they have no other."""
    engine_admin_key_file: Path | None = None
    """File that holds the engines' admin key, instead of `engine_admin_key`."""
    engine_poll_seconds: float = Field(default=1.0, gt=0)
    """Pause between two polls of an engine."""
    engine_answer_seconds: float = Field(default=5.0, gt=0)
    """An engine that does not answer within this time is unreachable."""
    engine_refusal_seconds: float = Field(default=5.0, ge=0)
    """Pause before weights are offered again to an engine that did not load them; doubles with each failure, to five
    minutes."""
    engine_update_seconds: float = Field(default=600.0, gt=0)
    """Bound on loading new weights."""
    weights: Literal["disk", "network"] = "disk"
    """The way of new weights to engines. `network`: the trainer sends them by NCCL, or by gloo where it runs on a CPU;
    engines that cannot receive them, and those where it fails, load them from disk."""
    fetcher_port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the fetcher beside each engine, which reads versions from `LEYDEN_WEIGHT_STORE` into a folder of the
    engine's node. Engines load from the trainer's folder where it is unset or the fetcher fails."""
    retry_seconds: float = Field(default=0.5, ge=0)
    """Wait before the second attempt of a rollout; doubles with every further one, up to a minute."""
    enqueue_again_seconds: float = Field(default=2.0, gt=0)
    """How often all waiting rollouts enter the task queue again, since Redis may be wiped; none enters twice."""
    groups_without_success: int = Field(default=16, ge=1)
    """A run fails with the cause when so many training groups in a row hold no success, since its agent cannot work, or
    when credit excluded so many. Without steps, its evaluations' groups count."""
    retention_days: float | None = Field(default=None, gt=0)
    """Days after its end that a run keeps its calls, spans, credits, samples and outputs; unset: for ever."""
    webhook_url: SecretStr | None = None
    """Address to which the controller posts events of runs as JSON: `completed`, `failed`, `stalled`, `alarm` and
    `alarm_ended`. Each is delivered at least once, with an id, or given up after two hours. Unset: no events."""
    namespace: str | None = None
    """Kubernetes: the namespace of the platform: of trainers' Jobs and of the engines' Service."""
    release: str = Field(default="leyden", pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")
    """Kubernetes: the label `app.kubernetes.io/instance` of trainers' Jobs."""
    owner_role: str | None = None
    """Kubernetes: a Role of the namespace that owns trainers' Jobs: `helm uninstall` ends them with it."""
    engine_service: str | None = None
    """Kubernetes: the headless Service of the engines. Its EndpointSlices list them in place of `engine_urls`."""
    trainer_backend: Literal["process", "kubernetes"] = "process"
    """The place of trainers: processes of this machine, or Jobs of the Kubernetes cluster."""
    trainer_pod_template_file: Path | None = None
    """Kubernetes: a PodTemplateSpec in YAML, with a container `trainer`. The controller adds command, variables and
    labels."""
    trainer_service: str | None = None
    """Kubernetes: the headless Service of trainers, by which the pods of one trainer find each other."""
    trainer_pods: int = Field(default=1, ge=1, le=1024)
    """Kubernetes: pods of one trainer. With more than one, or where the pod template sets PET_NPROC_PER_NODE above 1,
    `torchrun` starts the trainer's processes, so many in each pod."""
    trainer_command: list[str] = Field(
        default_factory=lambda: [sys.executable, "-m", "leyden.services.trainer"], min_length=1
    )
    """Command that starts a trainer, as a JSON list; `--run-id` and the run follow. For several processes it begins
    with `torchrun`, which takes the place of a first `python` in Kubernetes."""
    trainer_folder: Path | None = None
    """The trainers' `TRAINER_FOLDER`, as this process sees it: a deleted run's own folder goes from it with the files
    that no row names. Unset: the folders that the run's rows name go."""
    trainer_restarts: int = Field(default=3, ge=0)
    """Restarts of a trainer that ended by itself, in a row without a step, before the run fails with the reason. One
    cause fails it the second time, unless it may pass, such as a lost connection; so does want of memory."""
    trainer_kills: int = Field(default=30, ge=0)
    """Restarts of a trainer that was killed, as with a lost node, in a row without a step, before the run fails."""
    trainer_stop_seconds: float = Field(default=20.0, ge=0)
    """Time between SIGTERM and SIGKILL of a trainer that no run needs."""
    log_folder: Path = Path("logs")
    """Folder of the trainers' output, one file a run."""

    def engine_pools(self) -> dict[str, PoolSettings]:
        """The pools by name: those of `pools`, or `default`."""
        if self.pools is not None:
            return self.pools
        if self.engine_service is not None:
            return {DEFAULT_POOL: PoolSettings(engine_service=self.engine_service)}
        return {DEFAULT_POOL: PoolSettings.model_construct(engine_urls=frozenset(self.engine_urls))}

    @model_validator(mode="after")
    def _pools_are_apart(self) -> Settings:
        pools = self.engine_pools()
        if DEFAULT_POOL in pools and pools[DEFAULT_POOL].embeddings:
            raise ValueError("CONTROLLER_POOLS: runs that name no pool have `default`: give embeddings another name")
        named = {name: pool for name, pool in pools.items() if name != DEFAULT_POOL and not pool.embeddings}
        nameless = [name for name, pool in named.items() if pool.model_path is None]
        if nameless:
            raise ValueError(f"CONTROLLER_POOLS: pool {nameless[0]} needs model_path")
        unknown = [name for name, pool in pools.items() if pool.model_path is None and pool.context_length is not None]
        if unknown:
            raise ValueError(f"CONTROLLER_POOLS: pool {unknown[0]} has context_length, which needs model_path")
        engines = [url.rstrip("/") for pool in pools.values() for url in pool.engine_urls]
        engines += [pool.engine_service for pool in pools.values() if pool.engine_service is not None]
        if len(engines) > len(set(engines)):
            raise ValueError("CONTROLLER_POOLS: an engine belongs to one pool: write each URL and each Service once")
        return self

    @field_validator("webhook_url")
    @classmethod
    def _webhook_is_an_address(cls, url: SecretStr | None) -> SecretStr | None:
        if url is not None and not url.get_secret_value().startswith(("http://", "https://")):
            raise ValueError("CONTROLLER_WEBHOOK_URL begins with http:// or https://")
        return url

    @model_validator(mode="after")
    def _kubernetes_needs_its_settings(self) -> Settings:
        trainers = {
            "TRAINER_POD_TEMPLATE_FILE": self.trainer_pod_template_file,
            "TRAINER_SERVICE": self.trainer_service,
        }
        on_cluster = self.trainer_backend == "kubernetes"
        needed = {"NAMESPACE": self.namespace, **(trainers if on_cluster else {})}
        unset = [f"CONTROLLER_{name}" for name, value in needed.items() if value is None]
        discovers = any(pool.engine_service for pool in self.engine_pools().values())
        if unset and (on_cluster or discovers):
            cause = "TRAINER_BACKEND=kubernetes" if on_cluster else "ENGINE_SERVICE"
            raise ValueError(f"CONTROLLER_{cause} needs {', '.join(unset)}")
        return self
