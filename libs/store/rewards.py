"""A rollout's reward, for every reader: its own plus all that was given to it or to one of its calls.

Its own is the settled total of its components where the run names some, and then nobody else can give it any. The
newest regrade counts for evaluations, which nothing trained on, also where the rollout was excluded without a total;
training rollouts keep the number that credit had.
"""

GIVEN = """(coalesce((SELECT sum(value) FROM rewards WHERE rollout_id = rollouts.id AND attempt = rollouts.attempt), 0)
    + coalesce((SELECT sum(value) FROM external_rewards
                WHERE rollout_id = rollouts.id AND coalesce(attempt, rollouts.attempt) = rollouts.attempt), 0))"""
"""SQL over `rollouts`: all that was given to a rollout or to one of its calls."""

# An evaluation's failures have no reward of their own: at every moment all versions are measured by one number, above
# which nothing lifts a failure that was given to it on the way.
REWARD = f"""(coalesce((
        SELECT regrades.total FROM regrades JOIN groups ON groups.id = rollouts.group_id
        WHERE regrades.rollout_id = rollouts.id AND regrades.attempt = coalesce(rollouts.attempt, regrades.attempt)
        AND groups.evaluation_id IS NOT NULL AND rollouts.state IN ('finished', 'excluded')
        ORDER BY regrades.revision DESC LIMIT 1), rollouts.reward, (
        SELECT least(0, run_status.smallest_reward)
            - CASE WHEN rollouts.reason = 'succeeded' THEN 0 ELSE greatest(0, {GIVEN}) END
        FROM groups JOIN run_status ON run_status.run_id = groups.run_id
        WHERE groups.id = rollouts.group_id AND groups.evaluation_id IS NOT NULL AND rollouts.state = 'finished'))
    + {GIVEN})"""  # noqa: S608  # constants alone
"""SQL over `rollouts`; null unless the rollout is finished, or was graded after it was excluded from an evaluation."""

SOLVE_RATE = f"avg(({REWARD} >= 1)::int)::double precision"
"""SQL over grouped `rollouts` that are finished: the share with a reward of at least 1."""

# A success of a run whose rewards come from outside has 0 until one comes: unknown, not zero. Components of a run are
# settled before a rollout finishes.
UNGRADED = """(runs.awaits_rewards AND rollouts.state = 'finished'
    AND EXISTS (SELECT FROM outcomes o WHERE o.rollout_id = rollouts.id AND o.attempt = rollouts.attempt
                AND o.kind = 'succeeded' AND o.reward IS NULL)
    AND NOT EXISTS (SELECT FROM rewards w WHERE w.rollout_id = rollouts.id AND w.attempt = rollouts.attempt)
    AND NOT EXISTS (SELECT FROM external_rewards x
                    WHERE x.rollout_id = rollouts.id AND coalesce(x.attempt, rollouts.attempt) = rollouts.attempt))"""
"""SQL over `rollouts` and their `runs`: whether the reward of a finished rollout is still to come."""
