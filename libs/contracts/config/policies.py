"""The agents of a run by their calls, and the models that answer them beside the run's own."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from leyden.libs.contracts.config.algorithms import Algorithm
from leyden.libs.contracts.config.document import Document, FolderPath, PoolName, Word
from leyden.libs.contracts.config.training import Lora, Optimizer


class Role(Document):
    """One of the agents of a run, recognised by its calls: a call has the first role whose conditions all hold."""

    name: Word
    agent_name: Word | None = None
    """Pattern (fnmatch) of the agent's name: the header `x-agent-name`, the `name` of its system message or of answers
    that it sends back, or the agent's name in its spans. A name once seen belongs to the agent's fingerprint in the
    run, so that its later calls have it, too."""
    identity: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")] | None = None
    """The fingerprint of its system prompt and tools, as `leyden run agents` shows it."""
    system: Annotated[str, Field(min_length=1, max_length=10_000, pattern=r"^[^\x00]+$")] | None = None
    """A text that its system prompt contains."""
    tools: list[Word] = Field(default_factory=list, max_length=100)
    """Names of tools that its calls offer to the model, among others."""
    model: Word | None = None
    """Pattern (fnmatch) of the model name that its calls ask for."""
    policy: Word | None = None
    """The policy of `policies` that answers its calls; null: the run's own model."""

    @property
    def has_conditions(self) -> bool:
        """False: every call has this role that no earlier role has."""
        return any((self.agent_name, self.identity, self.system, self.tools, self.model))


class EmbeddingModel(Document):
    """The model that answers the agents' `/v1/embeddings`; no call of it trains."""

    provider: Word | None = None
    """A server with OpenAI's `/embeddings` by its name in the gateway's `GATEWAY_PROVIDERS`."""
    provider_model: Word | None = None
    """The name of the provider's model; null for the one that a request asks for."""
    pool: PoolName | None = None
    """In place of `provider`: a pool whose engines embed, which has `embeddings` in `CONTROLLER_POOLS`."""

    @model_validator(mode="after")
    def _one_server_answers(self) -> EmbeddingModel:
        if (self.pool is None) == (self.provider is None):
            raise ValueError("embeddings need either provider or pool")
        if self.provider_model is not None and self.provider is None:
            raise ValueError("provider_model needs provider: the engines of a pool have one model")
        return self


class Policy(Document):
    """A further model of a run, with a trainer, versions and a pool of its own. It trains on the calls that it
    answered. The model of a `provider` is asked and recorded."""

    pool: PoolName | None = None
    """The pool of engines that samples the policy; another one than the run's, except where a pool shares adapters."""
    provider: Word | None = None
    """In place of `pool`: a server of OpenAI's chat completions by its name in the gateway's `GATEWAY_PROVIDERS`; or
    `conversation`, the platform itself, which answers with the next message of the task's own `messages`."""
    provider_model: Word | None = None
    """The name of the provider's model; null for the one that a call asks for."""
    model: FolderPath | None = None
    """Absolute folder of the base model; null for the model of the pool."""
    frozen: bool = False
    """The policy does not train: it answers with its version 0, the base model unless the run continues another."""
    lora: Lora | None = None
    """Train LoRA adapters in place of the policy's weights. With `frozen`: the adapters that a run continues with."""
    algorithm: Algorithm | None = None
    """Null: the run's."""
    optimizer: Optimizer | None = None
    """Null: the run's; where that has the usual rate of what it trains, the policy has that of what it trains."""

    @property
    def trains(self) -> bool:
        """Whether the policy has a trainer."""
        return not self.frozen and self.provider is None

    @model_validator(mode="after")
    def _one_server_answers(self) -> Policy:
        if (self.pool is None) == (self.provider is None):
            raise ValueError("a policy needs either pool or provider")
        if self.provider_model is not None and self.provider is None:
            raise ValueError("provider_model needs provider")
        if self.provider is not None and self.model is not None:
            raise ValueError("a provider's model is no folder: write provider_model")
        return self

    @model_validator(mode="after")
    def _a_frozen_policy_trains_nothing(self) -> Policy:
        # A policy with adapters keeps them when it is frozen in a continued run.
        of_training = ("algorithm", "optimizer") if self.provider is None else ("lora", "algorithm", "optimizer")
        given = [name for name in of_training if getattr(self, name) is not None]
        if not self.trains and given:
            kind = "frozen policy" if self.frozen else "provider's model"
            raise ValueError(f"a {kind} trains nothing: remove {', '.join(given)}")
        return self
