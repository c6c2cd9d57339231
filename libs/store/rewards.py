"""A rollout's reward, for every reader: its own plus all that was given to it or to one of its calls.

Its own is the settled total of its components where the run names some, and then nobody else can give it any. The
newest regrade counts for evaluations, which nothing trained on, also where the rollout was excluded without a total;
training rollouts keep the number that credit had.
"""

from leyden.libs.contracts.rewards import ROUNDING

GIVEN = """(coalesce((SELECT sum(value) FROM rewards WHERE rollout_id = rollouts.id AND attempt = rollouts.attempt), 0)
    + coalesce((SELECT sum(value) FROM external_rewards
                WHERE rollout_id = rollouts.id AND coalesce(attempt, rollouts.attempt) = rollouts.attempt), 0))"""
"""SQL over `rollouts`: all that was given to a rollout or to one of its calls."""


# An evaluation's failures have no reward of their own: at every moment all versions are measured by one number, above
# which nothing lifts a failure that was given to it on the way.
def _reward(given: str, smallest: str = "run_status.smallest_reward") -> str:
    return f"""(coalesce((
        SELECT regrades.total FROM regrades JOIN groups ON groups.id = rollouts.group_id
        WHERE regrades.rollout_id = rollouts.id AND regrades.attempt = coalesce(rollouts.attempt, regrades.attempt)
        AND groups.evaluation_id IS NOT NULL AND rollouts.state IN ('finished', 'excluded')
        ORDER BY regrades.revision DESC LIMIT 1), rollouts.reward, (
        SELECT least(0, {smallest})
            - CASE WHEN rollouts.reason = 'succeeded' THEN 0 ELSE greatest(0, {given}) END
        FROM groups JOIN run_status ON run_status.run_id = groups.run_id
        WHERE groups.id = rollouts.group_id AND groups.evaluation_id IS NOT NULL AND rollouts.state = 'finished'))
    + {given})"""  # noqa: S608  # constants alone


REWARD = _reward(GIVEN)
"""SQL over `rollouts`; null unless the rollout is finished, or was graded after it was excluded from an evaluation."""

REWARD_BESIDE = _reward(
    GIVEN,
    """(SELECT min(smallest_reward) FROM run_status
        WHERE run_id IN (SELECT run_id FROM evaluations WHERE id = ANY(:evaluations)))""",
)
"""SQL over `rollouts`: as `REWARD`, for runs beside each other: in each of them failures earn the smallest reward of
all. The parameter `evaluations` has the ids of those that are compared."""

SIBLING = "(NOT rollouts.greedy AND rollouts.rerolls_of IS NULL)"
"""SQL over `rollouts`: whether it is one of the siblings that a mean is over: no greedy rollout and no re-roll."""

SOLVED = f">= {1 - ROUNDING}"
"""SQL behind a reward: whether it solved the task."""

# A success of a run whose rewards come from outside has 0 until one comes: unknown, not zero. Components of a run are
# settled before a rollout finishes.
_SUCCEEDED = """rollouts.state = 'finished'
    AND EXISTS (SELECT FROM outcomes o WHERE o.rollout_id = rollouts.id AND o.attempt = rollouts.attempt
                AND o.kind = 'succeeded' AND o.reward IS NULL)"""
_AWAITS = f"runs.awaits_rewards AND {_SUCCEEDED}"
_NOT_GIVEN = """NOT EXISTS (SELECT FROM rewards w WHERE w.rollout_id = rollouts.id AND w.attempt = rollouts.attempt)
    AND NOT EXISTS (SELECT FROM external_rewards x
                    WHERE x.rollout_id = rollouts.id AND coalesce(x.attempt, rollouts.attempt) = rollouts.attempt)"""
UNGRADED = f"({_AWAITS} AND {_NOT_GIVEN})"
"""SQL over `rollouts` and their `runs`: whether the reward of a finished rollout is still to come."""

KNOWN_REWARD = f"""(CASE WHEN NOT ((SELECT awaits_rewards FROM runs AS own WHERE own.id = rollouts.run_id)
    AND {_SUCCEEDED} AND {_NOT_GIVEN}) THEN {REWARD} END)"""  # noqa: S608  # constants alone
"""SQL over `rollouts`: the reward for people; null also while it is to come."""

SOLVE_RATE = f"avg(({KNOWN_REWARD} {SOLVED})::int)::double precision"
"""SQL over grouped `rollouts` that are finished: the share of known rewards that are at least 1; null without any."""

