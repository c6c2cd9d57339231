"""Small attempts for credit tests: calls over made-up token ids, tool spans, rollouts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from leyden.services.credit.records import AskedTool, Call, Rollout, ToolSpan

SECOND = 1_000_000_000


def call(name: str, prompt: Sequence[int], sampled: Sequence[int], *, at: float, **columns: Any) -> Call:
    """A completed call that arrived `at` seconds; logprob -0.5 and version 3 for each token."""
    digest = "c" + hashlib.sha256(name.encode()).hexdigest()[:24]
    values: dict[str, Any] = {
        "id": digest,
        "request_id": digest,
        "choice": 0,
        "sequence": int(at * SECOND),
        "completed": True,
        "trainable": True,
        "prompt": np.array(prompt, "<i4").tobytes(),
        "sampled": np.array(sampled, "<i4").tobytes(),
        "logprobs": np.full(len(sampled), -0.5, "<f4").tobytes(),
        "versions": np.full(len(sampled), 3, "<i4").tobytes(),
        "temperature": 0.8,
    }
    return Call(**{**values, **columns})


def asking(name: str, prompt: Sequence[int], sampled: Sequence[int], *tools: str, at: float) -> Call:
    """A call whose answer asks for tools, under the ids that the gateway makes up."""
    plain = call(name, prompt, sampled, at=at)
    asked = tuple(AskedTool(tool, f"call_{plain.id}_{k}") for k, tool in enumerate(tools))
    return call(name, prompt, sampled, at=at, asked=asked)


def chain(name: str, length: int, *tools: str) -> list[Call]:
    """Calls at seconds 0, 1, …, each prompt beginning with the call before: [1] 10 | 2 | 11 | 2 | 12 …

    Args: tools: what the answers ask for, a word or several a call, from the first call on
    """
    calls: list[Call] = []
    prompt = [1]
    for number in range(length):
        asked = tools[number].split() if number < len(tools) else []
        calls.append(asking(f"{name}{number}", prompt, [10 + number], *asked, at=number))
        prompt = [*prompt, 10 + number, 2]
    return calls


def span(tool: str, status: str = "ok", *, at: float, seconds: float = 0.1, **columns: Any) -> ToolSpan:
    """A tool span without ids that began `at` seconds."""
    values: dict[str, Any] = {
        "span_id": f"{int(at * 1000):08x}{int(seconds * 1000):08x}",
        "parent_span_id": None,
        "scope": "agent",
        "tool": tool,
        "status": status,
        "tool_call_id": None,
        "response_id": None,
        "start_ns": int(at * SECOND),
        "end_ns": int((at + seconds) * SECOND),
    }
    return ToolSpan(**{**values, **columns})


def rollout(name: str, outcome: float, calls: list[Call], *spans: ToolSpan) -> Rollout:
    return Rollout(name, outcome, calls, list(spans))
