"""`make bench-gpu`: steps of the trainer on this machine's accelerator, beside padded rows, in one table.

The model has a Qwen3 model's shapes and random weights; the batch is a group of agents' rollouts that share their
prompt. A step is forward, backward and the optimiser's update. Beside it stand padded rows, one for each call, and the
step of TRL's GRPO trainer, one padded row for each rollout, where TRL is installed. `run check` is the memory that
`leyden run check` computes for the case. Where an accelerator is missing, `--device cpu --shapes tiny --scale 8` tries
the script itself.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from leyden.libs.contracts.config import Lora, Optimizer, RunConfig
from leyden.libs.contracts.judgements import Models, Shape
from leyden.libs.contracts.judgements.memory import GB, Machine, Need, memory
from leyden.services.trainer.model.attention import Kernel
from leyden.services.trainer.model.forward import Policy
from leyden.services.trainer.model.held import hold_frozen
from leyden.services.trainer.model.lora import add_adapters
from leyden.services.trainer.rows.batch import Sample
from leyden.services.trainer.state.assembly import make_accelerator
from leyden.services.trainer.step.optimizers import make_optimizer
from tests.bench.bench_trainer import accumulated, agent_samples, calls_of, padded, useful

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
BEGIN, END = "<!-- figures: written by `make bench-gpu` -->\n", "<!-- end of the figures -->\n"
SHAPES = {
    # hidden, intermediate, layers, heads, key heads, head size, vocabulary, tied
    "tiny": (64, 128, 2, 4, 2, 16, 4096, True),
    "0.6B": (1024, 3072, 28, 16, 8, 128, 151_936, True),
    "1.7B": (2048, 6144, 28, 16, 8, 128, 151_936, True),
    "4B": (2560, 9728, 36, 32, 8, 128, 151_936, True),
    "8B": (4096, 12288, 36, 32, 8, 128, 151_936, False),
}
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12}
"""Dense bfloat16 operations a second, by the makers' data sheets."""
Step = Callable[[Sequence[Sample], Accelerator, int], int]
"""Adds the gradients of samples, in packs of so many tokens; returns the number of tokens that the model computed."""
CHECKED = 20
"""The check of gradients shortens prompts and answers by this factor."""
TREES, CALLS, TRL = "trees", "calls", "trl"


@dataclass(frozen=True)
class Case:
    """One way to make a step. rows: token trees, or padded rows: one for each call, or TRL's, one for each rollout."""

    name: str
    rows: str = TREES
    kernel: Kernel = "flex"
    lora: bool = False
    checkpointing: bool = False
    compiled: bool = False
    moments: str = "float32"


@dataclass(frozen=True)
class Measured:
    """Seconds of each step after the first; tokens that the model computed in one; bytes at the peak, and as computed
    by `run check`, None for padded rows."""

    shape: str
    case: Case
    seconds: Sequence[float]
    computed_tokens: int
    peak_bytes: int
    check_bytes: int | None


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures every case; a case that runs out of memory is reported as such."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu", description=__doc__)
    parser.add_argument(
        "--shapes", choices=SHAPES, default=["0.6B", "1.7B", "4B", "8B"], nargs="+", help="models' sizes"
    )
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
        parser.error("this machine has no accelerator: --device cpu --shapes tiny --scale 8 tries the script")
    # In a process of its own: accelerate knows one precision in each.
    checked = multiprocessing.get_context("spawn").Process(target=check, args=(options.device, options.compile))
    checked.start()
    checked.join()
    if checked.exitcode:
        sys.exit("the gradients of trees were not compared with those of padded rows: no figures")
    samples = agent_samples(options.siblings, options.scale)
    lines = heading(samples, accelerator)
    print("\n".join(lines), flush=True)
    for shape in options.shapes:
        for row in measured(shape, options, samples, accelerator):
            lines.append(line(row, useful(samples), accelerator))
            print(lines[-1], flush=True)
    if options.page:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + BEGIN + "\n" + "\n".join(lines) + "\n" + END + rest.partition(END)[2])


