"""`make bench-swap`: how long SGLang holds its requests while it takes new weights, from disk and over the network.

The model has a Qwen2.5 model's shapes and random weights. Two versions replace each other: the controller's client
pauses, loads and continues, and the trainer's sender sends. An engine joins before the pause; that time stands apart.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import httpx
import torch
from prometheus_client import REGISTRY
from pydantic import SecretStr
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time alone

from leyden.libs.store.transfers import Sender, WeightTransfer
from leyden.services.controller.engines.client import EngineClient, IncomingWeights
from leyden.services.controller.engines.targets import TargetVersion
from leyden.services.controller.settings import Settings
from leyden.services.trainer.sender import list_tensors, send_tensors
from tests.bench.gpu import SHAPES, make_model
from tests.fakes import real_sglang
from tests.fakes.engine_client import ADMIN_KEY, KEY
from tests.support.shared import free_port

ON_GPU = ("--mem-fraction-static", "0.5", "--skip-server-warmup")
HOST = "127.0.0.1"
FAILURES = "controller_weight_transfer_failures_total"


class Swap(NamedTuple):
    """Seconds. joining: the engine serves; holding: from pause to continue."""

    joining: float
    holding: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the median and the extremes of each way."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.swap", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="0.6B", help="the model's size")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the versions' tensors")
    parser.add_argument("--rounds", type=int, default=5, help="swaps of each way; one more of each is left out")
    options = parser.parse_args(arguments)
    on_gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as root:
        versions = [Path(root) / str(number) for number in range(2)]
        for number, folder in enumerate(versions):
            model = make_model(options.shape, seed=number).to(getattr(torch, options.dtype))
            model.save_pretrained(folder)
        size = sum(file.stat().st_size for file in versions[0].glob("*.safetensors"))
        on, log = (ON_GPU if on_gpu else real_sglang.ON_CPU), Path(root) / "sglang.log"
        with real_sglang.serving_sglang(versions[0], free_port(), log, "--skip-tokenizer-init", on=on) as url:
            found = asyncio.run(swaps(url, versions, torch.device("cuda" if on_gpu else "cpu"), options.rounds))
    machine = torch.cuda.get_device_name() if on_gpu else "a CPU"
    print(f"{machine}; Qwen2.5-{options.shape}'s shapes, {size / 2**30:.2f} GiB in {options.dtype}\n")
    print("| weights | join, s | hold, s |\n|---|--:|--:|")
    for way, times in found.items():
        print(f"| {way} | {spread([one.joining for one in times])} | {spread([one.holding for one in times])} |")


async def swaps(url: str, versions: Sequence[Path], device: torch.device, rounds: int) -> dict[str, list[Swap]]:
    """Swaps by turns from disk and over the network, so that both meet the same machine."""
    settings = Settings(engine_api_key=SecretStr(KEY), engine_admin_key=SecretStr(ADMIN_KEY))
    found: dict[str, list[Swap]] = {"disk": [], "network": []}
    async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
        client = EngineClient(url, http, settings)
        for number in range(2 * (rounds + 1)):
            target = TargetVersion("bench", number + 1, str(versions[number // 2 % 2]), "")
            way = "network" if number % 2 else "disk"
            found[way].append(await (sent(client, target, device) if number % 2 else loaded(client, target)))
            assert await client.weight_version() == f"bench:{number + 1}"
    return {way: times[1:] for way, times in found.items()}


async def loaded(client: EngineClient, target: TargetVersion) -> Swap:
    """One swap from disk."""
    began = time.perf_counter()
    await client.update(target)
    return Swap(0.0, time.perf_counter() - began)


async def sent(client: EngineClient, target: TargetVersion, device: torch.device) -> Swap:
    """One swap over the network. Raises: AssertionError: the engine did not join, or loaded from disk"""
    began = time.perf_counter()
    processes = await client.processes()
    assert processes is not None
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    transfer = WeightTransfer(client.url, target.run_id, target.version, f"bench-{target.version}", 1 + processes)
    tensors = tuple(list_tensors(Path(target.path)))
    sender = Sender("nccl" if device.type == "cuda" else "gloo", HOST, store.port, tensors)
    incoming = IncomingWeights(transfer.group_name, transfer.world_size, sender)
    sending = asyncio.create_task(
        asyncio.to_thread(functools.partial(send_tensors, Path(target.path), transfer, store, device))
    )
    assert await client.join(incoming)
    joined = time.perf_counter()
    failures = REGISTRY.get_sample_value(FAILURES)
    await client.update(target, incoming)
    held = time.perf_counter() - joined
    assert REGISTRY.get_sample_value(FAILURES) == failures
    await sending
    await client.leave(incoming)
    return Swap(joined - began, held)


def spread(values: Sequence[float]) -> str:
    """The median, and the shortest and the longest."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
