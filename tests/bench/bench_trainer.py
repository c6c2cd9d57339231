"""Throughput of the trainer on trees that share prefixes and on unrelated rows, and the memory of the loss.

Throughput counts the tokens of rollouts, each once, however often they are computed, and divides by the CPU time of one
thread. Gradients are compared with those of padded rows, one for each call.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from leyden.libs.contracts.config import PpoClip, RunConfig
from leyden.services.trainer.loss.objective import Terms, objective
from leyden.services.trainer.model.cpu.products import use_fast_products
from leyden.services.trainer.model.forward import Policy
from leyden.services.trainer.model.head import sampled_outputs
from leyden.services.trainer.rows.batch import Sample, trained_tokens, weights_of
from leyden.services.trainer.step.batch import Batch, Computed
from leyden.services.trainer.step.gradients import accumulate_gradients
from leyden.services.trainer.step.learner import Learner
from leyden.services.trainer.step.optimizers import make_optimizer
from tests.bench.rows import Row

PROMPT, CALLS, ANSWER, RESULT, SIBLINGS = 2000, 10, 200, 300, 8
ROWS, MEDIAN_TOKENS, SIGMA, MOST_TOKENS = 48, 200, 0.8, 2048
VOCABULARY = 4096
PACK_TOKENS = 1024
TEMPERATURE = 0.8
ALGORITHM = PpoClip()
LOSS_TOKENS, LOSS_HIDDEN, LOSS_VOCABULARY = 1024, 64, 151_936


@dataclass(frozen=True)
class PlainRow:
    """A row of a plain trainer: token ids, and the positions and numbers (within K) of the trained tokens in it."""

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int64]
    tokens_k: NDArray[np.int64]


def rows(repeats: int) -> list[Row]:
    """Forward and backward of agents' rollouts and of unrelated rows, and the memory of the loss."""
    torch.set_num_threads(1)
    check = agent_samples(SIBLINGS, scale=8)
    of_check = [call for sample in calls_of(check) for call in sample]
    _same(_gradients(lambda model: shared(model, check)), _gradients(lambda model: padded(model, check, of_check, 5)))
    model, siblings = make_model(), agent_samples(SIBLINGS)
    trees = [useful(siblings) / _seconds(lambda: shared(model, siblings)) for _ in range(repeats)]
    packs = []
    for repeat in range(repeats):
        samples = unrelated_samples(ROWS, seed=repeat)
        packs.append(useful(samples) / _seconds(lambda s=samples: shared(model, s)))
    work = f"{SIBLINGS} siblings of {CALLS} calls, each token counted once"
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        peaks = [pool.apply(loss_peak_megabytes) for _ in range(repeats)]
    loss = f"memory of the loss, {LOSS_TOKENS:,} tokens, vocabulary {LOSS_VOCABULARY:,}"
    return [
        Row("trainer", work, "tokens a CPU second", trees, at_least=5500),
        Row("trainer", f"{ROWS} unrelated rows of lognormal length", "tokens a CPU second", packs, at_least=5300),
        Row("trainer", loss, "MB", peaks, at_most=109),
    ]


def loss_peak_megabytes() -> float:
    """The peak of resident memory in forward and backward of the loss, above inputs and weights."""
    torch.set_num_threads(1)
    # The first products load the libraries' code.
    _loss(8, 128)().backward()
    forward = _loss(LOSS_TOKENS, LOSS_VOCABULARY)
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    forward().backward()
    return (status("VmHWM") - before) / 1e6


def _loss(tokens: int, vocabulary: int) -> Callable[[], torch.Tensor]:
    head = torch.nn.Linear(LOSS_HIDDEN, vocabulary, bias=False)
    hidden = torch.randn(tokens, LOSS_HIDDEN, requires_grad=True)
    temperatures, ids = torch.full((tokens,), TEMPERATURE), torch.randint(vocabulary, (tokens,))
    return lambda: sampled_outputs(head, hidden, temperatures, torch.arange(tokens), ids)[0].sum()


