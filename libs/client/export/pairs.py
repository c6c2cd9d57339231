"""Preference pairs in TRL's conversational format, as its DPOTrainer reads them: the best and the worst of each group.

Siblings did the same task, so that their conversations begin alike. A pair's prompt is what both share; `chosen` and
`rejected` begin with the model's answers that differ, or with the answer before the messages that do.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from leyden.libs.client.export.base import Inexpressible, LeftOut, Reader
from leyden.libs.client.export.conversations import Conversation
from leyden.libs.client.export.trl import trl_messages, trl_tools
from leyden.libs.contracts.api.rollouts import Rollout
from leyden.libs.contracts.conversation import Json, Turn
from leyden.libs.contracts.rewards import gain

NO_REWARD = "rollouts without a reward, which rank nowhere"
NO_DIFFERENCE = "groups without two rollouts whose rewards differ"
REPEATED = "pairs of conversations with an answer that an earlier pair of their group has"
NO_PROMPT = "groups whose best and worst rollout share no prompt before answers that differ"

Pair = tuple[Conversation, Conversation, int]
"""Conversations of the best and the worst rollout, and the position at which their answers begin."""


class Pairs:
    """At most one row a role's or agent's conversation of a group; memory: two rollouts a group without their calls."""

    def rows(
        self, rollouts: Iterable[Rollout], read: Reader, left_out: LeftOut, *, per_task: int | None
    ) -> Iterator[Json]:
        """Converts the best and the worst rollout of each group, groups in the order of their first rollout.

        Args: per_task: at most so many groups of a task
        """
        written: Counter[tuple[str, int]] = Counter()
        for best, worst in _ends(rollouts, left_out):
            task = best.dataset_id, best.task_number
            if per_task is not None and written[task] >= per_task:
                continue
            try:
                rows = [_row(*pair) for pair in _once(_matched(read(best), read(worst)), left_out)]
            except Inexpressible as reason:
                left_out[f"groups by {reason}"] += 1
                continue
            left_out[NO_PROMPT] += not rows
            written[task] += bool(rows)
            yield from rows


def _ends(rollouts: Iterable[Rollout], left_out: LeftOut) -> Iterator[tuple[Rollout, Rollout]]:
    """The best and the worst of each group; of equal ones the first."""
    ends: dict[str, tuple[Rollout, Rollout]] = {}
    for rollout in rollouts:
        if rollout.reward is None:
            left_out[NO_REWARD] += 1
            continue
        best, worst = ends.setdefault(rollout.group_id, (rollout, rollout))
        best = rollout if rollout.reward > _reward(best) else best
        worst = rollout if rollout.reward < _reward(worst) else worst
        ends[rollout.group_id] = best, worst
    for best, worst in ends.values():
        if gain(_reward(worst), _reward(best)) > 0:
            yield best, worst
        else:
            left_out[NO_DIFFERENCE] += 1


def _reward(rollout: Rollout) -> float:
    assert rollout.reward is not None
    return rollout.reward


def _once(pairs: Iterable[Pair], left_out: LeftOut) -> Iterator[Pair]:
    """The pairs without those that would train an answer again, which branches of a conversation share."""
    trained = set[str]()
    for one, other, at in pairs:
        answers = {call.id for side in (one, other) for place, call in side.answers.items() if place >= at}
        if answers & trained:
            left_out[REPEATED] += 1
            continue
        trained |= answers
        yield one, other, at


def _matched(best: Sequence[Conversation], worst: Sequence[Conversation]) -> Iterator[Pair]:
    """Conversations of the same role and agent by their order, each with the position at which the answers begin."""
    others: dict[tuple[str | None, str | None], list[Conversation]] = defaultdict(list)
    for one in worst:
        others[one.role, one.agent].append(one)
    for one in best:
        rest = others[one.role, one.agent]
        if rest and (at := _parting(one, other := rest.pop(0))) is not None:
            yield one, other, at


def _parting(one: Conversation, other: Conversation) -> int | None:
    """The last position up to which both are equal and at which both have an answer of the model; None without any,
    and where nothing differs."""
    found = None
    for at, (left, right) in enumerate(zip(one.turns, other.turns, strict=False)):
        if at in one.answers and at in other.answers:
            found = at
        if _words(left) != _words(right):
            return found
    return None if len(one.turns) == len(other.turns) else found


def _words(turn: Turn) -> tuple[object, ...]:
    """A message without the ids of tool calls, which are new in each rollout."""
    calls = tuple((call.name, call.arguments) for call in turn.tool_calls)
    return turn.role, turn.content, turn.name, calls, turn.is_error, turn.reasoning


def _row(chosen: Conversation, rejected: Conversation, at: int) -> Json:
    good, bad = trl_messages(chosen.turns), trl_messages(rejected.turns)
    return {
        "prompt": good[:at],
        "chosen": good[at:],
        "rejected": bad[at:],
        **trl_tools(chosen),
        "chosen_reward": chosen.rollout.reward,
        "rejected_reward": rejected.rollout.reward,
        "chosen_rollout": chosen.rollout.id,
        "rejected_rollout": rejected.rollout.id,
        "task": chosen.rollout.task_number,
        "role": chosen.role,
    }
