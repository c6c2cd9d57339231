"""Credits a group: the records of its siblings become one advantage per call, and samples with it.

Rewards add up. The outcome of a rollout is the reward that the controller settled plus every reward given to the
rollout; a call earns the reward of its tools (AIR) plus every reward given to it. A reward for an unknown answer or
call counts for the rollout. With AIR's α, calls earn α · status and outcomes count (1 - α); without, both count fully.
Under rule `own` with an α, a call none of whose tools has a status gets the whole outcome and no average or middle.
An agent's own failure earns no more in all, and none of its calls earns more, than the worst sibling that did not fail:
otherwise a crash before a tool is better than an honest call that the tool refuses. Calls are bounded by those with
which the baseline compares them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from leyden.libs.contracts.call_counts import CallCounts
from leyden.libs.contracts.config import Air, Baseline, Credit, OwnCredit, TokenDiscountedCredit
from leyden.libs.contracts.samples import RowCall
from leyden.libs.contracts.states import OutcomeKind, SpanStatus
from leyden.services.credit.air import DEFAULTS, ToolUse, air_reward, average_factors, tool_uses
from leyden.services.credit.baselines import (
    NO_VARIANCE,
    Advantages,
    Siblings,
    advantages,
    against,
    gigpo,
    moved,
    values,
)
from leyden.services.credit.counts import counts_by_policy
from leyden.services.credit.forest import Forest, Node, call_forest, without_auxiliary_calls
from leyden.services.credit.joins import CallIndex
from leyden.services.credit.paths import Path, paths, row_calls
from leyden.services.credit.records import TOKEN, Reward, Rollout
from leyden.services.credit.rerolls import Samples, Values, places_of, values_of, with_states
from leyden.services.credit.rules import call_returns, token_shares, trained_tokens
from leyden.services.credit.shaping import overlong_reward, shaped_outcome
from leyden.services.credit.states import START, state_keys

CREDIT_VERSION = 13
"""Grows with every change of the computation."""


@dataclass(frozen=True, slots=True)
class CallCredit:
    """The credit of one call, part by part."""

    call_id: str
    rollout_id: str
    parent_call_id: str | None
    depth: int
    role: str
    state_key: str
    uses: list[ToolUse]
    intermediate_reward: float
    return_: float
    baseline: float
    advantage: float


@dataclass(frozen=True, slots=True)
class Credited:
    """A group with credit.

    `rewards` holds one number per counted sibling, and `averages` the moving averages after the group with baseline
    `ema`: by role, or one under the empty name. `counts` are those of the calls of each policy. `left_out` are the
    policies that have no rows whatever their calls, with the reason.
    """

    credits: list[CallCredit]
    samples: dict[str, list[Path]]
    rewards: list[float]
    averages: dict[str, float] | None = None
    counts: Mapping[str | None, CallCounts] = field(default_factory=dict)
    left_out: Mapping[str | None, str] = field(default_factory=dict)

    def has_variance(self, policy: str | None = None) -> bool:
        """Whether any token that the policy may train has an advantage."""
        return any(path.advantages.any() for path in self.paths(policy))

    def min_policy_version(self, policy: str | None = None) -> int | None:
        """The oldest version that sampled a token that the policy trains; None without such tokens."""
        return min((path.min_policy_version for path in self.paths(policy)), default=None)

    def paths(self, policy: str | None) -> list[Path]:
        """The rows that a policy trains; None for the run's own model."""
        return [path for rows in self.samples.values() for path in rows if path.policy == policy]


@dataclass(frozen=True, slots=True)
class Excluded:
    """A group without credit, with the reason for people."""

    reason: str
    rewards: list[float]


@dataclass(frozen=True, slots=True)
class _Played:
    """One rollout with its forest and the tools that its calls asked for."""

    rollout: Rollout
    forest: Forest
    uses: dict[str, list[ToolUse]]


@dataclass(frozen=True, slots=True)
class _Earned:
    """One rollout with its forest, states and returns; arrays [C] in the forest's order.

    `outcome` is what counts: shaped, and its share where AIR has an α.
    """

    rollout: Rollout
    forest: Forest
    uses: dict[str, list[ToolUse]]
    states: dict[str, str]
    outcome: float
    intermediate_C: NDArray[np.float64]
    returns_C: NDArray[np.float64]

    @property
    def total(self) -> float:
        """The whole return."""
        return self.outcome + float(self.intermediate_C.sum())


