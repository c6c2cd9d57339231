"""`make bench-gpu`: steps of the trainer on this machine's accelerator, beside padded rows, in one table.

The model has a Qwen2.5 model's shapes and random weights; the batch is groups of agents' rollouts that share their
prompts. A step is forward, backward and the optimiser's update. Where an accelerator is missing, `--device cpu --shape
tiny` tries the script itself.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from leyden.libs.contracts.config import Lora, Optimizer
from leyden.services.trainer.model.attention import Kernel
from leyden.services.trainer.model.forward import Policy
from leyden.services.trainer.model.lora import add_adapters
from leyden.services.trainer.rows.batch import Sample
from leyden.services.trainer.state.assembly import make_accelerator
from leyden.services.trainer.step.optimizers import make_optimizer
from tests.bench.bench_trainer import accumulated, agent_samples, calls_of, padded, useful

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
BEGIN, END = "<!-- figures: written by `make bench-gpu` -->\n", "<!-- end of the figures -->\n"
SHAPES = {
    # hidden, intermediate, layers, heads, key heads, vocabulary, tied
    "tiny": (64, 128, 2, 4, 2, 4096, True),
    "0.5B": (896, 4864, 24, 14, 2, 151_936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151_936, True),
    "3B": (2048, 11008, 36, 16, 2, 151_936, True),
}
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12}
"""Dense bfloat16 operations a second, by the makers' data sheets."""
CHECKED = 20
"""The check of gradients shortens prompts and answers by this factor."""


@dataclass(frozen=True)
class Case:
    """One way to make a step. pack_tokens: 0 for padded rows, one for each call."""

    name: str
    pack_tokens: int
    kernel: Kernel = "flex"
    lora: bool = False
    checkpointing: bool = False
    compiled: bool = False


@dataclass(frozen=True)
class Measured:
    """Seconds of each step after the first; tokens that the model computed in one; bytes at the peak."""

    case: Case
    seconds: Sequence[float]
    computed_tokens: int
    peak_bytes: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures every case; a case that runs out of memory is reported as such."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="0.5B", help="the model's size")
    parser.add_argument("--device", choices=["auto", "cpu"], default="auto")
    parser.add_argument("--steps", type=int, default=4, help="steps of each case; the first compiles and is left out")
    parser.add_argument("--siblings", type=int, default=8, help="rollouts of the group")
    parser.add_argument("--scale", type=int, default=1, help="shortens prompts and answers by this factor")
    parser.add_argument("--pack-tokens", type=int, default=16_384, help="training.micro_batch_tokens")
    parser.add_argument("--compile", action="store_true", help="add steps with training.compile")
    parser.add_argument("--page", action="store_true", help="write the table into docs/gpu.md")
    options = parser.parse_args(arguments)
    accelerator = make_accelerator(options.device, "bfloat16")
    if accelerator.device.type == "cpu" and options.device != "cpu":
        parser.error("this machine has no accelerator: --device cpu --shape tiny --scale 8 tries the script")
    check(accelerator, compiled=options.compile)
    samples = agent_samples(options.siblings, options.scale)
    text = table(options.shape, samples, list(measured(options, samples, accelerator)), accelerator)
    print(text)
    if options.page:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + BEGIN + "\n" + text + "\n" + END + rest.partition(END)[2])


def cases(pack_tokens: int, *, compiled: bool = False) -> list[Case]:
    """The rows of the table. compiled: with those of `training.compile`"""
    found = [
        Case("padded rows, one for each call", 0),
        Case("trees, dense mask", pack_tokens, kernel="dense"),
        Case("trees, FlexAttention", pack_tokens),
        Case("trees, FlexAttention, activation checkpointing", pack_tokens, checkpointing=True),
        Case("trees, FlexAttention, LoRA of rank 16", pack_tokens, lora=True),
    ]
    more = [replace(case, name=f"{case.name}, compiled", compiled=True) for case in found if case.pack_tokens]
    return found + (more if compiled else [])


def measured(
    options: argparse.Namespace, samples: Sequence[Sample], accelerator: Accelerator
) -> Sequence[Measured | tuple[Case, str]]:
    """The cases one after the other, each with a new model."""
    found: list[Measured | tuple[Case, str]] = []
    for case in cases(options.pack_tokens, compiled=options.compile):
        try:
            found.append(measure(case, make_model(options.shape), samples, accelerator, options.steps))
        except torch.OutOfMemoryError:
            found.append((case, "out of memory"))
        gc.collect()
        if accelerator.device.type == "cuda":
            torch.cuda.empty_cache()
    return found


