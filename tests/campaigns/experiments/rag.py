"""Questions over real entries, with OpenAI's Agents SDK on the Responses API: searches and answers train."""

from __future__ import annotations

from tests.campaigns.experiments.taught import Taught

RAG = Taught(
    name="rag",
    heading="Questions over entries, OpenAI Agents SDK",
    purpose="The [RAG agent](../../examples/rag/README.md) searches entries of GeoNames once or twice and answers. The"
    " reward is 0.9 of the answer's F1 and 0.1 for its format. A model that calls no tool learns to from solutions of a"
    " scripted teacher first.",
)