def credit_group(
    rollouts: Sequence[Rollout],
    credit: Credit,
    *,
    min_siblings: int,
    averages: Mapping[str, float] | None = None,
    bounds_failures: bool = True,
) -> Credited | Excluded:
    """Credit for the finished siblings of a group.

    A rollout without model calls counts in baselines with its outcome and makes no sample. A greedy one is no sibling:
    with baseline `remax` its values are the baselines, as a moving average is with `ema`. Nor is a re-roll, whose total
    return is a sample of a state's value with `monte_carlo`.

    Args:
        averages: the moving averages before this group, for baseline `ema`: by role, or one under the empty name
        bounds_failures: whether a failure earns at most what the worst other sibling does; False where the run's
            document has a number for failures
    """
    rerolls = [_played(rollout, credit) for rollout in rollouts if rollout.rerolls_of is not None]
    played = [_played(rollout, credit) for rollout in rollouts if rollout.rerolls_of is None]
    factors = average_factors((use for one in played for uses in one.uses.values() for use in uses), _air(credit))
    siblings = [one for one in played if not one.rollout.greedy]
    earned = [_earned(one, credit, factors) for one in siblings]
    if bounds_failures:
        earned = _bounded(siblings, earned, credit, factors)
    greedy = [_earned(one, credit, factors) for one in played if one.rollout.greedy]
    rewards = [one.rollout.reward for one in earned]
    if len(earned) < min_siblings:
        reason = f"{len(earned)} of its rollouts count and sampling.min_siblings asks for {min_siblings}"
        return Excluded(reason, rewards)
    if credit.baseline.type == "remax":
        if not greedy:
            return Excluded("its greedy rollout, the baseline of the others, does not count", rewards)
        averages = values(_siblings(greedy, credit.baseline))
    along, befores = list[Values](), list[NDArray[np.float64]]()
    if credit.baseline.type == "monte_carlo":
        sampled = _samples([_earned(one, credit, factors) for one in rerolls], earned if bounds_failures else ())
        along = _values_along(earned, sampled, credit.baseline)
        earned, befores = _between_states(earned, along)
    found = _advantages(earned, credit, averages or {}, befores)
    call_credits = _call_credits(earned, found)
    of_calls = {one.call_id: one.advantage for one in call_credits}
    samples = {
        one.rollout.id: paths(one.forest, _token_advantages(one, of_calls, credit), _row_calls(one, credit))
        for one in earned
    }
    after = _averages_after(call_credits, credit.baseline, averages or {}) if credit.baseline.type == "ema" else None
    counts = counts_by_policy(rollouts, {one.call_id: one.uses for one in call_credits})
    if along:
        counts[None] = with_states(counts.get(None), along)
    return Credited(call_credits, samples, rewards, after, counts)


def _samples(rerolls: Sequence[_Earned], siblings: Sequence[_Earned]) -> Samples:
    """The total returns of re-rolls by sibling and call. Args: siblings: those whose worst success bounds a failure"""
    worst = min((one.total for one in siblings if not one.rollout.failed), default=np.inf)
    found: dict[tuple[str | None, int | None], list[float]] = {}
    for one in rerolls:
        total = min(one.total, worst) if one.rollout.failed else one.total
        found.setdefault((one.rollout.rerolls_of, one.rollout.from_call), []).append(total)
    return found


def _values_along(earned: Sequence[_Earned], samples: Samples, baseline: Baseline) -> list[Values]:
    totals = {one.rollout.id: one.total for one in earned}
    return [values_of(one.rollout.id, places_of(one.rollout.calls)[1], totals, samples, baseline) for one in earned]


def _between_states(
    earned: Sequence[_Earned], along: Sequence[Values]
) -> tuple[list[_Earned], list[NDArray[np.float64]]]:
    """The siblings with the value of the state after a call's action as its return, and those of the states before."""
    moved_on, befores = [], []
    for one, values_ in zip(earned, along, strict=True):
        places, _ = places_of(one.rollout.calls)
        before_C, after_C = values_.around([places[node.call.id] for node in one.forest.nodes], NO_VARIANCE)
        moved_on.append(replace(one, returns_C=after_C))
        befores.append(before_C)
    return moved_on, befores


def _averages_after(
    call_credits: Sequence[CallCredit], baseline: Baseline, averages: Mapping[str, float]
) -> dict[str, float]:
    """Moves the averages of the roles that made calls, by the mean over rollouts of the mean return of their calls."""
    returns: dict[str, dict[str, list[float]]] = {}
    after = dict(averages)
    for one in call_credits:
        role = one.role if baseline.per == "role" else START
        returns.setdefault(role, {}).setdefault(one.rollout_id, []).append(one.return_)
        after[role] = one.baseline
    for role, of_rollouts in returns.items():
        value = float(np.mean([np.mean(of_rollout) for of_rollout in of_rollouts.values()]))
        after[role] = moved(baseline.ema_decay, value, after[role])
    return after


