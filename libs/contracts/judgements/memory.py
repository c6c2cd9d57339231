"""The memory that a run's trainer and engine need, by arithmetic from the document and the shape of its model.

    state         bytes a parameter  one process            each of n processes that divide a copy
    weights       of the model       4 (LoRA's base: 2)     4/n
    gradients     of trained ones    4                      4/n
    moments       of trained ones    8, 4 or 2 (8bit)       the same divided by n; none with `optimizer.offload`

Several processes gather two layers at a time, and embeddings and head, in the type of the products; the gradients of
one of these lie there whole before they are added up.

Weights, gradients and moments exist together in every step after the first: a machine with less memory never makes it.
Activations are an estimate by count of the tensors that the backward pass reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator

from leyden.libs.contracts.config import CPU, Device, RunConfig
from leyden.libs.contracts.config.computation import CUDA, tile_logits
from leyden.libs.contracts.judgements.shape import ROUTERS, Shape, model_config

MOMENT_BYTES = {"float32": 8, "bfloat16": 4, "8bit": 2}
FULL, HALF = 4, 2
GB = 10**9
RESERVE = 2 * GB
"""An allowance for a GPU's context, for buffers of collectives and for memory between allocations; in host memory, for
each process's libraries."""
HEAD_TILES = 4
"""Those of logits, their exponentials, gradients and products."""
FREED = {"gradients", "gathered gradients", "activations", "bfloat16 copies"}
"""Needs of a step that are over at its end."""
CACHED_TOKENS = 2**15
"""Keys and values of so many tokens, in bfloat16, are counted for an engine: its least useful cache."""
CHECKED_LAYERS = 2
"""The trainer tries the arithmetic of a family on so many of a model's lowest layers, at least: the second one reads
states that the first one's attention has mixed."""
EXPORT_PARTS = 2 * 2**30
"""Rank 0 gathers a version in parts of 1 GiB, which lie twice in host memory."""
CHECKPOINT_FILE = 2**30
"""Ranks write their shards of a checkpoint at once, in files of 1 GiB, each of which lies twice in host memory."""
RESTORED_PART = 2**30
"""The ranks that divide a copy of the model read a checkpoint in parts of 1 GiB, or of one tensor."""


_POWERS = {"m": -1, "": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}


def size_bytes(given: str) -> int:
    """The bytes of `80GB` or `80Gi`, as GPUs and Kubernetes name sizes. Raises: ValueError: it is no size"""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([mkKMGTP]?)(i?)B?", given)
    if found is None:
        raise ValueError(f"{given!r} is no size: write 80GB or 80GiB")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** _POWERS[found[2]])


def _size(given: object) -> object:
    return (size_bytes(given) if given else None) if isinstance(given, str) else given


Size = Annotated[int | None, BeforeValidator(_size)]


