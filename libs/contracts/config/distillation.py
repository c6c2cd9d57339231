"""On-policy distillation: the teacher, and its share in the advantages."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from leyden.libs.contracts.config.document import Document, FolderPath, Word


class Distillation(Document):
    """A teacher judges each token that the policy sampled: its advantage is `coefficient` times log π_teacher - log π,
    both at the sampling temperature and for the policy at the step's start. With `importance_sampling` or `reinforce`
    the mean gradient on the policy's own tokens is that of the reverse KL, token by token."""

    run: Word | None = None
    """Id of the run that made the teacher. With `version`."""
    version: int | None = Field(default=None, ge=0, le=1_000_000)
    """The version of that run. Its files stay, and the run cannot be deleted, until this run has ended."""
    model: FolderPath | None = None
    """Folder of a teacher's weights (Hugging Face format), in place of `run` and `version`. Any size and architecture
    that trainers know, with the tokens of the policy."""
    coefficient: float = Field(default=1.0, gt=0, le=1e6)
    """Weight of the teacher's judgement."""
    rewards: Literal["ignore", "add"] = "ignore"
    """`ignore`: the teacher alone teaches, and a group may have a single rollout. `add`: its judgement is added to the
    advantages of the rewards."""

    @model_validator(mode="after")
    def _one_teacher(self) -> Distillation:
        if (self.run is None) != (self.version is None) or (self.run is None) == (self.model is None):
            raise ValueError("name one teacher: write run and version, or model")
        return self
