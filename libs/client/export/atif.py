"""Harbor's Agent Trajectory Interchange Format, version 1.7: one trajectory a conversation.

Source: https://github.com/harbor-framework/harbor/blob/main/rfcs/0001-trajectory-format.md
The conversations of a rollout share `session_id`, its id. An answer that an earlier conversation of the rollout has, or
that came from the agent, is `is_copied_context`: it is no training data.
"""

from __future__ import annotations

from typing import Any

from leyden.libs.client.export.base import ByConversation
from leyden.libs.client.export.conversations import Conversation
from leyden.libs.client.export.trl import json_object
from leyden.libs.contracts.api.rollouts import Call, Rollout
from leyden.libs.contracts.conversation import Json, ToolCall, Turn

VERSION = "ATIF-v1.7"


class Atif(ByConversation):
    """Own answers have their tokens, log-probabilities and policy versions in `metrics`."""

    def row(self, conversation: Conversation) -> Json:
        """Converts one conversation."""
        steps: list[Json] = []
        for at, turn in enumerate(conversation.turns):
            if turn.role == "tool":
                _observe(steps, turn)
            else:
                call = conversation.answers.get(at) if at in conversation.own else None
                steps.append({"step_id": len(steps) + 1, **_step(turn, call)})
        return {
            "schema_version": VERSION,
            "session_id": conversation.rollout.id,
            "trajectory_id": conversation.id,
            "agent": _agent(conversation),
            "steps": steps,
            "final_metrics": _totals(conversation, len(steps)),
            "extra": _of_rollout(conversation.rollout),
        }


def _agent(conversation: Conversation) -> Json:
    # The format wants both; an agent tells Leyden no version.
    agent: Json = {"name": conversation.agent or conversation.role or "agent", "version": "unknown"}
    if conversation.tools:
        agent["tool_definitions"] = list(conversation.tools)
    return {**agent, "extra": {"role": conversation.role}}


def _step(turn: Turn, call: Call | None) -> Json:
    """A message as a step without its number.

    Args: call: sampled an own answer; None for all else
    """
    if turn.role != "assistant":
        named = {"extra": {"name": turn.name}} if turn.name else {}
        return {"source": "system" if turn.role == "system" else "user", "message": turn.content, **named}
    step: Json = {"source": "agent", "message": turn.content}
    if turn.reasoning is not None:
        step["reasoning_content"] = turn.reasoning
    if turn.tool_calls:
        step["tool_calls"] = [_tool_call(one) for one in turn.tool_calls]
    if call is None:
        return {**step, "is_copied_context": True}
    return {
        **step,
        "timestamp": call.created_at.isoformat(),
        "llm_call_count": 1,
        "metrics": _metrics(call),
        "extra": {"call_id": call.id},
    }


def _tool_call(call: ToolCall) -> Json:
    arguments = json_object(call.arguments)
    found: Json = {"tool_call_id": call.id, "function_name": call.name, "arguments": arguments or {}}
    return found if arguments is not None else {**found, "extra": {"malformed_arguments": call.arguments}}


def _metrics(call: Call) -> Json:
    return {
        "prompt_tokens": call.prompt_tokens,
        "completion_tokens": call.completion_tokens,
        "cached_tokens": call.cached_tokens,
        "completion_token_ids": call.sampled_ids,
        "logprobs": call.logprobs,
        "extra": {"policy_versions": call.policy_versions, "temperature": call.temperature},
    }


def _observe(steps: list[Json], turn: Turn) -> None:
    """Adds a tool's result to the last step that made the call; a result of no call becomes a step of the system."""
    result: Json = {"content": turn.content}
    extra: Json = {"is_error": True} if turn.is_error else {}
    for step in reversed(steps):
        if any(call["tool_call_id"] == turn.tool_call_id for call in step.get("tool_calls", ())):
            result["source_call_id"] = turn.tool_call_id
            break
    else:
        step = {"step_id": len(steps) + 1, "source": "system", "message": ""}
        steps.append(step)
        extra["tool_call_id"] = turn.tool_call_id
    observation: dict[str, Any] = step.setdefault("observation", {"results": []})
    observation["results"].append({**result, **({"extra": extra} if extra else {})})


def _totals(conversation: Conversation, steps: int) -> Json:
    own = [conversation.answers[at] for at in conversation.own]
    return {
        "total_prompt_tokens": sum(call.prompt_tokens for call in own),
        "total_completion_tokens": sum(call.completion_tokens for call in own),
        "total_cached_tokens": sum(call.cached_tokens for call in own),
        "total_steps": steps,
    }


def _of_rollout(rollout: Rollout) -> Json:
    return {
        "run": rollout.run_id,
        "group": rollout.group_id,
        "evaluation": rollout.evaluation_id,
        "task": rollout.task_number,
        "attempt": rollout.attempt,
        "reward": rollout.reward,
        "reason": rollout.reason,
    }
