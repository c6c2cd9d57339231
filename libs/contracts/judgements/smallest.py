"""The smallest machines that hold a run, among those that clouds rent."""

from __future__ import annotations

import math

from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.judgements.memory import GB, Machine, Models, Place, memory
from leyden.libs.contracts.judgements.shape import Shape

GPU_SIZES = (24, 48, 80, 141)
"""GB of one GPU: L4 and A10, L40S, A100 and H100, H200."""
COUNTS = (1, 2, 4, 8)


def place_bytes(run: RunConfig, shape: Shape, machine: Machine, place: Place) -> int:
    """The memory that a run needs in each place of a kind."""
    return sum(need.size_bytes for need in memory(run, Models(shape), machine) if need.place == place)


def smallest_machines(run: RunConfig, shape: Shape) -> list[Machine]:
    """For each size of GPU the fewest of one host that hold the run, where no smaller GPUs do with as few."""
    found, fewest = list[Machine](), max(COUNTS) + 1
    for size in GPU_SIZES:
        for gpus in (count for count in COUNTS if count < fewest):
            machine = Machine(gpus, size * GB)
            if place_bytes(run, shape, machine, "gpu") <= size * GB:
                found, fewest = [*found, machine], gpus
                break
    return found


def smallest_in_words(run: RunConfig, shape: Shape, *, gpus: bool = True) -> str:
    """`1 × 48 GB with 33 GB of host memory; engine 1 × 24 GB`, or for a CPU the memory of trainer and engine."""
    if not gpus:
        return f"{_whole(place_bytes(run, shape, Machine(0, engine_gpus=1), 'host'))} GB for trainer and engine"
    trainers = []
    for one in smallest_machines(run, shape):
        host = _whole(place_bytes(run, shape, one, "host"))
        trainers.append(f"{one.gpus} × {(one.gpu_bytes or 0) // GB} GB with {host} GB of host memory")
    engine = place_bytes(run, shape, Machine(engine_gpus=1), "engine")
    size = next((size for size in GPU_SIZES if engine <= size * GB), None)
    served = f"1 × {size} GB" if size else f"{_whole(engine)} GB over several GPUs"
    return f"{' or '.join(trainers) or 'no host of 8 GPUs'}; engine {served}"


def _whole(size: int) -> int:
    return math.ceil(size / GB)