def cases(*, compiled: bool = False) -> list[Case]:
    """The rows of a shape. compiled: with those of `training.compile`"""
    found = [
        Case("padded rows, one for each call", CALLS, checkpointing=True),
        Case("TRL's step, one padded row for each rollout", TRL, checkpointing=True),
        Case("trees, dense mask", kernel="dense"),
        Case("trees, FlexAttention"),
        Case("trees, FlexAttention, activation checkpointing", checkpointing=True),
        Case("trees, FlexAttention, checkpointing, 8-bit moments", checkpointing=True, moments="8bit"),
        Case("trees, FlexAttention, checkpointing, LoRA of rank 16", lora=True, checkpointing=True),
    ]
    more = [replace(case, name=f"{case.name}, compiled", compiled=True) for case in found if case.rows == TREES]
    return found + (more if compiled else [])


def measured(
    shape: str, options: argparse.Namespace, samples: Sequence[Sample], accelerator: Accelerator
) -> Iterator[Measured | tuple[str, Case, str]]:
    """The cases one after the other, each with a new model; one that cannot fit is not tried."""
    cuda = accelerator.device.type == "cuda"
    room = torch.cuda.get_device_properties().total_memory if cuda else None
    for case in cases(compiled=options.compile):
        needed = needs(case, shape, options.pack_tokens)
        if room is not None and sum(need.size_bytes for need in needed if need.certain) > room:
            yield shape, case, "not tried: `run check` refuses it"
            continue
        try:
            yield measure(case, shape, samples, accelerator, options)
        except torch.OutOfMemoryError:
            yield shape, case, "out of memory"
        except ImportError as missing:
            yield shape, case, f"not tried: {missing}"
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()


def needs(case: Case, shape: str, pack_tokens: int) -> list[Need]:
    """What `run check` computes for a case on one GPU."""
    training: dict[str, Any] = {
        "micro_batch_tokens": pack_tokens,
        "activation_checkpointing": case.checkpointing,
        "attention": case.kernel,
    }
    if case.lora:
        training["lora"] = {"rank": 16, "alpha": 32}
    document = {
        "name": "n",
        "dataset": "d",
        "agent": {"command": ["x"]},
        "training": training,
        "optimizer": {"moments": case.moments},
    }
    found = Shape.of(config_of(shape).to_dict())
    assert found is not None
    return [
        need for need in memory(RunConfig.model_validate(document), Models(found), Machine()) if need.place == "gpu"
    ]


def measure(
    case: Case, shape: str, samples: Sequence[Sample], accelerator: Accelerator, options: argparse.Namespace
) -> Measured:
    """Times steps of one case. Raises: torch.OutOfMemoryError"""
    cuda, model = accelerator.device.type == "cuda", make_model(shape, device=accelerator.device)
    if case.lora:
        add_adapters(model, Lora(rank=16, alpha=32), [], Path())
        hold_frozen(model, model.get_input_embeddings().weight)
    model.to(accelerator.device)
    policy = Policy(model, activation_checkpointing=case.checkpointing, kernel=case.kernel, compiled=case.compiled)
    optimizer = make_optimizer(policy, Optimizer.model_validate({"learning_rate": 1e-6, "moments": case.moments}))
    if cuda:
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
    step = of_trl(model, samples, accelerator) if case.rows == TRL else partial(gradients, case, policy)
    seconds, computed = [], 0
    for _ in range(options.steps):
        began = time.perf_counter()
        computed = step(samples, accelerator, options.pack_tokens)
        optimizer.step()
        optimizer.zero_grad()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    checked = sum(need.size_bytes for need in needs(case, shape, options.pack_tokens) if need.name != "reserve")
    return Measured(shape, case, seconds[1:] or seconds, computed, peak, checked if case.rows == TREES else None)


