"""The half of an engine that receives weights from a trainer: its processes in the trainer's group, over gloo."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any, cast

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time alone
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup, ProcessGroupGloo

TIMEOUT = timedelta(seconds=20)


class Receiver:
    """Answers SGLang's requests of a transfer, as an engine of `processes` processes does.

    `received` holds the tensors of each process by name, of all transfers.
    """

    def __init__(self, processes: int = 2) -> None:
        self.processes = processes
        self.received: list[dict[str, torch.Tensor]] = [{} for _ in range(processes)]
        self._groups: list[ProcessGroup] = []

    async def answer(self, path: str, body: dict[str, Any]) -> None:
        """Does what the request asks for. Raises: RuntimeError: the sender did not come, or went away"""
        if path == "/init_weights_update_group":
            joining = (asyncio.to_thread(self._join, number, body) for number in range(self.processes))
            self._groups = await asyncio.gather(*joining)
        elif path == "/update_weights_from_distributed":
            receiving = (asyncio.to_thread(self._receive, number, body) for number in range(self.processes))
            await asyncio.gather(*receiving)
        elif path == "/destroy_weights_update_group":
            for group in self._groups:
                group.shutdown()
            self._groups = []

    def _join(self, number: int, body: dict[str, Any]) -> ProcessGroup:
        assert body["backend"] == "gloo"
        store: Any = TCPStore(body["master_address"], body["master_port"], is_master=False, timeout=TIMEOUT)
        # SGLang's own prefix, and those of the group that it lets torch make.
        for prefix in (body["group_name"], f"{body['group_name']}/", "cpu/"):
            store = PrefixStore(prefix, store)
        group = ProcessGroupGloo(store, body["rank_offset"] + number, body["world_size"], TIMEOUT)
        return cast("ProcessGroup", group)

    def _receive(self, number: int, body: dict[str, Any]) -> None:
        for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            self._groups[number].broadcast(tensor, 0).wait()
            self.received[number][name] = tensor
