"""Text to SQL, in LangGraph: its writer and rewriter train, and its checker stays context."""

from __future__ import annotations

from tests.campaigns.experiments.taught import Taught

SQL = Taught(
    name="sql",
    heading="Text to SQL, LangGraph",
    purpose="The [SQL agent](../../examples/sql/README.md) writes queries for an excerpt of Chinook. A model that finds"
    " no query learns nothing from rewards of 0: a warm start on solutions of a scripted teacher comes first.",
)
