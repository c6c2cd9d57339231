"""Endpoints that nobody watched while an attempt ran: they may have been down."""

from alembic import op

revision = "20261128_0093"
down_revision = "20261128_0092"
branch_labels = None
depends_on = None

BEFORE = {
    "endpoint_down": "The endpoint of the agent, or the store, that did not answer while an attempt ran that ended well"
    " without a reward of its own; null: none, or unknown.",
    "gateway_down_seconds": "How long before the end of an attempt that ended well the gateway last did not answer;"
    " null: it did, or unknown.",
}
AFTER = {
    "endpoint_down": "The endpoint of the agent, or the store, that did not answer while an attempt ran that ended well"
    " without a reward of its own; not watched: it may not have; null: none, or unknown.",
    "gateway_down_seconds": "How long before the end of an attempt that ended well the gateway last did not answer, or"
    " was not watched; null: it answered, or unknown.",
}


def upgrade() -> None:
    _comment(AFTER)


def downgrade() -> None:
    _comment(BEFORE)


def _comment(comments: dict[str, str]) -> None:
    for column, comment in comments.items():
        op.execute(f"COMMENT ON COLUMN outcomes.{column} IS '{comment}'")
