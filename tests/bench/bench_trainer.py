"""Training throughput: trees that share beginnings, packed, beside one padded row per call in float32."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

from libs.contracts.config import PpoClip
from services.trainer.batch import Sample, TrainedTokens, trained_tokens, weights_of
from services.trainer.compute import accumulate_gradients
from services.trainer.forward import Policy
from services.trainer.objective import Terms, objective
from services.trainer.products import use_fast_products

GROUPS, SIBLINGS, PROMPT, QUESTION, TURNS, ANSWER, RESULT = 2, 4, 361, 30, 3, 10, 30
PACK_TOKENS = 512
ALGORITHM = PpoClip()


def rows() -> list[dict[str, object]]:
    """Useful tokens (those of the rows, however they are computed) per core-second; gradients must be equal."""
    # One thread and its CPU time: what else runs on the machine hardly moves the result.
    torch.set_num_threads(1)
    samples = agent_samples()
    tokens = trained_tokens(samples)
    useful = sum(len(sample.token_ids) for sample in samples)
    model, fast = _model(), _model()
    use_fast_products(fast, head=fast.get_output_embeddings())

    padded_seconds, padded_K = _timed(model, lambda: _padded(model, samples, tokens))
    shared_seconds, shared_K = _timed(model, lambda: _shared(model, samples, tokens))
    fast_seconds, fast_K = _timed(fast, lambda: _shared(fast, samples, tokens))
    for found in (shared_K, fast_K):
        _same(found, padded_K)
    baseline = useful / padded_seconds
    return [
        {
            "name": name,
            "value": useful / seconds,
            "unit": "useful tokens per core-second, forward and backward",
            "baseline_name": "one padded row per call",
            "baseline": baseline,
            "ratio": padded_seconds / seconds,
        }
        for name, seconds in (
            ("shared prefixes, packed", shared_seconds),
            ("shared prefixes, packed, oneDNN products", fast_seconds),
        )
    ]


def agent_samples() -> list[Sample]:
    """Rollouts as the flight agent makes them: one long prompt, a question per group, three answers and results."""
    random = np.random.default_rng(0)
    prompt = random.integers(0, 1000, PROMPT)
    samples = []
    for group in range(GROUPS):
        question = random.integers(0, 1000, QUESTION)
        for sibling in range(SIBLINGS):
            turns = random.integers(0, 1000, TURNS * (ANSWER + RESULT))
            ids = np.concatenate([prompt, question, turns]).astype(np.int32)
            mask = np.concatenate([np.zeros(PROMPT + QUESTION), np.tile([1] * ANSWER + [0] * RESULT, TURNS)]) > 0
            samples.append(_sample(f"run.{group}.{sibling}", ids, mask, float(random.normal())))
    return samples


def _sample(rollout: str, ids: np.ndarray, mask: np.ndarray, advantage: float) -> Sample:
    return Sample(
        id=f"{rollout}:0",
        rollout_id=rollout,
        group_id=rollout.rpartition(".")[0],
        token_ids=ids,
        mask=mask,
        generator_logprobs=np.where(mask, -7, 0).astype(np.float32),
        advantages=np.where(mask, advantage, 0).astype(np.float32),
        temperatures=np.where(mask, 0.8, 1).astype(np.float32),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
    )


def _model() -> LlamaForCausalLM:
    """SmolLM2-135M's layers, six of its thirty, with a small vocabulary."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=576, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def _shared(model: LlamaForCausalLM, samples: Sequence[Sample], tokens: TrainedTokens) -> None:
    accumulate_gradients(
        Policy(model),
        ALGORITHM,
        samples,
        tokens,
        weights_of(tokens, ALGORITHM.weighting),
        max_pack_tokens=PACK_TOKENS,
        accelerator=Accelerator(cpu=True),
    )


def _padded(model: LlamaForCausalLM, samples: Sequence[Sample], tokens: TrainedTokens) -> None:
    """What a plain trainer does: every row whole, logits at every position."""
    weights_K = weights_of(tokens, ALGORITHM.weighting)
    for number, sample in enumerate(samples):
        of_row = tokens.rows_K == number
        positions = np.flatnonzero(sample.mask)
        logits = model(input_ids=torch.from_numpy(sample.token_ids).long()[None]).logits[0] / 0.8
        logprobs = logits.log_softmax(-1)[positions - 1, sample.token_ids[positions]]
        terms = Terms(
            torch.from_numpy(tokens.generator_logprobs_K[of_row]),
            torch.from_numpy(tokens.advantages_K[of_row]),
            torch.from_numpy(weights_K[of_row]).float(),
            torch.zeros(len(positions), dtype=torch.int64),
        )
        objective(ALGORITHM, logprobs, terms).loss.backward()


def _timed(model: LlamaForCausalLM, work: Callable[[], None]) -> tuple[float, list[torch.Tensor]]:
    """The faster of two, and the gradients."""
    seconds = []
    for _ in range(2):
        model.zero_grad()
        began = time.process_time()
        work()
        seconds.append(time.process_time() - began)
    return min(seconds), [p.grad for p in model.parameters() if p.grad is not None]


def _same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Raises where gradients differ by more than float32 explains."""
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5 * float(other.abs().max()))
