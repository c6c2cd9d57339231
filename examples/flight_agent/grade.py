"""The agent's own grader: computes the reward and the facts that the agent prints as its last line."""

import json
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Transcript:
    """The conversation in order; `calls` counts model calls, `answer` is None if the conversation ended without one."""

    tools: tuple[str, ...]
    answer: str | None
    calls: int


def names(answer: str, carrier: str) -> bool:
    """Tell whether the answer names the carrier as a word of its own, in any case."""
    return re.search(rf"(?<!\w){re.escape(carrier)}(?!\w)", answer, re.IGNORECASE) is not None


def verdict(transcript: Transcript, carrier: str) -> str:
    """Return one JSON line; the reward is 1 if the final answer names the carrier that search found, 0 if not.

    Example: `{"reward": 1, "memory_first": true, "success": true, "first_tool": "memory", "calls": 3}`
    """
    first_tool = transcript.tools[0] if transcript.tools else "none"
    success = transcript.answer is not None and names(transcript.answer, carrier)
    return json.dumps(
        {
            "reward": int(success),
            "memory_first": first_tool == "memory",
            "success": success,
            "first_tool": first_tool,
            "calls": transcript.calls,
        }
    )
