"""Memory of the loss: what reading log-probabilities and sending gradients back needs at most, beside whole logits."""

from __future__ import annotations

import ctypes
import multiprocessing
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from leyden.services.trainer.head import sampled_logprobs
from tests.bench.rows import Goal, Growth, Row

HIDDEN = 64
SIZES = (256, 1024, 4096)
TOKENS = 1024
VOCABULARIES = (49_152, 151_936)

Read = Callable[[nn.Linear, Tensor, Tensor, Tensor, Tensor], Tensor]


def rows(repeats: int) -> list[Row]:
    """A row for each vocabulary; every repeat is a process of its own."""
    for vocabulary in VOCABULARIES:
        _check(vocabulary)
    reads = (sampled_logprobs, plain_logprobs)
    cases = [(read, TOKENS, vocabulary) for vocabulary in VOCABULARIES for read in reads]
    growing = [(sampled_logprobs, tokens, vocabulary) for vocabulary in VOCABULARIES for tokens in SIZES]
    # Forked from here, a process would begin with what this one holds.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        measured = [pool.apply(peaks_megabytes, [cases]) for _ in range(repeats)]
        grown = pool.apply(peaks_megabytes, [growing])
    return [
        Row(
            part="loss",
            name=f"memory of the loss, vocabulary {vocabulary:,}",
            unit=f"MB at most, {TOKENS:,} tokens",
            repeats=[peaks[2 * number] for peaks in measured],
            baseline_name="whole logits",
            baseline=[peaks[2 * number + 1] for peaks in measured],
            # The gradient of the head's weights, and a chunk of logits with its copies.
            goal=Goal(at_most=round(vocabulary * HIDDEN * 4 / 1e6 + 64)),
            growth=Growth("tokens", "MB at most", SIZES, grown[number * len(SIZES) : (number + 1) * len(SIZES)]),
            note=f"Forward and backward, hidden size {HIDDEN}; inputs and weights not counted. Gradients compared.",
        )
        for number, vocabulary in enumerate(VOCABULARIES)
    ]


def peaks_megabytes(cases: Sequence[tuple[Read, int, int]]) -> list[float]:
    """Per case (how to read, tokens, vocabulary) the highest resident memory above what inputs and weights take."""
    torch.set_num_threads(1)
    # The first products load the libraries' code.
    plain_logprobs(*_case(8, 128)).sum().backward()
    sampled_logprobs(*_case(8, 128)).sum().backward()
    return [_peak_megabytes(*case) for case in cases]


def _peak_megabytes(read: Read, tokens: int, vocabulary: int) -> float:
    columns = _case(tokens, vocabulary)
    # What the case before freed would be used again, and not be seen.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    read(*columns).sum().backward()
    return (_status("VmHWM") - before) / 1e6


def plain_logprobs(
    head: nn.Linear, hidden_U_H: Tensor, temperatures_U: Tensor, rows_K: Tensor, token_ids_K: Tensor
) -> Tensor:
    """What a plain trainer does."""
    return (head(hidden_U_H) / temperatures_U[:, None]).log_softmax(-1)[rows_K, token_ids_K]


def _case(tokens: int, vocabulary: int) -> tuple[nn.Linear, Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(HIDDEN, vocabulary, bias=False)
    hidden = torch.randn(tokens, HIDDEN, requires_grad=True)
    return head, hidden, torch.full((tokens,), 0.8), torch.arange(tokens), torch.randint(vocabulary, (tokens,))


def _check(vocabulary: int) -> None:
    """Raises where gradients differ by more than float32 explains."""
    gradients = []
    for read in (sampled_logprobs, plain_logprobs):
        columns = _case(SIZES[0], vocabulary)
        read(*columns).sum().backward()
        gradients.append((columns[0].weight.grad, columns[1].grad))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5 * float(other.abs().max()))


def _status(name: str) -> int:
    """Bytes, from /proc."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024