def gradients(case: Case, policy: Policy, samples: Sequence[Sample], accelerator: Accelerator, pack_tokens: int) -> int:
    """Adds the gradients of the batch's loss; returns the number of tokens that the model computed."""
    if case.rows == TREES:
        return accumulated(policy, samples, pack_tokens, accelerator).computed_tokens
    total = 0
    for number, calls in enumerate(calls_of(samples)):
        # The weights of all samples, the rows of one: a batch of its calls.
        with accelerator.autocast():
            padded(policy.model, samples, calls, at_once=1)
        total += sum(len(call.token_ids) for call in calls_of(samples)[number])
    return total


def of_trl(model: PreTrainedModel, samples: Sequence[Sample], accelerator: Accelerator) -> Step:
    """The loss of TRL's `GRPOTrainer`, one rollout at a time; its results of tools are masked."""
    from tests.bench.trl_step import Grpo

    return Grpo(model, samples[0], accelerator)


def check(device: str, compiled: bool) -> None:
    """Raises: AssertionError: in float32 trees and padded rows differ by more than rounding explains"""
    samples, found, accelerator = agent_samples(2, CHECKED), [], make_accelerator(device, "float32")
    checked = [Case("padded", CALLS), Case("dense", kernel="dense"), Case("flex")]
    for case in [*checked, Case("flex, compiled", compiled=True)] if compiled else checked:
        model = make_model("tiny", device=accelerator.device)
        gradients(case, Policy(model, kernel=case.kernel, compiled=case.compiled), samples, accelerator, 512)
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for other in found[1:]:
        for name, gradient in found[0].items():
            assert gradient is not None
            torch.testing.assert_close(other[name], gradient, rtol=1e-2, atol=1e-3 * float(gradient.abs().max()))


def config_of(shape: str) -> Qwen3Config:
    """The config.json of a shape."""
    hidden, intermediate, layers, heads, key_heads, head, vocabulary, tied = SHAPES[shape]
    return Qwen3Config(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=key_heads, head_dim=head, vocab_size=vocabulary, tie_word_embeddings=tied,
        max_position_embeddings=32_768, bos_token_id=None, eos_token_id=None, attn_implementation="sdpa",
    )  # fmt: skip


def make_model(shape: str, seed: int = 0, device: torch.device | None = None) -> PreTrainedModel:
    """A model of a Qwen3 model's shapes with random weights, float32; device: the CPU if None."""
    torch.manual_seed(seed)
    with torch.device(device or "cpu"):
        return Qwen3ForCausalLM(config_of(shape)).eval()


def heading(samples: Sequence[Sample], accelerator: Accelerator) -> list[str]:
    """Machine and work, and the table's head."""
    device = torch.cuda.get_device_name() if accelerator.device.type == "cuda" else "a CPU"
    return [
        f"{device}, torch {torch.__version__}; Qwen3's shapes with random weights; {len(samples)} rollouts of one"
        f" group, {useful(samples):,} tokens.",
        "",
        "| model | step | seconds | tokens of rollouts a second | computed tokens | MFU | peak memory | `run check` |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]


def line(row: Measured | tuple[str, Case, str], tokens: int, accelerator: Accelerator) -> str:
    """A row of the table. tokens: of the rollouts"""
    if not isinstance(row, Measured):
        shape, case, reason = row
        return f"| {shape} | {case.name} | {reason} | | | | | |"
    cuda, median = accelerator.device.type == "cuda", statistics.median(row.seconds)
    device = torch.cuda.get_device_name() if cuda else "a CPU"
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in device), None)
    with torch.device("meta"):
        parameters = sum(one.numel() for one in Qwen3ForCausalLM(config_of(row.shape)).parameters())
    # Six operations for each parameter and token (PaLM, appendix B), attention not counted.
    share = f"{6 * parameters * row.computed_tokens / median / peak:.0%}" if peak else ""
    held = f"{row.peak_bytes / GB:.1f} GB" if cuda else ""
    checked = "" if row.check_bytes is None else f"{row.check_bytes / GB:.1f} GB"
    speed = f"{median:.2f} | {tokens / median:,.0f}"
    return f"| {row.shape} | {row.case.name} | {speed} | {row.computed_tokens:,} | {share} | {held} | {checked} |"


if __name__ == "__main__":
    main()
