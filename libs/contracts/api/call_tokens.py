"""The tokens of a model call, by windows."""

from __future__ import annotations

from leyden.libs.contracts.api.body import Body


class CallToken(Body):
    """A token of a call: of its prompt, or sampled."""

    position: int
    """From 0, the first token of the prompt."""
    id: int
    text: str | None
    """Its text alone, where the API can read the tokenizer of the weights; bytes that are no complete character are
    "\ufffd"."""
    sampled: bool
    logprob: float | None
    """Natural log of the probability with which the engine sampled it; null in the prompt."""
    trainer_logprob: float | None = None
    """The same by the trainer's weights at the beginning of the step that trained it, version `step` - 1; null unless
    it trains, and where the step did not compute or record it."""
    trainer_entropy: float | None = None
    """The entropy in nats, at the sampling temperature, of the distribution that those weights have in its place; null
    as `trainer_logprob` is."""
    policy_version: int | None
    """The version that sampled it; null in the prompt."""
    trains: bool | None
    """Whether it is in the loss; null while credit has not decided."""
    advantage: float | None
    """Its weight in the loss; null unless it trains."""


class CallTokens(Body):
    """A window of the tokens of a call."""

    call_id: str
    prompt_tokens: int
    completion_tokens: int
    start: int
    """The position of the first token of the window."""
    tokens: list[CallToken]
    reason: str | None
    """Why no sampled token of the call trains, or none has yet; null where some do. A sampled token that does not train
    in a call of which others do is one that a grammar forced."""
    step: int | None
    """The optimiser step that trained them."""
    missing_parent: str | None = None
    """Why tokens of the prompt are not shown: an earlier call is not in the store."""
