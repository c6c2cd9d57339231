"""The trajectory store's tables: one writer each, named in the docstring, with states checked by triggers.

Tokens are little-endian int32 bytes and log-probabilities little-endian float32 bytes (`numpy.ndarray.tobytes`), so
that a row costs four bytes a token and no parsing. `model_calls`, `spans`, `credits` and `samples` are partitioned
by run: `retention.prune_run` drops the partitions of an ended run in one statement.
"""

from __future__ import annotations

from leyden.libs.store.tables.base import Base
from leyden.libs.store.tables.calls import CALLED_TOOLS, SPAN_TOOL, AgentName, AgentObject, Delivery, ModelCall, Span
from leyden.libs.store.tables.engines import (
    CanaryAnswer,
    Engine,
    EngineAdapter,
    Pool,
    VersionCanary,
    WeightSwap,
    WeightTransfer,
)
from leyden.libs.store.tables.platform import (
    ApiToken,
    AuditEntry,
    Gateway,
    IdempotencyKey,
    StateTransition,
    WebhookEvent,
)
from leyden.libs.store.tables.rewards import (
    ExternalReward,
    Feedback,
    Grading,
    GradingTrial,
    JudgeUsage,
    Regrade,
    Reward,
    RolloutReward,
)
from leyden.libs.store.tables.rollouts import Artifact, Attempt, Group, Outcome, Rollout
from leyden.libs.store.tables.runs import Alarm, Dataset, Duel, Evaluation, Run, RunStatus, Task
from leyden.libs.store.tables.training import (
    CallCredit,
    Computation,
    DamagedStep,
    GroupCredit,
    PolicyVersion,
    RunBase,
    Sample,
    Step,
    StepGroup,
    StepReplay,
    StepSample,
    TrainerEnd,
)

for _mapper in Base.registry.mappers:
    # The comments of the tables in SQL are the docstrings of their classes.
    _mapper.local_table.comment = " ".join((_mapper.class_.__doc__ or "").split())  # type: ignore[attr-defined]

PARTITIONED: tuple[type[Base], ...] = (ModelCall, Span, CallCredit, Sample)
"""Tables with one partition per run."""


__all__ = [
    "CALLED_TOOLS",
    "PARTITIONED",
    "SPAN_TOOL",
    "AgentName",
    "AgentObject",
    "Alarm",
    "ApiToken",
    "Artifact",
    "Attempt",
    "AuditEntry",
    "Base",
    "CallCredit",
    "CanaryAnswer",
    "Computation",
    "DamagedStep",
    "Dataset",
    "Delivery",
    "Duel",
    "Engine",
    "EngineAdapter",
    "Evaluation",
    "ExternalReward",
    "Feedback",
    "Gateway",
    "Grading",
    "GradingTrial",
    "Group",
    "GroupCredit",
    "IdempotencyKey",
    "JudgeUsage",
    "ModelCall",
    "Outcome",
    "PolicyVersion",
    "Pool",
    "Regrade",
    "Reward",
    "Rollout",
    "RolloutReward",
    "Run",
    "RunBase",
    "RunStatus",
    "Sample",
    "Span",
    "StateTransition",
    "Step",
    "StepGroup",
    "StepReplay",
    "StepSample",
    "Task",
    "TrainerEnd",
    "VersionCanary",
    "WebhookEvent",
    "WeightSwap",
    "WeightTransfer",
]
