"""The content of an agent's key: one attempt of one rollout, scopes, and an expiry."""

from enum import StrEnum

from pydantic import BaseModel, ConfigDict

PLAYGROUND = "playground"
"""Stands for the rollout in a key that belongs to no attempt; its attempt is 0."""


class Scope(StrEnum):
    """An endpoint that an agent may use."""

    MODEL = "model"
    TELEMETRY = "telemetry"
    REWARD = "reward"
    FEEDBACK = "feedback"
    """Evaluation events in telemetry, as values of components that are `from: otlp`."""
    PLAYGROUND = "playground"
    """A person's call of a policy, for the API alone: the key belongs to no attempt, and opens nothing else."""


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
