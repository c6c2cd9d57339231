"""Samples tokens from logits, for a full batch at once.

Reported log-probabilities are SGLang's: log_softmax(logits / temperature) after penalties, bias, minimum length and the
grammar's mask, and before top-k, top-p and min-p remove tokens. Temperature 0 is greedy, reported at temperature 1.

Legend: M sequences, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from llguidance import LLMatcher
from torch import Tensor

from leyden.services.engine.request import SamplingParams

# Size of a block of the vocabulary: the sampler finds the block first, then the token in it.
_BLOCK = 512

_LEAST = torch.finfo(torch.float32).min
"""SGLang's log-probability of a token that the grammar forbids: JSON has no infinity."""

TokenLogprobs = list[tuple[float, int]]


@dataclass
class Draw:
    """The sampling parameters of one sequence, and its seed if it has one; `prompt_tokens` counts with a seed alone."""

    sampling: SamplingParams
    end_ids: frozenset[int]
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    seed: int | None = None
    prompt_tokens: int = 0
    matcher: LLMatcher | None = None

    @property
    def position(self) -> int:
        """Number of tokens before the next one, in prompt and output."""
        return self.prompt_tokens + len(self.output_ids)


@dataclass(frozen=True)
class Drawn:
    """One sampled token. `top` and `chosen` hold (log-probability, token id) if requested."""

    token_id: int
    logprob: float
    top: TokenLogprobs
    chosen: TokenLogprobs


class Sampler:
    """Samples batches; sequences without a seed share one generator."""

    def __init__(self, seed: int | None = None) -> None:
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)

    def sample(self, logits: Tensor, draws: Sequence[Draw]) -> list[Drawn]:
        """Samples one token for each row of [M, V] logits; overwrites the logits."""
        for row, draw in enumerate(draws):
            if draw.sampling.reshapes:
                _reshape(logits[row], draw)
            if draw.matcher is not None:
                allowed = torch.frombuffer(bytearray(draw.matcher.compute_logit_bias()), dtype=torch.uint8)
                logits[row].masked_fill_(allowed == 0, -torch.inf)
        divisors = [draw.sampling.divisor for draw in draws]
        if any(divisor != 1.0 for divisor in divisors):
            logits.div_(torch.tensor(divisors).unsqueeze(1))
        logits.sub_(logits.amax(-1, keepdim=True))
        weights = torch.exp(logits)
        norms = weights.sum(-1).log_()
        tokens = self._choose(logits, weights, draws)
        logprobs = logits.gather(1, tokens.unsqueeze(1)).squeeze(1) - norms
        for token, draw in zip(tokens.tolist(), draws, strict=True):
            if draw.matcher is not None:
                draw.matcher.consume_token(token)
        return [
            Drawn(token, logprob, *_asked_logprobs(logits[row], float(norms[row]), draw))
            for row, (token, logprob, draw) in enumerate(zip(tokens.tolist(), logprobs.tolist(), draws, strict=True))
        ]

    def _choose(self, logits: Tensor, weights: Tensor, draws: Sequence[Draw]) -> Tensor:
        tokens = torch.empty(len(draws), dtype=torch.int64)
        kinds = [0 if draw.sampling.greedy else 1 + draw.sampling.truncates for draw in draws]
        greedy, plain, truncated = (torch.tensor([i for i, k in enumerate(kinds) if k == kind]) for kind in range(3))
        if len(greedy):
            tokens[greedy] = logits[greedy].argmax(-1)
        if len(plain):
            chosen = weights if len(plain) == len(draws) else weights[plain]
            tokens[plain] = _invert(chosen, self._uniforms([draws[i] for i in plain.tolist()]))
        if len(truncated):
            some = [draws[i] for i in truncated.tolist()]
            tokens[truncated] = _choose_truncated(weights[truncated], some, self._uniforms(some))
        return tokens

    def _uniforms(self, draws: Sequence[Draw]) -> Tensor:
        """Draws [M] float64 numbers in [0, 1); those of a sequence with a seed depend on it and the position alone."""
        uniforms = torch.rand(len(draws), dtype=torch.float64, generator=self._generator)
        seeded = {
            row: seeded_uniform(draw.seed, draw.position) for row, draw in enumerate(draws) if draw.seed is not None
        }
        if seeded:
            uniforms[list(seeded)] = torch.tensor(list(seeded.values()), dtype=torch.float64)
        return uniforms


def seeded_uniform(seed: int, position: int) -> float:
    """Returns a seed's number in [0, 1), a multiple of 2^-53, for the token at a position in prompt and output.

    Why: a client that continues an answer sends the begun part as prompt, and gets the tokens that it would have got
    without the cut. SGLang's deterministic inference depends on seed and position, too.
    """
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) / 2**53


