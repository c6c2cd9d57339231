"""Graders of an attempt's model calls, from the gateway's records."""

from __future__ import annotations

from leyden.libs.contracts.config import graders
from leyden.libs.grading.facts import AttemptFacts, Scored


def call_budget(grader: graders.CallBudget, facts: AttemptFacts) -> Scored:
    """Falls linearly from 1 at the budget."""
    value = min(1.0, max(0.0, 2.0 - facts.calls / grader.at_most))
    return value, None, f"{facts.calls} model calls of {grader.at_most}"


def tool_use(grader: graders.ToolUse, facts: AttemptFacts) -> Scored:
    """Counts the tool calls in the model's answers."""
    count = sum(grader.tool in (None, one) for one in facts.tools)
    holds = count >= grader.at_least and (grader.at_most is None or count <= grader.at_most)
    return float(holds), None, f"{count} calls of {'any tool' if grader.tool is None else grader.tool}"
