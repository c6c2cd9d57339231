"""Answers the first calls of a re-roll from the record of the rollout that it repeats."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from leyden.libs.contracts.states import DIVERGED
from leyden.libs.store.records.recorded import RecordedRequest
from leyden.services.gateway.calls.context import Answer, CallContext, ModelRequest, SampledTokens
from leyden.services.gateway.errors import BadRequest
from leyden.services.gateway.prompt.prefix import IndexedPrompt
from leyden.services.gateway.prompt.stored import answer_of
from leyden.services.gateway.prompt.template import ChatModel
from leyden.services.gateway.samplers.base import Answered, Sampler


class ReplayedSampler:
    """A Sampler that asks no engine: `live` renders the prompt, and the record has the answer to it.

    The request has to be the recorded one: as many choices, the same temperature and the same prompt, token for token.
    Without tokens, as before another provider's model, the conversation has to be the same.
    """

    def __init__(self, live: Sampler, recorded: RecordedRequest) -> None:
        self.request: ModelRequest = live.request
        self.chat: ChatModel = live.chat
        self.indexed: IndexedPrompt = live.indexed
        self.constraint: dict[str, str] = live.constraint
        self._live = live
        self._recorded = recorded

    async def sample(
        self, context: CallContext, choices: Sequence[SampledTokens], progressed: Callable[[], None]
    ) -> None:
        """Fills the choices with the recorded tokens. Raises: BadRequest: the request is another one."""
        if not self._is_repeated(context):
            raise BadRequest(
                f"Request {self._recorded.number} of this re-roll differs from the recorded one: the agent or its tools"
                " are not deterministic, or its requests overlap (credit.baseline.type 'monte_carlo').",
                code=DIVERGED,
            )
        now = time.perf_counter()
        for choice, row in zip(choices, self._recorded.choices, strict=True):
            choice.ids += np.frombuffer(row.sampled_ids, "<i4").tolist()
            choice.logprobs += np.frombuffer(row.generator_logprobs, "<f4").tolist()
            choice.policy_versions += np.frombuffer(row.policy_versions, "<i4").tolist()
            choice.finish = "length" if row.finish_reason == "length" else "stop"
            if row.written_ids is not None:
                choice.written_ids = np.frombuffer(row.written_ids, "<i4")
            choice.accepted_at = choice.first_token_at = choice.ended_at = now
        progressed()

    def answered(self, context: CallContext, choices: Sequence[SampledTokens]) -> Answered:
        """The recorded answers: their tool calls have the recorded ids, which later requests repeat."""
        answers = [answer_of(self.chat, context.request, row) for row in self._recorded.choices]
        return Answered(answers, len(context.prompt.ids), sum(len(choice.ids) for choice in choices))

    def remember(self, context: CallContext, choices: Sequence[SampledTokens], answers: Sequence[Answer]) -> None:
        """Lets later prompts continue the answers, as those of a rollout that was sampled."""
        self._live.remember(context, choices, answers)

    def _is_repeated(self, context: CallContext) -> bool:
        rows, full, prompt = self._recorded.choices, self._recorded.full, context.prompt
        if full is None or len(rows) != context.request.choices or rows[0].temperature != context.temperature:
            return False
        if not len(prompt.ids):
            return not full.prompt_ids and full.turns == context.request.turns
        return np.array_equal(prompt.ids, np.frombuffer(full.prompt_ids, "<i4"))