def logprobs_of(logits: Tensor, token_ids: Sequence[int]) -> list[float]:
    """Returns the log-probability of one token per row of [M, V] logits, without temperature, as SGLang for prompts."""
    picked = logits.gather(1, torch.tensor(token_ids).unsqueeze(1)).squeeze(1)
    listed: list[float] = (picked - logits.logsumexp(-1)).tolist()
    return listed


def top_logprobs_of(logits: Tensor, count: int) -> list[TokenLogprobs]:
    """Returns the `count` most likely tokens per row of [M, V] logits, most likely first."""
    values, ids = (logits - logits.logsumexp(-1, keepdim=True)).topk(count)
    return [list(zip(*pair, strict=True)) for pair in zip(values.tolist(), ids.tolist(), strict=True)]


def _asked_logprobs(shifted: Tensor, norm: float, draw: Draw) -> tuple[TokenLogprobs, TokenLogprobs]:
    top: TokenLogprobs = []
    if draw.top_logprobs_num:
        values, ids = shifted.topk(draw.top_logprobs_num)
        top = list(zip(_finite(values - norm), ids.tolist(), strict=True))
    chosen = draw.token_ids_logprob
    return top, list(zip(_finite(shifted[chosen] - norm), chosen, strict=True)) if chosen else []


def _finite(logprobs: Tensor) -> list[float]:
    finite: list[float] = logprobs.clamp(min=_LEAST).tolist()
    return finite


def _reshape(logits: Tensor, draw: Draw) -> None:
    """Applies penalties over the output, bias, and the minimum length, in SGLang's order."""
    sampling = draw.sampling
    counts = Counter(draw.output_ids)
    if counts:
        seen, times = torch.tensor(list(counts)), torch.tensor(list(counts.values()), dtype=logits.dtype)
        values = logits[seen] - sampling.frequency_penalty * times - sampling.presence_penalty
        factor = sampling.repetition_penalty
        logits[seen] = torch.where(values < 0, values * factor, values / factor)
    for token, bias in sampling.logit_bias.items():
        logits[int(token)] += bias
    if len(draw.output_ids) < sampling.min_new_tokens:
        logits[list(draw.end_ids | set(sampling.stop_token_ids))] = -torch.inf


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draws [M] indices, each with probability proportional to its weight in [M, V], by inverting the cumulative sum.

    Why: it sums the blocks and then the entries of the selected block, in float64. `torch.multinomial` draws a random
    number for each entry of the vocabulary, which takes longer than computing the logits.
    """
    rows, size = weights.shape
    blocks = -(-size // _BLOCK)
    if blocks * _BLOCK != size:
        weights = torch.nn.functional.pad(weights, (0, blocks * _BLOCK - size))
    blocked = weights.view(rows, blocks, _BLOCK)
    ends = blocked.sum(-1).double().cumsum(-1)
    target = (uniforms * ends[:, -1]).unsqueeze(1)
    block = torch.searchsorted(ends, target, right=True).clamp_(max=blocks - 1)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp_(min=0)), 0.0)
    inside = blocked[torch.arange(rows), block.squeeze(1)].double()
    sums = inside.cumsum(-1)
    # The block's sum differs from `ends` by rounding: scaling the target keeps it below the block's last weight.
    extent = (ends.gather(1, block) - before).clamp_(min=torch.finfo(torch.float64).tiny)
    share = ((target - before) / extent).clamp_(0.0, 1.0 - 2**-40)
    token = torch.searchsorted(sums, share * sums[:, -1:], right=True).clamp_(max=_BLOCK - 1)
    return (block * _BLOCK + token).squeeze(1)


def _choose_truncated(weights: Tensor, draws: Sequence[Draw], uniforms: Tensor) -> Tensor:
    """Draws among the tokens that top-k, top-p and min-p leave; each filter uses all tokens, as in SGLang."""
    ordered, ids = weights.sort(dim=-1, descending=True)
    ordered = ordered.double()
    ordered /= ordered.sum(-1, keepdim=True)
    limits = [d.sampling.top_k if d.sampling.top_k > 0 else weights.shape[-1] for d in draws]
    top_k = torch.tensor(limits).unsqueeze(1)
    top_p = torch.tensor([d.sampling.top_p for d in draws], dtype=torch.float64).unsqueeze(1)
    min_p = torch.tensor([d.sampling.min_p for d in draws], dtype=torch.float64).unsqueeze(1)
    dropped = (torch.arange(weights.shape[-1]) >= top_k) | (ordered.cumsum(-1) - ordered > top_p)
    ordered[dropped | (ordered < ordered[:, :1] * min_p)] = 0.0
    return ids.gather(1, _invert(ordered, uniforms).unsqueeze(1)).squeeze(1)
