"""The model's side of one call: an engine of the run's pool, or another provider."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from leyden.services.gateway.calls.context import Answer, CallContext, ModelRequest, SampledTokens
from leyden.services.gateway.prompt.prefix import IndexedPrompt
from leyden.services.gateway.prompt.template import ChatModel


class Answered(NamedTuple):
    """The answers of the choices, and the tokens of prompt and answers."""

    answers: list[Answer]
    prompt_tokens: int
    completion_tokens: int


class Sampler(Protocol):
    """Makes the prompt, the tokens and the answer of one call."""

    @property
    def request(self) -> ModelRequest:
        """The request as it is sampled."""

    @property
    def chat(self) -> ChatModel:
        """The template and the tokenizer that answers are read with."""

    @property
    def indexed(self) -> IndexedPrompt:
        """The prompt, and how it continues an earlier call."""

    @property
    def constraint(self) -> dict[str, str]:
        """SGLang's parameter with the grammar of the answer, or nothing."""

    async def sample(
        self, context: CallContext, choices: Sequence[SampledTokens], progressed: Callable[[], None]
    ) -> None:
        """Fills the choices. Raises: GatewayError."""

    def answered(self, context: CallContext, choices: Sequence[SampledTokens]) -> Answered:
        """Returns the answers, once the choices are sampled."""

    def remember(self, context: CallContext, choices: Sequence[SampledTokens], answers: Sequence[Answer]) -> None:
        """Lets later prompts continue the answers, once they are recorded."""
