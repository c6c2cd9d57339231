"""Canaries of policy versions, and the answers of engines to them."""

from alembic import op

revision = "20261127_0079"
down_revision = "20261127_0077b"
branch_labels = None
depends_on = None

COMMENTS = {
    "TABLE canaries": "Writer: trainer. The log-probabilities of a few fixed token sequences at a version, which engines"
    " are asked.",
    "COLUMN canaries.run_id": "The run that made the version.",
    "COLUMN canaries.version": "Its number.",
    "COLUMN canaries.canary": "{token_ids, logprobs, dtype, max_gap, rounds_updates}: libs/contracts/canary.",
    "TABLE canary_answers": "Writer: controller. The newest answer of an engine to the canary of a version of a run.",
    "COLUMN canary_answers.url": "The engine.",
    "COLUMN canary_answers.run_id": "The run of the version.",
    "COLUMN canary_answers.policy_version": "The version that was delivered.",
    "COLUMN canary_answers.verdict": "equal; other: the engine serves something else; unanswered: it cannot be"
    " compared.",
    "COLUMN canary_answers.tokens": "Compared tokens; null without an answer, as the next ones.",
    "COLUMN canary_answers.gap": "Mean |trainer - engine| log-probability, nats.",
    "COLUMN canary_answers.largest": "The largest such difference.",
    "COLUMN canary_answers.gap_limit": "The mean above which the engine serves something else.",
    "COLUMN canary_answers.moved": "Share of the change since the version before that the engine made; null where"
    " nothing shows it.",
    "COLUMN canary_answers.detail": "Cause, for people; null where all is well.",
    "COLUMN canary_answers.answered_at": "The time of the answer.",
}


def upgrade() -> None:
    op.execute("""
        CREATE TABLE canaries (
            run_id text NOT NULL,
            version integer NOT NULL,
            canary jsonb NOT NULL,
            created_at timestamptz DEFAULT now() NOT NULL,
            CONSTRAINT pk_canaries PRIMARY KEY (run_id, version),
            CONSTRAINT fk_canaries_run_id_runs FOREIGN KEY (run_id) REFERENCES runs(id) ON DELETE CASCADE
        )
    """)
    op.execute("""
        CREATE TABLE canary_answers (
            url text NOT NULL,
            run_id text NOT NULL,
            policy_version integer NOT NULL,
            verdict text NOT NULL,
            tokens integer,
            gap double precision,
            largest double precision,
            gap_limit double precision,
            moved double precision,
            detail text,
            answered_at timestamptz DEFAULT now() NOT NULL,
            CONSTRAINT pk_canary_answers PRIMARY KEY (url, run_id),
            CONSTRAINT fk_canary_answers_run_id_runs FOREIGN KEY (run_id) REFERENCES runs(id) ON DELETE CASCADE,
            CONSTRAINT ck_canary_answers_verdict_known CHECK (verdict IN ('equal', 'other', 'unanswered'))
        )
    """)
    op.execute("CREATE INDEX ix_canary_answers_run_id ON canary_answers (run_id)")
    for name, comment in COMMENTS.items():
        op.execute(f"COMMENT ON {name} IS '{comment}'")


def downgrade() -> None:
    op.execute("DROP TABLE canary_answers")
    op.execute("DROP TABLE canaries")
