"""One generation in flight: its request, its tokens so far, and its row of keys and values."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from torch import Tensor

from leyden.services.engine.adapters import Adapter
from leyden.services.engine.request import Prompt
from leyden.services.engine.rows import Row, TokenIds
from leyden.services.engine.sampling import Draw, Drawn, TokenLogprobs
from leyden.services.engine.text import StopStrings


@dataclass(frozen=True)
class Namespace:
    """Sequences share prefixes within a namespace: the same weights, adapter (0: none) and salt."""

    epoch: int
    salt: str
    adapter: int = 0


@dataclass(frozen=True)
class Finish:
    """The end of a generation in SGLang's terms: `matched` for stop, `message` for abort."""

    kind: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    message: str | None = None
    status_code: int | None = None


@dataclass(eq=False)
class Sequence:
    """A prompt and the tokens sampled after it.

    The scheduler's thread writes; the thread of the HTTP routes reads. `output_ids` grows last at each token, and
    `finish` is set after it: a reader that reads `finish` before `output_ids` sees all tokens of a finished sequence.
    """

    prompt: Prompt
    prompt_ids: TokenIds
    draw: Draw
    stops: StopStrings | None
    # The request's `rid`, which aborts all its n choices; each choice has an id of its own.
    group_rid: str
    # Set in the routes' thread when tokens or the end arrive.
    changed: asyncio.Event
    streams: bool = False
    adapter: Adapter | None = None

    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TokenLogprobs] = field(default_factory=list)
    chosen_logprobs: list[TokenLogprobs] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    input_logprobs: list[float] = field(default_factory=list)
    input_top_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish | None = None

    # The experts [n, L, chosen] of the computed tokens, in the pieces of the passes that computed them; none of a
    # dense model.
    experts: list[Tensor] = field(default_factory=list)

    namespace: Namespace | None = None
    row: Row | None = None
    # Number of leading tokens whose keys and values are in the row or its prefix.
    computed: int = 0
    cached_tokens: int = 0
    admitted: bool = False
    retractions: int = 0
    received_at: float = field(default_factory=time.monotonic)
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    finished_at: float | None = None

    @property
    def rid(self) -> str:
        return self.prompt.rid

    @property
    def output_ids(self) -> list[int]:
        return self.draw.output_ids

    @property
    def length(self) -> int:
        """Number of tokens in prompt and output."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def target(self) -> int:
        """Number of tokens that need keys and values before the next one can be sampled: all except the last."""
        return self.length - 1

    @property
    def max_length(self) -> int:
        """Length at which the generation must end."""
        return len(self.prompt_ids) + self.draw.sampling.max_new_tokens

    @property
    def last_id(self) -> int:
        return self.output_ids[-1] if self.output_ids else int(self.prompt_ids[-1])

    @property
    def needed_from(self) -> int:
        """First position whose hidden state the prompt's log-probabilities need; `target` when none are requested."""
        start = self.prompt.logprob_start_len
        if not self.prompt.return_logprob or start < 0 or self.input_logprobs:
            return self.target
        return min(start, self.target)

    def token_ids(self) -> TokenIds:
        """Prompt and output as one array."""
        return np.concatenate([self.prompt_ids, np.array(self.output_ids, np.int32)])

    def append(self, drawn: Drawn, version: str) -> None:
        """Appends a sampled token and sets `finish` when it is the last."""
        self.logprobs.append(drawn.logprob)
        self.top_logprobs.append(drawn.top)
        self.chosen_logprobs.append(drawn.chosen)
        self.versions.append(version)
        self.output_ids.append(drawn.token_id)
        self.last_token_at = time.monotonic()
        if self.first_token_at is None:
            self.first_token_at = self.last_token_at
        finish = self._finish_after(drawn.token_id)
        if finish is not None:
            self.end(finish)

    def end(self, finish: Finish) -> None:
        self.finished_at = time.monotonic()
        self.finish = finish

    def _finish_after(self, token_id: int) -> Finish | None:
        """Checks the ends in SGLang's order: a stop string, then a stop token, then the length."""
        sampling = self.draw.sampling
        if self.stops is not None and (matched := self.stops.matched(self.output_ids)) is not None:
            return Finish("stop", matched)
        if not sampling.ignore_eos and (token_id in self.draw.end_ids or token_id in sampling.stop_token_ids):
            return Finish("stop", token_id)
        return Finish("length") if self.length >= self.max_length else None