def measure(
    case: Case, model: PreTrainedModel, samples: Sequence[Sample], accelerator: Accelerator, steps: int
) -> Measured:
    """Times steps of one case. Raises: torch.OutOfMemoryError"""
    cuda = accelerator.device.type == "cuda"
    if case.lora:
        add_adapters(model, Lora(rank=16, alpha=32), [], Path())
    model.to(accelerator.device)
    policy = Policy(model, activation_checkpointing=case.checkpointing, kernel=case.kernel, compiled=case.compiled)
    optimizer = make_optimizer(policy, Optimizer(learning_rate=1e-6))
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds, computed = [], 0
    for _ in range(steps):
        began = time.perf_counter()
        computed = gradients(case, policy, samples, accelerator)
        optimizer.step()
        optimizer.zero_grad()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return Measured(case, seconds[1:] or seconds, computed, torch.cuda.max_memory_allocated() if cuda else 0)


def gradients(case: Case, policy: Policy, samples: Sequence[Sample], accelerator: Accelerator) -> int:
    """Adds the gradients of the batch's loss; returns the number of tokens that the model computed."""
    if case.pack_tokens:
        return accumulated(policy, samples, case.pack_tokens, accelerator).computed_tokens
    total = 0
    for number, calls in enumerate(calls_of(samples)):
        # The weights of all samples, the rows of one: a batch of its calls.
        with accelerator.autocast():
            padded(policy.model, samples, calls, at_once=2)
        total += len(calls) * len(samples[number].token_ids)
    return total


def check(accelerator: Accelerator, *, compiled: bool = False) -> None:
    """Raises: AssertionError: in float32 trees and padded rows differ by more than rounding explains"""
    samples, found = agent_samples(2, CHECKED), []
    plain = Accelerator(cpu=True) if accelerator.device.type == "cpu" else Accelerator(mixed_precision="no")
    checked = [Case("padded", 0), Case("dense", 512, kernel="dense"), Case("flex", 512)]
    for case in [*checked, Case("flex, compiled", 512, compiled=True)] if compiled else checked:
        model = make_model("tiny").to(accelerator.device)
        gradients(case, Policy(model, kernel=case.kernel, compiled=case.compiled), samples, plain)
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for other in found[1:]:
        for name, gradient in found[0].items():
            assert gradient is not None
            torch.testing.assert_close(other[name], gradient, rtol=1e-2, atol=1e-3 * float(gradient.abs().max()))


def make_model(shape: str, seed: int = 0) -> PreTrainedModel:
    """A model of a Qwen2.5 model's shapes with random weights, float32."""
    hidden, intermediate, layers, heads, key_heads, vocabulary, tied = SHAPES[shape]
    torch.manual_seed(seed)
    config = Qwen2Config(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=key_heads, vocab_size=vocabulary, tie_word_embeddings=tied, max_position_embeddings=32_768,
        bos_token_id=None, eos_token_id=None, attn_implementation="sdpa",
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


def table(
    shape: str,
    samples: Sequence[Sample],
    rows: Sequence[Measured | tuple[Case, str]],
    accelerator: Accelerator,
) -> str:
    """Markdown."""
    cuda = accelerator.device.type == "cuda"
    device = torch.cuda.get_device_name() if cuda else "a CPU"
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in device), None)
    parameters = sum(parameter.numel() for parameter in make_model(shape).parameters())
    tokens = useful(samples)
    lines = [
        f"{device}, torch {torch.__version__}; Qwen2.5-{shape}'s shapes, {parameters / 1e6:,.0f} million parameters;"
        f" {len(samples)} rollouts of one group, {tokens:,} tokens.",
        "",
        "| step | seconds | tokens of rollouts a second | computed tokens | MFU | peak memory |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if not isinstance(row, Measured):
            lines.append(f"| {row[0].name} | {row[1]} | | | | |")
            continue
        median = statistics.median(row.seconds)
        # Six operations for each parameter and token (PaLM, appendix B), attention not counted.
        share = f"{6 * parameters * row.computed_tokens / median / peak:.0%}" if peak else ""
        memory = f"{row.peak_bytes / 2**30:.1f} GiB" if cuda else ""
        speed = f"{median:.2f} | {tokens / median:,.0f}"
        lines.append(f"| {row.case.name} | {speed} | {row.computed_tokens:,} | {share} | {memory} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
