"""State machines as data: the allowed transitions of each kind of row. The store's triggers are generated from them."""

from enum import StrEnum


class RunIntent(StrEnum):
    """The requested state of a run (written by api)."""

    RUNNING = "running"
    PAUSED = "paused"
    CANCELLED = "cancelled"
    DELETED = "deleted"


class RunPhase(StrEnum):
    """The phase of a run (written by controller)."""

    PENDING = "pending"
    RUNNING = "running"
    PAUSED = "paused"
    EVALUATING = "evaluating"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED = frozenset({RunPhase.COMPLETED, RunPhase.FAILED, RunPhase.CANCELLED})
"""Phases of runs that are over."""
UNGRADED = "ungraded"
"""The reason of rollouts that are excluded because their grades failed or never came."""


class GroupState(StrEnum):
    """A group is open until every sibling is terminal (written by controller)."""

    OPEN = "open"
    COMPLETE = "complete"
    CANCELLED = "cancelled"


class RolloutState(StrEnum):
    """`queued` covers waiting, running and retrying, which the attempts distinguish (written by controller)."""

    QUEUED = "queued"
    FINISHED = "finished"
    EXCLUDED = "excluded"
    CANCELLED = "cancelled"


class ShownRolloutState(StrEnum):
    """A rollout's state for readers, computed at each request: a `queued` one with a live attempt is `running`, and one
    whose counted attempt waits for its grades is `grading`."""

    QUEUED = "queued"
    RUNNING = "running"
    GRADING = "grading"
    FINISHED = "finished"
    EXCLUDED = "excluded"
    CANCELLED = "cancelled"


class AttemptState(StrEnum):
    """The lease of one execution (written through libs/queue)."""

    LEASED = "leased"
    RUNNING = "running"
    SETTLED = "settled"
    EXPIRED = "expired"


class OutcomeKind(StrEnum):
    """The result of an attempt. Only `succeeded`, and by policy `agent_error` and `timeout`, have a reward."""

    SUCCEEDED = "succeeded"
    AGENT_ERROR = "agent_error"
    TIMEOUT = "timeout"
    INFRA_ERROR = "infra_error"
    CANCELLED = "cancelled"


class ComponentState(StrEnum):
    """The state of one component of a rollout's reward (written by grader).

    `not_applicable`: its task has no reference; `failed`: no try gave a number, and that is never a 0.
    """

    SCORED = "scored"
    NOT_APPLICABLE = "not_applicable"
    FAILED = "failed"


class Continuation(StrEnum):
    """How a call's prompt relates to earlier calls of its attempt; the column `model_calls.continuation`."""

    EXTEND = "extend"
    FORK = "fork"
    FRESH = "fresh"


class CallStatus(StrEnum):
    """The result of a model call; only `completed` calls are trained.

    The platform answers for a `failed` call, the agent for a `refused` one.
    """

    COMPLETED = "completed"
    ABORTED = "aborted"
    FAILED = "failed"
    REFUSED = "refused"


CONTEXT_EXCEEDED = "context_length_exceeded"
"""The code of the error, and the finish reason of the refused call, where messages exceed the model's context."""
DIVERGED = "diverged"
"""The code of the error that ends a re-roll whose request differs from the recorded one, and why its rollout is left
out."""


GATEWAY_SCOPE = "leyden.gateway"
"""Instrumentation scope of the gateway's own spans. Credit reads none of them, since no model call asked for one."""


class SpanStatus(StrEnum):
    """The status of a tool span."""

    OK = "ok"
    ERROR = "error"
    UNSET = "unset"


class GroupVerdict(StrEnum):
    """The result of credit for a complete group."""

    CREDITED = "credited"
    EXCLUDED = "excluded"


class ConsumptionVerdict(StrEnum):
    """The trainer's use of a credited group.

    `no_variance`: its rewards teach nothing, so it counts without training; `untrainable`: none of its tokens can be
    trained, whatever its rewards.
    """

    TRAINED = "trained"
    NO_VARIANCE = "no_variance"
    UNTRAINABLE = "untrainable"
    STALE = "stale"


class EngineState(StrEnum):
    """The state of an engine at the controller's last poll."""

    SERVING = "serving"
    UPDATING = "updating"
    DRAINING = "draining"
    UNREACHABLE = "unreachable"


class CanaryVerdict(StrEnum):
    """The judgement on an engine's answer to a version's canary (written by controller)."""

    EQUAL = "equal"
    OTHER = "other"
    UNANSWERED = "unanswered"


RUN_TRANSITIONS: dict[RunPhase, frozenset[RunPhase]] = {
    RunPhase.PENDING: frozenset(
        {RunPhase.RUNNING, RunPhase.EVALUATING, RunPhase.PAUSED, RunPhase.FAILED, RunPhase.CANCELLED}
    ),
    RunPhase.RUNNING: frozenset(
        {RunPhase.PAUSED, RunPhase.EVALUATING, RunPhase.COMPLETED, RunPhase.FAILED, RunPhase.CANCELLED}
    ),
    RunPhase.PAUSED: frozenset({RunPhase.RUNNING, RunPhase.EVALUATING, RunPhase.FAILED, RunPhase.CANCELLED}),
    RunPhase.EVALUATING: frozenset(
        {RunPhase.RUNNING, RunPhase.PAUSED, RunPhase.COMPLETED, RunPhase.FAILED, RunPhase.CANCELLED}
    ),
    # A finished run may be evaluated again.
    RunPhase.COMPLETED: frozenset({RunPhase.EVALUATING}),
    RunPhase.FAILED: frozenset({RunPhase.RUNNING, RunPhase.CANCELLED}),
    RunPhase.CANCELLED: frozenset(),
}

GROUP_TRANSITIONS: dict[GroupState, frozenset[GroupState]] = {
    GroupState.OPEN: frozenset({GroupState.COMPLETE, GroupState.CANCELLED}),
    GroupState.COMPLETE: frozenset(),
    GroupState.CANCELLED: frozenset(),
}

ROLLOUT_TRANSITIONS: dict[RolloutState, frozenset[RolloutState]] = {
    RolloutState.QUEUED: frozenset({RolloutState.FINISHED, RolloutState.EXCLUDED, RolloutState.CANCELLED}),
    RolloutState.FINISHED: frozenset(),
    RolloutState.EXCLUDED: frozenset(),
    RolloutState.CANCELLED: frozenset(),
}

ATTEMPT_TRANSITIONS: dict[AttemptState, frozenset[AttemptState]] = {
    AttemptState.LEASED: frozenset({AttemptState.RUNNING, AttemptState.SETTLED, AttemptState.EXPIRED}),
    AttemptState.RUNNING: frozenset({AttemptState.SETTLED, AttemptState.EXPIRED}),
    AttemptState.SETTLED: frozenset(),
    AttemptState.EXPIRED: frozenset(),
}
