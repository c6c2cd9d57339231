"""On-policy distillation: the teacher, and its share in the advantages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from leyden.libs.contracts.config.document import Document, FolderPath, Word
from leyden.libs.contracts.placeholders import task_fields, with_task


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
    hint: str | None = Field(default=None, min_length=1, max_length=20_000)
    """Text that the teacher alone reads, such as `The answer is {task.answer}.`, with the task's fields in place of
    their placeholders. It is a message before the row's tokens. Without `run` and `model` the run's own model teaches
    itself."""
    weights: Literal["start", "newest"] = "start"
    """Weights of the run's own model as the teacher: `start` are those of version 0, which stay the same; `newest`
    those at the step's start, which need no second model."""
    coefficient: float = Field(default=1.0, gt=0, le=1e6)
    """Weight of the teacher's judgement."""
    rewards: Literal["ignore", "add"] = "ignore"
    """`ignore`: the teacher alone teaches, and a group may have a single rollout. `add`: its judgement is added to the
    advantages of the rewards."""

    @model_validator(mode="after")
    def _one_teacher(self) -> Distillation:
        both = self.run is not None and self.model is not None
        if (self.run is None) != (self.version is None) or both or (self.is_own and self.hint is None):
            raise ValueError(
                "name one teacher: write run and version, or model, or hint alone for the run's own model with a hint"
            )
        if self.weights == "newest" and not self.is_own:
            raise ValueError("weights 'newest' are those of the run's own model: remove it, or run, version and model")
        return self

    @property
    def is_own(self) -> bool:
        """Whether the teacher is the run's own model, which a hint makes another one."""
        return self.run is None and self.model is None

    def task_fields(self) -> list[tuple[str, ...]]:
        """The path of each field of the task that the hint names."""
        return task_fields([self.hint or ""])

    def hint_for(self, task: Mapping[str, Any]) -> str | None:
        """The hint of one task; None without a hint. Raises: MissingField: the task has no value for a field"""
        return None if self.hint is None else with_task(self.hint, task, null_is_missing=True)
