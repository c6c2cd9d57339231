"""Model calls as the gateway hands them to the store, with the sizes of real ones: tokens, texts and times."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Sequence

import numpy as np

from leyden.libs.contracts import ids
from leyden.libs.contracts.conversation import Dialect, Turn
from leyden.libs.contracts.states import CallStatus, Continuation
from leyden.libs.store.records.calls import NewCall

VOCABULARY = 49_152
CHARACTERS_A_TOKEN = 4
_WORDS = [f"{n:x}".translate(str.maketrans("0123456789abcdef", "aeioutnshrdlcmpg")) for n in range(3000, 6000)]


def made_call(
    rng: random.Random,
    run_id: str,
    rollout_id: str,
    prompt: Sequence[int],
    sampled: Sequence[int],
    version: int = 0,
    *,
    parent: NewCall | None = None,
) -> NewCall:
    """A completed call whose texts are as long as its tokens say.

    Args: prompt: its tokens after all tokens of the parent
    """
    call_id = ids.new_call_id()
    draw = np.random.default_rng(rng.getrandbits(32))
    shared_tokens = parent.prompt_tokens + parent.completion_tokens if parent else 0
    text, half = _text(rng, len(prompt)), len(prompt) * CHARACTERS_A_TOKEN // 3
    return NewCall(
        run_id=run_id,
        id=call_id,
        rollout_id=rollout_id,
        attempt=1,
        request_id=call_id,
        choice=0,
        sequence=time.time_ns(),
        status=CallStatus.COMPLETED,
        trainable=True,
        untrainable_reason=None,
        masks_forced=False,
        request_sha256=hashlib.sha256(call_id.encode()).digest(),
        dialect=Dialect.CHAT_COMPLETIONS,
        request={"model": "policy", "temperature": 1.0, "max_tokens": len(sampled)},
        parent_call_id=parent.id if parent else None,
        shared_turns=parent.shared_turns + len(parent.turns) + 1 if parent else 0,
        shared_tokens=shared_tokens,
        turns=(Turn("system", text[:half]), Turn("user", text[half:])),
        tools=None if parent else (),
        answer=Turn("assistant", _text(rng, len(sampled))),
        prompt_ids=np.asarray(prompt, "<i4").tobytes(),
        sampled_ids=np.asarray(sampled, "<i4").tobytes(),
        generator_logprobs=(-draw.exponential(0.3, len(sampled))).astype("<f4").tobytes(),
        policy_versions=np.full(len(sampled), version, "<i4").tobytes(),
        prompt_tokens=shared_tokens + len(prompt),
        completion_tokens=len(sampled),
        cached_tokens=0,
        min_policy_version=version,
        max_policy_version=version,
        temperature=1.0,
        finish_reason="stop",
        trace_id=None,
        parent_span_id=None,
        agent="0" * 16,
        agent_name=None,
        role=None,
        continuation=Continuation.FRESH,
        queued_seconds=0.001,
        first_token_seconds=0.05,
        total_seconds=4.0,
    )


def lone_calls(run_id: str, rollout_id: str, count: int, prompt: int, sampled: int) -> list[NewCall]:
    """Calls without parents."""
    rng = random.Random(count)
    return [
        made_call(rng, run_id, rollout_id, random_tokens(rng, prompt), random_tokens(rng, sampled))
        for _ in range(count)
    ]


def conversation(
    rng: random.Random, run_id: str, rollout_id: str, *, calls: int, prompt: int, sampled: int, between: int = 50
) -> list[NewCall]:
    """Calls of one rollout, each prompt all that was said before and what `between` tokens of a tool answered.

    As the gateway stores them: each row holds what its call adds to its parent.
    """
    made = [made_call(rng, run_id, rollout_id, random_tokens(rng, prompt), random_tokens(rng, sampled))]
    for _ in range(calls - 1):
        added, answer = random_tokens(rng, between), random_tokens(rng, sampled)
        made.append(made_call(rng, run_id, rollout_id, added, answer, parent=made[-1]))
    return made


def random_tokens(rng: random.Random, count: int) -> list[int]:
    """Ids in the frequencies of words: few of them are most of a text (Zipf)."""
    draw = np.random.default_rng(rng.getrandbits(32))
    return [int(token) for token in np.minimum(draw.zipf(1.2, count), VOCABULARY) - 1]


def _text(rng: random.Random, tokens: int) -> str:
    words = " ".join(rng.choices(_WORDS, k=tokens * CHARACTERS_A_TOKEN // 4))
    return words[: tokens * CHARACTERS_A_TOKEN]
