"""The content of an agent's key: one attempt of one rollout, scopes, and an expiry."""

from enum import StrEnum

from pydantic import BaseModel, ConfigDict


class Scope(StrEnum):
    """An endpoint that an agent may use."""

    MODEL = "model"
    TELEMETRY = "telemetry"
    REWARD = "reward"
    FEEDBACK = "feedback"
    """Evaluation events in telemetry, as values of components that are `from: otlp`."""


class Capability(BaseModel):
    """The claims of an agent's key, verified by its signature without a database."""

    model_config = ConfigDict(frozen=True)

    run_id: str
    rollout_id: str
    attempt: int
    scopes: frozenset[Scope]
    expires_at: int
    """Seconds since the epoch."""
    greedy: bool = False
    """The gateway decodes greedily, whatever temperature the agent asks for."""