_OF_STEP = "of_step.run_id = {run} AND of_step.step = {step}"
# Why: credit has one row for a group, which is far less to read; its numbers count a reward that is to come as 0.
_STEP_MEAN = f"""(SELECT CASE WHEN runs.awaits_rewards AND runs.algorithm IS DISTINCT FROM 'sft' THEN (
        SELECT avg({KNOWN_REWARD}) FROM step_groups AS of_step JOIN rollouts ON rollouts.group_id = of_step.group_id
        WHERE {_OF_STEP} AND rollouts.state = 'finished' AND {SIBLING}
    ) ELSE (
        SELECT sum(credit.reward_mean * credit.counted_siblings)
            / nullif(sum(credit.counted_siblings) FILTER (WHERE credit.reward_mean IS NOT NULL), 0)
        FROM step_groups AS of_step
        JOIN group_credits AS credit ON credit.group_id = of_step.group_id AND credit.run_id = of_step.run_id
        WHERE {_OF_STEP}
    ) END FROM policies JOIN runs ON runs.id = policies.run_id WHERE policies.id = {{run}})"""  # noqa: S608  # constants


def step_mean(run: str, step: str) -> str:
    """SQL: the mean reward over the rollouts of a step; null where none is known.

    As `reward_mean` of steps, but for rewards that were given after credit where a run has its own: it trained without.

    Args: run, step: SQL of the id of a run or a further policy, and of the step's number
    """
    return _STEP_MEAN.format(run=run, step=step)


def is_used(policy: str) -> str:
    """SQL over `rollouts` and `step_groups`: whether the step trains it, and not another one of the group. Fine-tuning
    trains some rollouts of other runs, and each run all of its own.

    Args: policy: SQL of the id of the run or further policy; a parameter is looked up once, a column for each rollout
    """
    return f"""(rollouts.run_id = (SELECT run_id FROM policies WHERE id = {policy})
    OR EXISTS (SELECT FROM samples WHERE samples.run_id = {policy}
               AND samples.group_id = step_groups.group_id AND samples.rollout_id = rollouts.id))"""  # noqa: S608  # constants


# Why: looking up what each of 10,000 rollouts was given takes three times as long as one pass over all of a run.
GIVEN_OF_RUNS = """
    SELECT rollouts.id, sum(w.value) AS total FROM rollouts JOIN (
        SELECT rollout_id, attempt, value FROM rewards UNION ALL SELECT rollout_id, attempt, value FROM external_rewards
    ) AS w ON w.rollout_id = rollouts.id AND coalesce(w.attempt, rollouts.attempt) = rollouts.attempt
    WHERE rollouts.run_id = ANY(:run_ids) GROUP BY rollouts.id
"""
"""A query: the rollouts of runs that something was given to, each with all of it."""

# Why OFFSET: Postgres computes an expression anew for each aggregate over it. With it, and one lookup for both tables,
# the rewards of 125 steps of 10,000 rollouts took 130 ms, and take 40. The pass above would read a whole run for a few.
GIVEN_OF_EACH = """CROSS JOIN LATERAL (
    SELECT CASE WHEN count(*) > 0 THEN rollouts.id END AS id, sum(w.value) AS total FROM (
        SELECT rollout_id, attempt, value FROM rewards UNION ALL SELECT rollout_id, attempt, value FROM external_rewards
    ) AS w WHERE w.rollout_id = rollouts.id AND coalesce(w.attempt, rollouts.attempt) = rollouts.attempt OFFSET 0
) AS given"""
"""A join to `rollouts`: `given` as in `GIVEN_OF_RUNS`; its id is null where nothing was given."""

EARNED = f"CASE WHEN NOT ({_AWAITS} AND given.id IS NULL) THEN {_reward('coalesce(given.total, 0)')} END"
"""SQL over `rollouts`, their `runs` and their row of `GIVEN_OF_RUNS`, `given`: the reward; null while it is to come."""

TRAINING_REWARD = f"CASE WHEN NOT ({_AWAITS} AND given.id IS NULL) THEN rollouts.reward + coalesce(given.total, 0) END"
"""SQL over training `rollouts`, their `runs` and their row of `GIVEN_OF_RUNS`, `given`: as `EARNED`, whose further
parts are of evaluations alone and take 9 microseconds a rollout."""

GROUP_REWARD = f"CASE WHEN groups.evaluation_id IS NULL THEN {TRAINING_REWARD} ELSE {EARNED} END"
"""SQL over `rollouts`, their `runs`, `groups` and `given`: as `EARNED`."""
