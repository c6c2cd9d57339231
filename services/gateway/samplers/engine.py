"""Samples from the engines of a pool: the answers are tokens of the policy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from leyden.services.gateway.calls.context import Answer, Attempt, CallContext, ModelRequest, Prompt, SampledTokens
from leyden.services.gateway.engine.client import EngineClient
from leyden.services.gateway.engine.sglang import EngineRequest
from leyden.services.gateway.errors import BadRequest, ContextOverflow
from leyden.services.gateway.prompt.answer import end_at_stop, finish_answer
from leyden.services.gateway.prompt.constraint import decoding_constraint
from leyden.services.gateway.prompt.models import ServedModel
from leyden.services.gateway.prompt.prefix import IndexedPrompt
from leyden.services.gateway.prompt.stored import StoredCalls
from leyden.services.gateway.prompt.template import ChatModel
from leyden.services.gateway.samplers.base import Answered


async def render(
    served: ServedModel, stored: StoredCalls, attempt: Attempt, request: ModelRequest, policy_id: str
) -> IndexedPrompt:
    """Returns the prompt of a request, which continues the attempt's calls of the policy. Raises: GatewayError."""
    return await served.prefixes.prompt(
        (attempt.key, policy_id), request, lambda known: stored.calls(attempt, known, policy_id)
    )


@dataclass(frozen=True, slots=True)
class EngineSampler:
    """A Sampler of one pool."""

    engines: EngineClient
    served: ServedModel
    request: ModelRequest
    indexed: IndexedPrompt
    constraint: dict[str, str]

    @classmethod
    async def prepare(
        cls,
        engines: EngineClient,
        served: ServedModel,
        stored: StoredCalls,
        attempt: Attempt,
        request: ModelRequest,
        policy_id: str,
    ) -> EngineSampler:
        """Renders the prompt. Raises: GatewayError: it holds tokens that the model does not know."""
        if attempt.is_greedy:
            request = replace(request, sampling=replace(request.sampling, temperature=0.0))
        indexed = await render(served, stored, attempt, request, policy_id)
        request = replace(request, turns=indexed.conversation.turns)
        check_vocabulary(served.chat, request, indexed.prompt)
        return cls(engines, served, request, indexed, decoding_constraint(served.chat, request))

    @property
    def chat(self) -> ChatModel:
        """The template and the tokenizer of the model."""
        return self.served.chat

    async def sample(
        self, context: CallContext, choices: Sequence[SampledTokens], progressed: Callable[[], None]
    ) -> None:
        """Samples all choices at once. Raises: ContextOverflow: no room is left for an answer."""
        asked = engine_request(
            self.served,
            context.request,
            context.prompt,
            (context.policy_id, context.attempt.rollout_id),
            context.temperature,
            context.constraint,
            context.routed_from,
        )
        try:
            async with asyncio.TaskGroup() as group:
                for choice in choices:
                    group.create_task(self.engines.sample(asked, choice, progressed))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        for choice in choices:
            end_at_stop(self.chat, context.request, choice)

    def answered(self, context: CallContext, choices: Sequence[SampledTokens]) -> Answered:
        """Reads the answers from the tokens."""
        answers = [finish_answer(self.chat, context.request, context.prompt, choice) for choice in choices]
        return Answered(answers, len(context.prompt.ids), sum(len(choice.ids) for choice in choices))

    def remember(self, context: CallContext, choices: Sequence[SampledTokens], answers: Sequence[Answer]) -> None:
        """Indexes the answers to a conversation; a raw prompt has none."""
        if context.request.raw_prompt is not None:
            return
        # Agents continue the first choice: it is indexed last, so that it replaces a later choice with the same text.
        for choice, answer in reversed(list(zip(choices, answers, strict=True))):
            self.served.prefixes.remember(
                (context.attempt.key, context.policy_id), choice.call_id, self.indexed, answer.turn, choice.ids
            )


def engine_request(
    served: ServedModel,
    request: ModelRequest,
    prompt: Prompt,
    place: tuple[str, str],
    temperature: float,
    constraint: Mapping[str, str] = MappingProxyType({}),
    routed_from: int | None = None,
) -> EngineRequest:
    """Returns what an engine is asked for.

    Args: place: the policy, and the rollout or another name by which calls find the same engine again
    Raises: ContextOverflow: no room is left for an answer
    """
    tokenizer = served.chat.tokenizer
    # Engines reserve one place of the context for themselves.
    room = tokenizer.context_length - 1 - len(prompt.ids)
    if room < 1:
        raise ContextOverflow(tokenizer.context_length, len(prompt.ids))
    return EngineRequest(
        run_id=place[0],
        rollout_id=place[1],
        pool=served.pool,
        prompt_ids=prompt.ids,
        sampling=request.sampling,
        temperature=temperature,
        max_tokens=min(request.sampling.max_tokens or room, room),
        vocab_size=tokenizer.vocab_size,
        top_logprobs=request.top_logprobs,
        eos_ids=sorted(tokenizer.eos_ids),
        stream=request.stream,
        constraint=dict(constraint),
        routed_from=routed_from,
    )


def check_vocabulary(model: ChatModel, request: ModelRequest, prompt: Prompt) -> None:
    """Raises: BadRequest: prompt or logit_bias names a token that the model does not know."""
    # SGLang crashes on a token id beyond the vocabulary.
    size = model.tokenizer.vocab_size
    if prompt.ids.min(initial=0) < 0 or prompt.ids.max(initial=0) >= size:
        raise BadRequest("The messages hold a token that the model does not know.", param="messages")
    for token in request.sampling.logit_bias:
        if not (token.isascii() and token.isdecimal() and len(token) < 10 and int(token) < size):
            raise BadRequest(
                f"logit_bias names token '{token[:20]}', but ids go from 0 to {size - 1}.",
                param="logit_bias",
                code="invalid_value",
            )