@dataclass(frozen=True)
class Machine:
    """Hosts that are alike; memory of None is not judged.

    Args: gpus: of each host, one trainer process on each, 0 for a CPU; engine_gpus: over which one engine divides its
        weights, None for an engine that is not judged; shared: the engine is on the trainer's GPUs and host; copies: of
        the model among all processes
    """

    gpus: int = 1
    gpu_bytes: Size = None
    host_bytes: Size = None
    hosts: int = 1
    engine_gpus: int | None = None
    shared: bool = False
    copies: int = 1

    @property
    def ranks(self) -> int:
        """Processes of the trainer."""
        return max(1, self.gpus * self.hosts)

    @property
    def shards(self) -> int:
        """Processes among which a copy of the model is divided."""
        return max(1, self.ranks // self.copies)

    @property
    def device(self) -> Device:
        """The trainer's: the CUDA image has Triton."""
        return Device(CUDA, flex=True) if self.gpus else CPU


Place = Literal["gpu", "host", "engine"]


@dataclass(frozen=True)
class Need:
    """Memory of one trainer GPU, of one host of the trainer, or of one GPU of an engine.

    Args: size_bytes: 0 for a model that is not counted, since its size is unknown here; certain: needed at one moment
        with the place's other certain parts; the others are estimates
    """

    place: Place
    name: str
    size_bytes: int
    certain: bool = True

    @property
    def size(self) -> str:
        """In words."""
        return f"{self.size_bytes / GB:.1f} GB" if self.size_bytes else "not counted"


@dataclass(frozen=True)
class Models:
    """The shapes of the models that a trainer holds.

    Args: teacher, critic: of folders that the document names; None for one that is not seen here
    """

    policy: Shape
    teacher: Shape | None = None
    critic: Shape | None = None

    @classmethod
    def of(cls, run: RunConfig, config: Mapping[str, Any], teacher: Path | None = None) -> Self | None:
        """Reads the folders of a run's other models; None where the policy's own shape is unknown.

        Args: config: the policy's `config.json`; teacher: the folder of a teacher that is a run's version
        """
        policy, named, critic = Shape.of(config), run.algorithm.distillation, run.algorithm.critic
        if policy is None:
            return None
        teacher = Path(named.model) if named is not None and named.model is not None else teacher
        return cls(policy, _shape_in(teacher), _shape_in(Path(critic.model) if critic and critic.model else None))

    def teacher_of(self, run: RunConfig) -> Shape | None:
        """That of a run's teacher."""
        named = run.algorithm.distillation
        return self.policy if named is not None and named.is_own else self.teacher

    def critic_of(self, run: RunConfig) -> Shape | None:
        """That of a critic's own model, all of which trains."""
        critic = run.algorithm.critic
        if critic is None or critic.trunk == "shared":
            return None
        return self.policy if critic.model is None else self.critic

    def held(self, run: RunConfig) -> list[Shape]:
        """All that are known."""
        return [one for one in (self.policy, self.teacher_of(run), self.critic_of(run)) if one is not None]


def _shape_in(folder: Path | None) -> Shape | None:
    return Shape.of(model_config(folder) or {}) if folder is not None else None


def memory(run: RunConfig, models: Models, machine: Machine) -> list[Need]:
    """Returns what every place needs. A run without steps has no trainer."""
    place: Place = "gpu" if machine.gpus else "host"
    run = run.computed_as(run.computation(machine.device))
    needs = [*_states(run, models, machine, place), *_passes(run, models, machine, place)]
    needs += _older_version(run, models.policy, machine, place, needs)
    if machine.gpus:
        needs += [Need("gpu", "reserve", RESERVE, certain=False), *_host(run, models, machine)]
        needs.append(Need("host", "reserve", RESERVE * machine.gpus, certain=False))
    return [*(needs if run.training.steps else []), *_engine(run, models.policy, machine)]


def _engine(run: RunConfig, shape: Shape, machine: Machine) -> Iterator[Need]:
    if machine.engine_gpus is None:
        return
    width = HALF if machine.gpus and run.training.export_dtype == "bfloat16" else FULL
    place: Place = "host" if not machine.gpus else "gpu" if machine.shared else "engine"
    cache = 2 * HALF * shape.keys * shape.layers * CACHED_TOKENS
    yield Need(place, "engine weights", width * shape.size // machine.engine_gpus)
    yield Need(place, "engine cache", cache // machine.engine_gpus, certain=False)
    if machine.gpus:
        yield Need(place, "engine reserve" if machine.shared else "reserve", RESERVE, certain=False)


def engine_arguments(machine: Machine) -> str | None:
    """SGLang's arguments with which an engine on the trainer's GPUs takes what `memory` counts; None for other ones.

    Without them its cache fills most of the GPU. Why not `--mem-fraction-static`: it is a share of the memory that is
    free at the engine's start. An engine that starts again beside the trainer's weights would refuse it.
    """
    shares = machine.gpus > 0 and machine.shared and machine.engine_gpus is not None
    return f"--max-total-tokens {CACHED_TOKENS}" if shares else None


def trained_parameters(run: RunConfig, shape: Shape) -> int:
    """The policy's parameters that have gradients and moments."""
    lora, frozen = run.training.lora, list(run.training.frozen)
    if run.training.router == "frozen":
        frozen += ROUTERS
    return shape.trained(frozen) if lora is None else shape.adapters(lora.rank, lora.target_modules, frozen)


def _critic_parameters(run: RunConfig, models: Models) -> int:
    """Those of a critic's own model; 0 where the policy's model is its trunk, or its own is not seen."""
    critic = models.critic_of(run)
    return critic.size if critic is not None else 0


def _states(run: RunConfig, models: Models, machine: Machine, place: Place) -> Iterator[Need]:
    shape, shards, lora = models.policy, machine.shards, run.training.lora is not None
    trained, critic = trained_parameters(run, shape), _critic_parameters(run, models)
    held, trained = shape.size + (trained if lora else 0) + critic, trained + critic
    narrow = shape.matrices if lora and run.training.lora and run.training.lora.base_dtype == "bfloat16" else 0
    yield Need(place, "weights", (FULL * held - (FULL - HALF) * narrow) // shards)
    yield Need(place, "gradients", FULL * trained // shards)
    if machine.ranks > 1:
        width = _compute_bytes(run, machine)
        yield Need(place, "gathered weights", width * max(one.outside + 2 * one.layer for one in models.held(run)))
        whole = [one for one in (None if lora else shape, models.critic_of(run)) if one is not None]
        if whole:
            largest = max(max(one.outside, one.layer) for one in whole)
            yield Need(place, "gathered gradients", (width + FULL) * largest)
    if not run.optimizer.offload or place == "host":
        yield Need(place, "moments", _moment_bytes(run, trained) // shards)
    if run.algorithm.kl_coefficient > 0 and not lora:
        yield Need(place, "reference", FULL * shape.size // shards)
    yield from _named(run, models, machine, place)


def _named(run: RunConfig, models: Models, machine: Machine, place: Place) -> Iterator[Need]:
    """The teacher, and a critic that is not counted elsewhere."""
    critic, teacher = run.algorithm.critic, run.algorithm.distillation
    if critic is not None and critic.trunk == "own" and models.critic_of(run) is None:
        yield Need(place, "critic", 0, certain=False)
    # The run's own model teaches with the policy's weights, or as the base model behind the policy's adapters.
    shares = teacher is not None and teacher.is_own and (run.training.lora is not None or teacher.weights == "newest")
    if teacher is not None and not shares:
        found = models.teacher_of(run)
        size = FULL * found.size // machine.shards if found is not None else 0
        yield Need(place, "teacher", size, certain=found is not None)


def _older_version(
    run: RunConfig, shape: Shape, machine: Machine, place: Place, needs: Sequence[Need]
) -> Iterator[Need]:
    """A version that the trainer compares with the engine, as far as it exceeds what a step frees at its end.

    With LoRA the policy takes the version's adapters.
    """
    if run.training.lora is not None or run.algorithm.type == "sft":
        return
    narrow = shape.matrices if run.training.export_dtype == "bfloat16" else 0
    freed = sum(need.size_bytes for need in needs if need.name in FREED)
    beyond = (FULL * shape.size - (FULL - HALF) * narrow) // machine.shards - freed
    if beyond > 0:
        yield Need(place, "older version", beyond, certain=False)


def _moment_bytes(run: RunConfig, trained: int) -> int:
    return MOMENT_BYTES[run.optimizer.moments] * trained


def _compute_bytes(run: RunConfig, machine: Machine) -> int:
    """Bytes of a number in a GPU's matrix products; on a CPU bfloat16 rounds factors and stores none."""
    return HALF if machine.gpus and run.training.precision == "bfloat16" else FULL


def _passes(run: RunConfig, models: Models, machine: Machine, place: Place) -> Iterator[Need]:
    shape, tokens, width = models.policy, run.training.micro_batch_tokens, _compute_bytes(run, machine)
    layer, layers = activation_bytes_a_token(shape, width), shape.layers
    if run.training.lora is not None and width == HALF:
        # Adapters read the inputs of all linear layers in float32: peft copies them.
        layer += FULL * (5 * shape.hidden + shape.queries + shape.inner)
    kept = FULL * shape.hidden * layers + layer if run.training.activation_checkpointing else layer * layers
    yield Need(place, "activations", tokens * kept, certain=False)
    if machine.gpus and run.training.attention == "dense":
        yield Need(place, "attention mask", width * tokens * tokens, certain=False)
    yield Need(place, "logits", HEAD_TILES * tile_logits(machine.device.kind) * FULL, certain=False)
    if machine.ranks == 1 and width == HALF:
        # Autocast keeps its copies of trained weights to the end of a forward pass; a critic's own model has passes of
        # its own.
        trained = max(trained_parameters(run, shape), _critic_parameters(run, models))
        yield Need(place, "bfloat16 copies", HALF * trained, certain=False)


def forward_bytes(
    shape: Shape, width: int, device: str, tokens: int, before: int, prefixes: int, *, dense: bool
) -> int:
    """Bounds what one of several processes needs beside its weights for forward passes without gradients.

    Gathered weights lie there a second time while they are copied out of the collective's buffer. A dense mask is made
    by way of positions and truth values; models with windows have two.

    Args: width: bytes of a number in matrix products; tokens: of the largest pass; before: those of the prefixes before
        it; prefixes: tokens of all prefixes, whose keys, values and states stay, in float32 as well; dense: masks are
    """
    gathered = 2 * width * (shape.outside + 2 * shape.layer)
    layer = activation_bytes_a_token(shape, width) * (before + tokens)
    masks = (2 * width + 10) * tokens * (before + tokens) if dense else 0
    states = (width + FULL) * (2 * shape.keys * shape.layers + shape.hidden) * prefixes
    return gathered + layer + masks + states + HEAD_TILES * tile_logits(device) * FULL


def activation_bytes_a_token(shape: Shape, width: int) -> int:
    """One layer's tensors for its backward pass: two norms, attention, and the gated feed-forward layer.

    A norm has its input and its normalised input in float32, and its output; attention q, k and v for each query head
    and its output; the feed-forward layer gate, its activation, up and their product. Norms of queries and keys have
    two tensors more. Experts have hidden states of their own for each pair of token and expert: inputs, outputs and
    weighted outputs. Sinks scale attention's output.

    Args: width: bytes of a number in matrix products
    """
    norms = 2 * shape.hidden * (FULL + FULL + width)
    if shape.has_query_norms:
        norms += 2 * FULL * (shape.queries + shape.keys)
    attention = (6 if shape.has_sinks else 5) * shape.queries
    return norms + width * (attention + shape.gate_tensors * shape.inner + 3 * shape.routed * shape.hidden)


def _host(run: RunConfig, models: Models, machine: Machine) -> Iterator[Need]:
    """Processes read one tensor at a time, and of it their own rows. Before that the first one tries the lowest layers
    in float64."""
    if run.optimizer.offload:
        moments = _moment_bytes(run, trained_parameters(run, models.policy) + _critic_parameters(run, models))
        yield Need("host", "offloaded moments", moments * machine.gpus // machine.shards)
    tensor = max(max(one.outside, one.layer) for one in models.held(run))
    reading = max(RESTORED_PART, FULL * tensor) * machine.gpus // machine.shards
    trying = 2 * FULL * max(one.outside + CHECKED_LAYERS * one.layer for one in models.held(run))
    # Only the ranks of the first copy write, all at once.
    file = min(CHECKPOINT_FILE, _checkpoint_bytes(run, models) // machine.shards)
    writing = max(EXPORT_PARTS, 2 * file * min(machine.gpus, machine.shards))
    # One after the other: a run tries and reads, model and checkpoint, before it exports and saves.
    parts = {"reading the model": max(reading, trying), "writing the model": writing}
    largest = max(parts, key=lambda name: parts[name])
    yield Need("host", largest, parts[largest])


def _checkpoint_bytes(run: RunConfig, models: Models) -> int:
    """Moments, a critic's own model, and the weights where versions round them."""
    shape, critic = models.policy, _critic_parameters(run, models)
    rounded = run.training.lora is None and run.training.export_dtype == "bfloat16"
    weights = critic + (shape.size if rounded else 0)
    return _moment_bytes(run, trained_parameters(run, shape) + critic) + FULL * weights