def status(name: str) -> int:
    """Bytes, from /proc."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def agent_samples(siblings: int, scale: int = 1) -> list[Sample]:
    """One group: a prompt that all share, then ten calls, each an answer and the result of its tool."""
    random = np.random.default_rng(0)
    prompt = random.integers(0, VOCABULARY, PROMPT // scale)
    call = np.repeat([True, False], [ANSWER // scale, RESULT // scale])
    mask = np.concatenate([np.zeros(len(prompt), bool), np.tile(call, CALLS)])
    return [
        _sample(
            f"run.0.{sibling}",
            np.concatenate([prompt, random.integers(0, VOCABULARY, len(mask) - len(prompt))]),
            mask,
            float(random.normal()),
        )
        for sibling in range(siblings)
    ]


def unrelated_samples(count: int, seed: int = 0) -> list[Sample]:
    """Rows that share nothing; the first quarter of each is its prompt."""
    random = np.random.default_rng(seed)
    lengths = np.clip(random.lognormal(np.log(MEDIAN_TOKENS), SIGMA, count), 16, MOST_TOKENS).astype(int)
    return [
        _sample(
            f"run.{number}.0",
            random.integers(0, VOCABULARY, length),
            np.arange(length) >= length // 4,
            float(random.normal()),
        )
        for number, length in enumerate(lengths)
    ]


def _sample(rollout: str, ids: NDArray[np.int64], mask: NDArray[np.bool_], advantage: float) -> Sample:
    return Sample(
        id=f"{rollout}:0",
        rollout_id=rollout,
        group_id=rollout.rpartition(".")[0],
        token_ids=ids.astype(np.int32),
        mask=mask,
        generator_logprobs=np.where(mask, -np.log(VOCABULARY), 0).astype(np.float32),
        advantages=np.where(mask, advantage, 0).astype(np.float32),
        temperatures=np.where(mask, TEMPERATURE, 1).astype(np.float32),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
    )


def useful(samples: Sequence[Sample]) -> int:
    """Tokens of the rollouts."""
    return sum(len(sample.token_ids) for sample in samples)


def calls_of(samples: Sequence[Sample]) -> list[list[PlainRow]]:
    """For each sample a row for each of its calls: the answer with everything before it."""
    found, before = [], 0
    for sample in samples:
        trained = np.flatnonzero(sample.mask)
        answers = np.split(trained, np.flatnonzero(np.diff(trained) > 1) + 1)
        numbers = np.split(np.arange(before, before + len(trained)), np.cumsum([len(a) for a in answers])[:-1])
        found.append([PlainRow(sample.token_ids[: a[-1] + 1], a, n) for a, n in zip(answers, numbers, strict=True)])
        before += len(trained)
    return found


def make_model() -> LlamaForCausalLM:
    """Two layers whose attention, products and head share the time about as SmolLM2-135M's thirty do."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=192, intermediate_size=768, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=8192, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=None, attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    use_fast_products(model)
    return model


def shared(model: LlamaForCausalLM, samples: Sequence[Sample]) -> None:
    """Adds the gradients of the samples' loss as the trainer computes it."""
    accumulated(Policy(model), samples, PACK_TOKENS, Accelerator(cpu=True))


def accumulated(policy: Policy, samples: Sequence[Sample], pack_tokens: int, accelerator: Accelerator) -> Computed:
    """The trainer's pass over samples, in packs of `pack_tokens`."""
    document = {
        "name": "n",
        "dataset": "d",
        "agent": {"command": ["x"]},
        "training": {"micro_batch_tokens": pack_tokens},
    }
    config = RunConfig.model_validate(document).model_copy(update={"algorithm": ALGORITHM})
    learner = Learner(policy, make_optimizer(policy, config.optimizer), accelerator)
    return accumulate_gradients(learner, Batch(samples), config)


def padded(model: PreTrainedModel, samples: Sequence[Sample], plain: Sequence[PlainRow], at_once: int) -> None:
    """Adds the gradients of the same loss as a plain trainer does: batches of complete rows, logits at every position.

    Rows end in padding; causal attention needs no mask for the tokens behind a row's end.
    """
    model.set_attn_implementation("sdpa")
    tokens, device = trained_tokens(samples), model.device
    weights_K = weights_of(tokens, ALGORITHM.weighting)
    for begin in range(0, len(plain), at_once):
        batch = plain[begin : begin + at_once]
        input_ids = np.zeros((len(batch), max(len(row.token_ids) for row in batch)), np.int64)
        for number, row in enumerate(batch):
            input_ids[number, : len(row.token_ids)] = row.token_ids
        logits = model(input_ids=torch.from_numpy(input_ids).to(device), use_cache=False).logits
        logprobs = (logits / TEMPERATURE).log_softmax(-1)
        rows_k = np.repeat(np.arange(len(batch)), [len(row.positions) for row in batch])
        positions_k = np.concatenate([row.positions for row in batch])
        tokens_k = np.concatenate([row.tokens_k for row in batch])
        terms = Terms(
            torch.from_numpy(tokens.generator_logprobs_K[tokens_k]).to(device),
            torch.from_numpy(tokens.advantages_K[tokens_k]).to(device),
            torch.from_numpy(weights_K[tokens_k]).float().to(device),
            torch.from_numpy(rows_k).to(device),
        )
        sampled_k = logprobs[rows_k, positions_k - 1, input_ids[rows_k, positions_k]]
        objective(ALGORITHM, sampled_k, terms).loss.backward()


def _seconds(work: Callable[[], None]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _gradients(work: Callable[[LlamaForCausalLM], None]) -> list[torch.Tensor]:
    model = make_model()
    work(model)
    return [parameter.grad for parameter in model.parameters()]


def _same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Raises: AssertionError: gradients differ by more than float32 explains"""
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5 * float(other.abs().max()))
