"""Storage: token arrays are kept as they come, texts by the quick compression where the server has one.

Postgres' own pglz took two thirds of the time of recording a call and of crediting it, and a third off the row's size.
Arrays of one value over and over stay compressed: there it costs nothing and saves nearly all.
"""

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


def upgrade() -> None:
    """For runs made before, what is written from now on; rows that exist stay readable as they are."""
    for table, columns in ARRAYS.items():
        for column in columns:
            op.execute(f"ALTER TABLE {table} ALTER {column} SET STORAGE EXTERNAL")
    for table, columns in TEXTS.items():
        for column in columns:
            op.execute(_QUICK.format(table=table, column=column))


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
    """Compresses everything again."""
    for tables in (ARRAYS, TEXTS):
        for table, columns in tables.items():
            for column in columns:
                op.execute(f"ALTER TABLE {table} ALTER {column} SET STORAGE EXTENDED")
