"""What the store must say after anything was killed: each question is one SQL statement whose rows are violations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg

QUESTIONS = {
    "rollouts that are not terminal": """
        SELECT id, state FROM rollouts WHERE run_id = %(run)s AND state = 'queued'""",
    "finished rollouts whose counted attempt has no outcome": """
        SELECT r.id FROM rollouts r LEFT JOIN outcomes o ON o.rollout_id = r.id AND o.attempt = r.attempt
        WHERE r.run_id = %(run)s AND r.state = 'finished' AND o.kind IS NULL""",
    "rewards out of infrastructure failures": """
        SELECT r.id FROM rollouts r JOIN outcomes o ON o.rollout_id = r.id AND o.attempt = r.attempt
        WHERE r.run_id = %(run)s AND r.state = 'finished' AND o.kind IN ('infra_error', 'cancelled')""",
    "two attempts of one rollout that settled with a verdict": """
        SELECT rollout_id FROM outcomes WHERE run_id = %(run)s AND kind NOT IN ('infra_error', 'cancelled')
        GROUP BY rollout_id HAVING count(*) > 1""",
    "complete training groups without a verdict of credit": """
        SELECT g.id FROM groups g LEFT JOIN group_credits c ON c.group_id = g.id
        WHERE g.run_id = %(run)s AND g.evaluation_id IS NULL AND g.state = 'complete' AND c.verdict IS NULL""",
    "excluded groups without a cause": """
        SELECT group_id FROM group_credits WHERE run_id = %(run)s AND verdict = 'excluded' AND reason IS NULL""",
    "sampled tokens trained twice": """
        SELECT s.rollout_id FROM samples s JOIN step_samples t ON t.run_id = s.run_id AND t.sample_id = s.id
        JOIN rollouts r ON r.id = s.rollout_id WHERE s.run_id = %(run)s GROUP BY s.rollout_id, r.attempt
        HAVING sum(s.trained_tokens) > (SELECT sum(completion_tokens) FROM model_calls c
            WHERE c.run_id = %(run)s AND c.rollout_id = s.rollout_id AND c.attempt = r.attempt)""",
    "samples in two steps": """
        SELECT sample_id FROM step_samples WHERE run_id = %(run)s GROUP BY sample_id HAVING count(*) > 1""",
    "steps without samples or groups": """
        SELECT s.number FROM steps s WHERE s.run_id = %(run)s AND (
            NOT EXISTS (SELECT 1 FROM step_groups g WHERE g.run_id = s.run_id AND g.step = s.number)
            OR EXISTS (SELECT 1 FROM step_groups g WHERE g.run_id = s.run_id AND g.step = s.number
                AND g.verdict = 'trained')
            AND NOT EXISTS (SELECT 1 FROM step_samples t WHERE t.run_id = s.run_id AND t.step = s.number))""",
    "trained samples of groups that the step does not name": """
        SELECT t.sample_id FROM step_samples t JOIN samples s ON s.run_id = t.run_id AND s.id = t.sample_id
        LEFT JOIN step_groups g ON g.group_id = s.group_id AND g.step = t.step
        WHERE t.run_id = %(run)s AND g.group_id IS NULL""",
    "steps without their policy version, or versions without their step": """
        SELECT coalesce(s.number, v.version) FROM (SELECT number FROM steps WHERE run_id = %(run)s) s
        FULL JOIN (SELECT version FROM policy_versions WHERE run_id = %(run)s AND version > 0) v
        ON v.version = s.number WHERE s.number IS NULL OR v.version IS NULL""",
    "gaps between versions": """
        SELECT count(*), max(version) FROM policy_versions WHERE run_id = %(run)s
        HAVING count(*) <> max(version) + 1""",
    "tokens older than the lag allows": """
        SELECT t.sample_id FROM step_samples t JOIN samples s ON s.run_id = t.run_id AND s.id = t.sample_id
        JOIN runs r ON r.id = t.run_id WHERE t.run_id = %(run)s
        AND t.step - 1 - s.min_policy_version > (r.config -> 'sampling' ->> 'max_policy_lag')::int""",
    "calls recorded twice": """
        SELECT id FROM model_calls WHERE run_id = %(run)s GROUP BY id HAVING count(*) > 1""",
}


def violations(dsn: str, run_id: str) -> dict[str, list[Any]]:
    """Every question that has an answer, with the rows; empty when all promises hold."""
    with psycopg.connect(dsn) as connection:
        found = {name: connection.execute(question, {"run": run_id}).fetchall() for name, question in QUESTIONS.items()}
    return {name: rows for name, rows in found.items() if rows}


def lost_calls(dsn: str, run_id: str, received: Path) -> list[str]:
    """Answers that an agent received and the store has no completed call of.

    Args: received: one response id a line, `chatcmpl-<request_id>`, as the agents wrote them
    """
    ids = {line.removeprefix("chatcmpl-") for line in received.read_text().split()}
    with psycopg.connect(dsn) as connection:
        rows = connection.execute(
            "SELECT request_id FROM model_calls WHERE run_id = %s AND status = 'completed'", (run_id,)
        ).fetchall()
    return sorted(ids - {row[0] for row in rows})
