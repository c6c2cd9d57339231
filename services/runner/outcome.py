"""From the exit of an agent to the outcome of its attempt: exit code, and the last line of stdout with a reward."""

from __future__ import annotations

import json
import math
from typing import Any

from leyden.libs.contracts.rewards import MAX_REWARD, is_reward
from leyden.libs.contracts.states import OutcomeKind
from leyden.libs.queue.leases import Outcome
from leyden.libs.sandbox.ended import Ended
from leyden.libs.sandbox.output import MAX_LINE_BYTES
from leyden.libs.store.records.artifacts import Artifact

FACTS_BYTES = 64 * 1024
MAX_DEPTH = 64


class BrokenReward(Exception):
    """The agent printed a reward that is no number of a usable size."""


def outcome_of(ended: Ended, *, stdout_reward: bool = True) -> Outcome:
    """The outcome of an attempt whose agent ran.

    A failure of the platform is `infra_error`: it is retried and never trained. A timeout is `timeout`, whatever the
    agent printed. Any other exit code than 0, and a reward that is no finite number, are `agent_error`. An exit with 0
    and no reward line is `succeeded` with no reward: the controller looks for one posted to the collector or the API.

    Args: stdout_reward: False: no line of stdout is a reward, whatever it looks like
    """
    kind, detail = _kind_of(ended)
    reward: float | None = None
    facts: dict[str, Any] = {}
    stdout, stderr = (raw.decode(errors="replace") for raw in (ended.stdout, ended.stderr))
    if kind is OutcomeKind.SUCCEEDED and stdout_reward:
        try:
            reward, facts = read_reward(ended.reward_line.decode(errors="replace"))
        except BrokenReward as error:
            kind, detail = OutcomeKind.AGENT_ERROR, str(error)
    kept = [Artifact(*one) for one in ended.kept.files]
    return Outcome(
        kind,
        reward,
        facts,
        ended.exit_code,
        detail,
        stdout,
        stderr,
        artifacts=kept,
        artifacts_left_out=ended.kept.left_out,
    )


def _kind_of(ended: Ended) -> tuple[OutcomeKind, str | None]:
    """The kind that the exit alone gives, with its cause; `succeeded` when nothing failed."""
    if ended.platform_failure is not None:
        return OutcomeKind.INFRA_ERROR, ended.platform_failure
    if ended.timed_out:
        return OutcomeKind.TIMEOUT, f"stopped after {ended.seconds:.1f} s"
    if ended.limit_exceeded is not None:
        return OutcomeKind.AGENT_ERROR, ended.limit_exceeded
    if ended.exit_code is not None and ended.exit_code < 0:
        return OutcomeKind.AGENT_ERROR, f"the agent was ended by signal {-ended.exit_code}"
    if ended.exit_code != 0:
        return OutcomeKind.AGENT_ERROR, f"the agent exited with code {ended.exit_code}"
    return OutcomeKind.SUCCEEDED, None


def read_reward(line: str) -> tuple[float | None, dict[str, Any]]:
    """The reward and the complete object of a line with `reward` or `rewards`; an empty line has none.

    `reward` is a number; `rewards` an object of numbers, whose sum counts where `reward` is absent.

    Raises: BrokenReward: the line is broken JSON, or the reward is no finite number.
    """
    if not line:
        return None, {}
    if len(line.encode()) > MAX_LINE_BYTES:
        raise BrokenReward(f"the last line with a reward has more than {MAX_LINE_BYTES} bytes, its limit: {line[:200]}")
    try:
        facts = {name: _shallow(value) for name, value in json.loads(line).items()}
    except (ValueError, RecursionError) as error:
        raise BrokenReward(f"the last line with a reward is broken JSON ({error}): {line[:200]}") from error
    if "reward" in facts:
        return _number("reward", facts["reward"]), _bounded(facts)
    return _sum(facts.get("rewards")), _bounded(facts)


def _sum(rewards: object) -> float:
    if not isinstance(rewards, dict) or not rewards:
        raise BrokenReward(f"'rewards' must be an object of numbers, not {str(rewards)[:200]}")
    total = sum(_number(f"rewards.{name}", value) for name, value in rewards.items())
    return _number("rewards", total)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BrokenReward(f"{name!r} must be a number, not {str(value)[:200]!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise BrokenReward(f"{name!r} is not finite: {str(value)[:200]}")
    if not is_reward(number):
        raise BrokenReward(f"{name!r} is beyond {MAX_REWARD:g}: {str(value)[:200]}")
    return number


def _shallow(value: object) -> object:
    """The value; a text in place of one so deep that its next reader may run out of stack."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inside
            for outer in level
            if isinstance(outer, dict | list)
            for inside in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return value if not level else f"deeper than {MAX_DEPTH} levels"


def _bounded(facts: dict[str, Any]) -> dict[str, Any]:
    size = len(json.dumps(facts))
    return facts if size <= FACTS_BYTES else {"truncated": f"{size} characters, and facts hold {FACTS_BYTES} at most"}
