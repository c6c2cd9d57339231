"""Applies a grader to the facts of an attempt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from leyden.libs.contracts.config import Component
from leyden.libs.contracts.config.graders import CODE, Container, RelativeModel, ScoreModel
from leyden.libs.contracts.states import ComponentState
from leyden.libs.grading import calls, numbers, queries, similarity, structures, words
from leyden.libs.grading.facts import AttemptFacts, MissingField, Scored, whole

MAX_SHOWN = 500
"""Characters of an extracted answer and of an explanation."""


@dataclass(frozen=True)
class Grade:
    """One component of a rollout's reward.

    Args: value: null unless scored; extracted: the answer that the grader found in the output; explanation: for people
    """

    state: ComponentState
    value: float | None = None
    extracted: str | None = None
    explanation: str = ""


_GRADERS: dict[str, Callable[[Any, AttemptFacts], Scored]] = {
    "string_check": words.string_check,
    "token_f1": words.token_f1,
    "choice": words.choice,
    "regex": words.regex,
    "length": words.length,
    "numeric": numbers.numeric,
    "json_schema": structures.json_schema,
    "json_path": structures.json_path,
    "text_similarity": similarity.text_similarity,
    "call_budget": calls.call_budget,
    "tool_use": calls.tool_use,
    "sql_result": queries.sql_result,
}


def grade(component: Component, facts: AttemptFacts) -> Grade:
    """Returns the component's grade."""
    if component.source in ("feedback", "otlp"):
        return _of_feedback(component, facts)
    if component.grader is None:
        return _of_agents_line(facts)
    if isinstance(component.grader, ScoreModel | RelativeModel):
        return Grade(ComponentState.FAILED, explanation="a judge scores this, whom the service grader alone asks")
    if isinstance(component.grader, CODE):
        return Grade(ComponentState.FAILED, explanation="code of your own grades this, in the service grader alone")
    if isinstance(component.grader, Container):
        return Grade(
            ComponentState.FAILED, explanation="a container grades this, which the service grader alone starts"
        )
    try:
        value, extracted, explanation = _GRADERS[component.grader.type](component.grader, facts)
    except MissingField as error:
        return of_missing(error, worst(component))
    shown = None if extracted is None else cut(extracted)
    return Grade(ComponentState.SCORED, value, shown, cut(explanation))


def _of_agents_line(facts: AttemptFacts) -> Grade:
    if facts.line_reward is None:
        return Grade(ComponentState.NOT_APPLICABLE, explanation="the agent printed no reward")
    return Grade(ComponentState.SCORED, facts.line_reward, f"{facts.line_reward:g}", "the agent's reward line")


def _of_feedback(component: Component, facts: AttemptFacts) -> Grade:
    values = facts.feedback.get(component.name, ())
    if not values:
        missed = f"no feedback within {facts.waited_seconds:g} s"
        cause = missed if component.source == "feedback" else f"no evaluation event named {component.name!r} came"
        return Grade(ComponentState.FAILED, explanation=cause)
    value = values[-1] if component.combine == "last" else fmean(values)
    shown = ", ".join(f"{one:g}" for one in values)
    return Grade(ComponentState.SCORED, value, None, cut(f"{component.combine} of {shown}"))


def worst(component: Component) -> float:
    """Returns the value from 0 to 1 by which a rollout earns least: 1 where a negative weight makes it cost.

    A gate comes first, and 0 fails it.
    """
    return 1.0 if component.weight < 0 and component.gate is None else 0.0


def of_missing(error: MissingField, least: float) -> Grade:
    """Returns the grade where a field has no value.

    An output without the field that a grader reads earns the worst: otherwise an agent could escape by silence.
    """
    if error.path.startswith("task"):
        return Grade(ComponentState.NOT_APPLICABLE, explanation=cut(str(error)))
    return Grade(ComponentState.SCORED, least, None, cut(str(error)))


def storable(text: str) -> str:
    """The text without characters that Postgres refuses: a grader may show any of an agent's."""
    return whole(text).replace("\x00", "\ufffd")


def cut(text: str) -> str:
    """Returns the text as a row shows it."""
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"
