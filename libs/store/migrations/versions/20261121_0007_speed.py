"""Speed: token arrays are kept as they come, texts by the quick compression where the server has one; groups that are
looked for again and again have indexes of their own.

Postgres' own pglz took two thirds of the time of recording a call and of crediting it, and a third off the row's size.
Arrays of one value over and over stay compressed: there it costs nothing and saves nearly all.
"""

import sqlalchemy as sa
from alembic import op

revision = "20261121_0007"
down_revision = "20261121_0005"
branch_labels = None
depends_on = None

ARRAYS = {
    "model_calls": ("prompt_ids", "sampled_ids", "generator_logprobs"),
    "samples": ("token_ids", "generator_logprobs"),
}
TEXTS = {"model_calls": ("messages", "response")}
# name, table, columns, where
INDEXES = [
    ("ix_groups_training", "groups", ["run_id", "number"], "evaluation_id IS NULL"),
    ("ix_groups_complete", "groups", ["finished_at"], "state = 'complete' AND evaluation_id IS NULL"),
    ("ix_groups_cancelled", "groups", ["run_id"], "state = 'cancelled' AND evaluation_id IS NULL"),
    ("ix_group_credits_excluded", "group_credits", ["run_id"], "verdict = 'excluded'"),
    ("ix_step_groups_stale", "step_groups", ["run_id"], "verdict = 'stale'"),
]


def upgrade() -> None:
    """For runs made before, what is written from now on; rows that exist stay readable as they are."""
    for table, columns in ARRAYS.items():
        for column in columns:
            op.execute(f"ALTER TABLE {table} ALTER {column} SET STORAGE EXTERNAL")
    for table, columns in TEXTS.items():
        for column in columns:
            op.execute(_QUICK.format(table=table, column=column))
    for name, table, indexed, where in INDEXES:
        op.create_index(name, table, indexed, postgresql_where=sa.text(where))


# Compression is not inherited by partitions that exist, and storage is. Some builds of Postgres lack lz4.
_QUICK = """
    DO $$
    DECLARE part regclass;
    BEGIN
        FOR part IN SELECT '{table}'::regclass UNION ALL SELECT inhrelid FROM pg_inherits WHERE inhparent = '{table}'::regclass
        LOOP
            EXECUTE format('ALTER TABLE %s ALTER {column} SET COMPRESSION lz4', part);
        END LOOP;
    EXCEPTION WHEN feature_not_supported THEN
        ALTER TABLE {table} ALTER {column} SET STORAGE EXTERNAL;
    END $$
"""


def downgrade() -> None:
    """Compresses everything again, and counts by reading."""
    for name, table, _, _ in INDEXES:
        op.drop_index(name, table)
    for tables in (ARRAYS, TEXTS):
        for table, columns in tables.items():
            for column in columns:
                op.execute(f"ALTER TABLE {table} ALTER {column} SET STORAGE EXTENDED")
