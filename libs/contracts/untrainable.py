"""The reasons for which a model call does not train, with remedies. The gateway records them, credit adds some."""

from __future__ import annotations

from collections.abc import Collection, Sequence

GREEDY_ROLLOUT = "greedy rollout: the baseline of its siblings"
REROLL = "re-roll: it measures the value of another rollout's calls"
NO_ROLE = "no role, and the run's train names those that train"
UNFINISHED = "without a complete answer"
OVERFLOW = "beyond the model's context"
NO_TOKENS = "without a sampled token"
FORCED = "forced by a grammar token by token"
NOT_DELIVERED = "nobody received the answer"
REPEATED = "the agent asked again and went on from a later answer"
AUXILIARY = "beside the agent's work"
UNKNOWN = "not trainable"
SAMPLED_WITH = "sampled with "
FROZEN = "the policy of role "
"""The reason of a call that the document gives to a policy without a trainer begins so: no alarm is for it."""

CONTEXT_REMEDY = (
    "let the agent shorten tool results and earlier messages, and its answers by `max_tokens`; or give the engines a"
    " longer context (SGLang's `--context-length`), which GATEWAY_CONTEXT_LENGTH and the pool's must not lower"
)


def of_frozen_policy(role: str) -> str:
    """The reason of a call that a policy without a trainer answers."""
    return f"{FROZEN}{role} does not train"


def of_other_model(policy: str) -> str:
    """The reason of a call that the policy of another pool answered, whose tokens are not those of the run's model."""
    return f"policy {policy} has another model"


def of_role(role: str | None) -> str:
    """The reason of a call whose role is not among those that train."""
    return f"role {role} does not train" if role else NO_ROLE


def of_parameters(names: Sequence[str]) -> str:
    """The reason of a call whose parameters no trainer can reproduce."""
    return f"{SAMPLED_WITH}{', '.join(names)}"


def where_replaced(reason: str, replaced: Collection[str]) -> str | None:
    """The reason that remains where the run replaces these parameters of its calls; None where none does.

    >>> where_replaced("sampled with temperature, json_schema", ["temperature", "top_p"])
    'sampled with json_schema'
    """
    if not reason.startswith(SAMPLED_WITH):
        return reason
    left = [name for name in reason.removeprefix(SAMPLED_WITH).split(", ") if name not in replaced]
    return of_parameters(left) if left else None


def remedy_of(reason: str) -> str:
    """Tells the operator how such calls come to train.

    >>> remedy_of("role checker does not train")
    'name their role in `train`, or mend the conditions of `roles` (`leyden run agents`)'
    """
    if reason == NO_ROLE or (reason.startswith("role ") and reason.endswith(" does not train")):
        return "name their role in `train`, or mend the conditions of `roles` (`leyden run agents`)"
    if reason.startswith(FROZEN):
        return "let a policy that trains answer them (`roles[].policy`, `policies`)"
    if reason in {of_parameters(["json_schema"]), of_parameters(["tool_choice"]), FORCED}:
        return "write training.constrained_calls 'mask' or 'train'"
    if reason.startswith(SAMPLED_WITH):
        return (
            "let the agent leave out these parameters; a temperature must be above 0, best 1"
            " (or write `sampling.override`: training then samples without them)"
        )
    if reason == OVERFLOW:
        return CONTEXT_REMEDY
    if reason in {UNFINISHED, NO_TOKENS, NOT_DELIVERED}:
        return "look at the calls (`leyden rollout show`) and at the agent's time-outs"
    if reason == AUXILIARY:
        return "write credit.auxiliary_calls 'train'"
    return "look at the calls (`leyden rollout show`)"
