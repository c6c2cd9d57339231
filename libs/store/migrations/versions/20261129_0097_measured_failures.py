"""Reports measure an evaluation's failures, and rollouts that were graded after they were excluded, as the API."""

from alembic import op

revision = "20261129_0097"
down_revision = "20261129_0096"
branch_labels = None
depends_on = None

GIVEN = """(coalesce((SELECT sum(value) FROM rewards
        WHERE rollout_id = rollouts.id AND attempt = rollouts.attempt), 0)
    + coalesce((SELECT sum(value) FROM external_rewards
        WHERE rollout_id = rollouts.id AND coalesce(attempt, rollouts.attempt) = rollouts.attempt), 0))"""
STILL_TO_COME = """runs.awaits_rewards AND rollouts.state = 'finished'
    AND EXISTS (SELECT FROM outcomes o WHERE o.rollout_id = rollouts.id AND o.attempt = rollouts.attempt
                AND o.kind = 'succeeded' AND o.reward IS NULL)
    AND NOT EXISTS (SELECT FROM rewards w WHERE w.rollout_id = rollouts.id AND w.attempt = rollouts.attempt)
    AND NOT EXISTS (SELECT FROM external_rewards x
                    WHERE x.rollout_id = rollouts.id AND coalesce(x.attempt, rollouts.attempt) = rollouts.attempt)"""
OWN = f"CASE WHEN {STILL_TO_COME} THEN NULL ELSE rollouts.reward END"  # constants alone

# As `REWARD` of libs/store/rewards.py: nothing given on the way lifts a failure above the smallest reward.
FAILURE = f"""CASE WHEN groups.evaluation_id IS NOT NULL AND rollouts.state = 'finished'
    THEN least(0, run_status.smallest_reward)
        - CASE WHEN rollouts.reason = 'succeeded' THEN 0 ELSE greatest(0, {GIVEN}) END END"""
MEASURED = f"CASE WHEN {STILL_TO_COME} THEN NULL ELSE coalesce(newest.total, rollouts.reward, {FAILURE}) + {GIVEN} END"  # constants alone
# An excluded rollout has no attempt that counts: its gradings name theirs.
REPAIRED = "rollouts.attempt IS NULL AND rollouts.state = 'excluded' AND groups.evaluation_id IS NOT NULL"


def upgrade() -> None:
    _replace(MEASURED, f"(regrades.attempt = rollouts.attempt OR {REPAIRED})")
    _comment("after its last regrade, an evaluation's failures included")


def downgrade() -> None:
    _replace(f"coalesce(newest.total, {OWN}) + {GIVEN}", "regrades.attempt = rollouts.attempt")
    _comment("after its last regrade")


def _replace(newest_reward: str, regraded: str) -> None:
    _exec(f"""
CREATE OR REPLACE VIEW reports.rollouts AS
SELECT rollouts.run_id, runs.name AS run_name, rollouts.id AS rollout_id, rollouts.group_id, groups.evaluation_id,
    step_groups.step, rollouts.state, rollouts.reason, {OWN} + {GIVEN} AS reward,
    rollouts.created_at, tried.started_at, rollouts.finished_at, coalesce(tried.attempts, 0) AS attempts,
    extract(epoch FROM tried.started_at - rollouts.created_at)::float8 AS queue_seconds,
    extract(epoch FROM rollouts.finished_at - tried.started_at)::float8 AS work_seconds,
    {newest_reward} AS newest_reward, coalesce(newest.revision, 1) AS revision
FROM rollouts
JOIN runs ON runs.id = rollouts.run_id
JOIN groups ON groups.id = rollouts.group_id
LEFT JOIN run_status ON run_status.run_id = rollouts.run_id
LEFT JOIN step_groups ON step_groups.group_id = rollouts.group_id AND step_groups.run_id = rollouts.run_id
LEFT JOIN LATERAL (
    SELECT count(*) AS attempts, min(attempts.started_at) AS started_at FROM attempts
    WHERE attempts.rollout_id = rollouts.id
) AS tried ON true
LEFT JOIN LATERAL (
    SELECT regrades.total, regrades.revision FROM regrades
    WHERE regrades.rollout_id = rollouts.id AND {regraded}
    ORDER BY regrades.revision DESC LIMIT 1
) AS newest ON true""")  # noqa: S608  # constants alone


def _comment(newest_reward: str) -> None:
    words = newest_reward.replace("'", "''")
    _exec(
        "COMMENT ON VIEW reports.rollouts IS 'One row for each rollout: its state, its rewards from every source"
        f" (reward: as credit had it, newest_reward: {words}), its waiting and working time in seconds.'"
    )


def _exec(statement: str) -> None:
    op.get_bind().exec_driver_sql(statement, execution_options={"no_parameters": True})
