"""Indexes for the filters by tool and role: the console lists 10,000 rollouts without reading all of their calls."""

from alembic import op

revision = "20261127_0077b"
down_revision = "20261127_0077"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        "CREATE INDEX ix_model_calls_tools ON model_calls"
        """ USING gin (jsonb_path_query_array(answer, '$."tool_calls"[*]."name"'::jsonpath)) WITH (fastupdate = off)"""
    )
    op.execute("CREATE INDEX ix_model_calls_role ON model_calls (role, rollout_id, attempt) WHERE role IS NOT NULL")
    op.execute('CREATE INDEX ix_spans_tool ON spans ("left"(tool, 200)) WHERE tool IS NOT NULL')


def downgrade() -> None:
    for name in ("ix_spans_tool", "ix_model_calls_role", "ix_model_calls_tools"):
        op.execute(f"DROP INDEX {name}")