def _row_calls(one: _Earned, credit: Credit) -> dict[str, RowCall] | None:
    """The calls that the trainer's critic values; None without one."""
    if credit.baseline.type != "value":
        return None
    rewards = zip(one.forest.nodes, one.intermediate_C.tolist(), strict=True)
    return row_calls(
        one.forest, {node.call.id: reward + (0 if node.children else one.outcome) for node, reward in rewards}
    )


def _played(rollout: Rollout, credit: Credit) -> _Played:
    forest = call_forest(rollout.calls)
    if credit.auxiliary_calls == "leave_out":
        forest = without_auxiliary_calls(forest)
    calls = [node.call for node in forest.nodes]
    seen = sorted(rollout.calls, key=lambda call: call.order)
    return _Played(rollout, forest, tool_uses(calls, rollout.spans, seen, _ending(rollout, credit.air), _air(credit)))


def _air(credit: Credit) -> Air:
    return credit.air or DEFAULTS


def _bounded(
    played: Sequence[_Played], earned: Sequence[_Earned], credit: Credit, factors: Mapping[str, float]
) -> list[_Earned]:
    """Lowers failures to the worst sibling that did not fail: their whole return by their outcome, and then each call's
    return. Worked: outcomes 0, AIR -0.3 for a sibling whose tool failed; a crash before any tool has -0.3, too.

    A call's bound is the worst return of its anchor, with which the baseline compares it; that of all calls where no
    such sibling has one there.
    """
    worked = [one for one in earned if not one.rollout.failed]
    if not worked:
        return list(earned)
    worst = min(one.total for one in worked)
    worst_call = min(min(one.returns_C, default=one.outcome) for one in worked)
    of_anchors: dict[str, float] = {}
    for one in worked:
        for anchor, value in zip(_anchors(one, credit.baseline), one.returns_C.tolist(), strict=True):
            of_anchors[anchor] = min(value, of_anchors.get(anchor, value))
    found = list(earned)
    for place, one in enumerate(earned):
        if one.rollout.failed:
            lowered = _earned(played[place], credit, factors, less=max(0.0, one.total - worst))
            bounds_C = np.array([of_anchors.get(anchor, worst_call) for anchor in _anchors(lowered, credit.baseline)])
            found[place] = replace(lowered, returns_C=np.minimum(lowered.returns_C, bounds_C))
    return found


