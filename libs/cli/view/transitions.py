"""A rollout's transitions as people read them: action, reward and what changed in the state."""

from __future__ import annotations

from collections.abc import Iterator

from leyden.libs.cli.view.output import Part, as_block, as_text, facts, heading
from leyden.libs.contracts.api.trajectory import Excerpt, State, Transition

NOTHING = "No call and no tool yet."
SHOWN_CHARACTERS = 600


def transition_parts(number: int, step: Transition) -> Iterator[Part]:
    """One transition. Args: number: its place in the trajectory, from 1"""
    is_call = step.type == "llm"
    named = f" {step.component}" if step.component else ""
    yield heading(f"{number}  {'model' if is_call else 'tool'}{named}  {step.status}  {step.id}")
    yield as_block(_text(step.input), "dim")
    yield as_block(_text(step.output))
    yield facts(("reward", _reward(step)))
    if step.next_state is None:
        yield as_text("no next state: the last step so far", "dim")
    elif changed := _changed(step.state, step.next_state):
        yield facts(*((f"next {name}", _text(value)) for name, value in changed.items()))


def _reward(step: Transition) -> str:
    if step.reward is not None:
        return f"{step.reward:+.4g}"
    return "that of the call that asked" if step.type == "tool" else "unknown until credit has computed the group"


def _changed(before: State, after: State) -> dict[str, Excerpt]:
    return {name: value for name, value in after.variables.items() if before.variables.get(name) != value}


def _text(found: Excerpt | None) -> str:
    if found is None:
        return "none"
    shown = found.text[:SHOWN_CHARACTERS]
    return shown if len(shown) == found.characters else f"{shown} … ({found.characters} characters)"