def _earned(played: _Played, credit: Credit, factors: Mapping[str, float], less: float = 0.0) -> _Earned:
    """Args: less: what the outcome loses"""
    rollout, forest, uses = played.rollout, played.forest, played.uses
    calls = [node.call for node in forest.nodes]
    given, of_rollout = _given(rollout, forest)
    is_mixed_C = np.array([_is_mixed(uses.get(call.id, []), credit) for call in calls], np.bool_)
    status_C = np.array([_status_reward(uses.get(call.id, []), credit.air, factors) for call in calls], np.float64)
    status_C = np.where(is_mixed_C, status_C, 0.0)
    lengths_C = [len(call.sampled) // TOKEN.itemsize for call in calls]
    intermediate_C = status_C + given + _length_rewards(lengths_C, credit)
    shaped = shaped_outcome(rollout.outcome + of_rollout, sum(lengths_C), credit.shaping)
    outcome = shaped * _outcome_share(credit.air) - less
    own_C = np.where(is_mixed_C, outcome, shaped - less)
    return _Earned(
        rollout=rollout,
        forest=forest,
        uses=uses,
        states=state_keys(forest, uses),
        outcome=outcome,
        intermediate_C=intermediate_C,
        returns_C=call_returns(credit.rule, forest, intermediate_C, outcome, own_C),
    )


def _length_rewards(lengths_C: Sequence[int], credit: Credit) -> NDArray[np.float64]:
    overlong = credit.shaping.overlong if credit.shaping is not None else None
    per_call = overlong if overlong is not None and overlong.per == "call" else None
    return np.array([overlong_reward(length, per_call) for length in lengths_C], np.float64)


def _ending(rollout: Rollout, air: Air | None) -> OutcomeKind | None:
    return rollout.ended if air is None or air.from_results else None


def _status_reward(uses: Sequence[ToolUse], air: Air | None, factors: Mapping[str, float]) -> float:
    if air is None:
        return 0.0
    return air_reward(uses, air, factors) * (1.0 if air.alpha is None else air.alpha)


def _is_mixed(uses: Sequence[ToolUse], credit: Credit) -> bool:
    """Whether status and outcome mix for the call. Rule `own` with an α mixes nothing without a status."""
    if not isinstance(credit.rule, OwnCredit) or credit.air is None or credit.air.alpha is None:
        return True
    return any(use.status is not SpanStatus.UNSET for use in uses)


def _outcome_share(air: Air | None) -> float:
    return 1.0 if air is None or air.alpha is None else 1.0 - air.alpha


def _given(rollout: Rollout, forest: Forest) -> tuple[NDArray[np.float64], float]:
    """Rewards given to calls, [C], and the sum of those given to the rollout."""
    given_C = np.zeros(len(forest.nodes))
    of_rollout = 0.0
    calls = CallIndex([node.call for node in forest.nodes])
    for reward in rollout.rewards:
        place = _place(reward, calls)
        if place is None:
            of_rollout += reward.value
        else:
            given_C[place] += reward.value
    return given_C, of_rollout


def _place(reward: Reward, calls: CallIndex) -> int | None:
    named = [calls.of_tool(reward.tool_call_id), calls.of_call(reward.call_id)]
    first = min((number for number in named if number is not None), default=None)
    return next(iter(calls.of_response(reward.response_id)), None) if first is None else first


def _anchors(one: _Earned, baseline: Baseline) -> list[str]:
    """For each call, [C], the name that it shares with the calls with which the baseline compares it."""
    match baseline.per:
        case "rollout":
            return [START for _ in one.forest.nodes]
        case "depth":
            return [str(node.depth or START) for node in one.forest.nodes]
        case "role":
            return [node.call.role or START for node in one.forest.nodes]
        case "state" | "gigpo":
            return [one.states[node.call.id] for node in one.forest.nodes]


def _siblings(earned: Sequence[_Earned], baseline: Baseline) -> Siblings:
    nodes = [(one, node) for one in earned for node in one.forest.nodes]
    return Siblings.of(
        np.concatenate([one.returns_C for one in earned]) if earned else np.zeros(0),
        [one.rollout.id for one, _ in nodes],
        # A sibling without calls played no role.
        {one.rollout.id: one.outcome for one in earned if not one.forest.nodes and baseline.per != "role"},
        anchors_C=[anchor for one in earned for anchor in _anchors(one, baseline)],
        lengths_C=[trained_tokens(node) for _, node in nodes],
    )


def _advantages(
    earned: Sequence[_Earned],
    credit: Credit,
    averages: Mapping[str, float],
    befores: Sequence[NDArray[np.float64]],
) -> Advantages:
    """Args: befores: for each sibling the values of the states before its calls, for baseline `monte_carlo`"""
    baseline, siblings = credit.baseline, _siblings(earned, credit.baseline)
    calls = sum(len(one.forest.nodes) for one in earned)
    if baseline.type == "monte_carlo":
        before_C = np.concatenate(befores)
        return Advantages(before_C, siblings.returns_C[:calls] - before_C)
    if baseline.type == "ema" or baseline.type == "remax":
        found = against(averages, siblings)
    elif baseline.per == "gigpo":
        totals = {one.rollout.id: one.total for one in earned}
        found = gigpo(baseline.type, siblings, totals, baseline.state_weight, baseline.min_spread)
    else:
        found = advantages(baseline.type, siblings, baseline.min_spread)
    return Advantages(found.baselines_C[:calls], found.advantages_C[:calls])


def _token_advantages(
    one: _Earned, of_calls: Mapping[str, float], credit: Credit
) -> dict[str, float | NDArray[np.float64]]:
    """The advantage of each call's trained tokens, by call id: one number, or [S] where the rule differs by token."""
    if isinstance(credit.rule, TokenDiscountedCredit):
        gamma = credit.rule.gamma
        return {node.call.id: of_calls[node.call.id] * token_shares(node, gamma) for node in one.forest.nodes}
    return {node.call.id: of_calls[node.call.id] for node in one.forest.nodes}


def _call_credits(earned: Sequence[_Earned], found: Advantages) -> list[CallCredit]:
    nodes = [(one, number, node) for one in earned for number, node in enumerate(one.forest.nodes)]
    return [
        _call_credit(one, number, node, float(baseline), float(advantage))
        for (one, number, node), baseline, advantage in zip(nodes, found.baselines_C, found.advantages_C, strict=True)
    ]


def _call_credit(one: _Earned, number: int, node: Node, baseline: float, advantage: float) -> CallCredit:
    return CallCredit(
        call_id=node.call.id,
        rollout_id=one.rollout.id,
        parent_call_id=node.parent.call.id if node.parent is not None else None,
        depth=node.depth,
        role=node.call.role or START,
        state_key=one.states[node.call.id],
        uses=one.uses.get(node.call.id, []),
        intermediate_reward=float(one.intermediate_C[number]),
        return_=float(one.returns_C[number]),
        baseline=baseline,
        advantage=advantage,
    )
