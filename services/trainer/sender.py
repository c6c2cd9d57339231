"""Sends policy versions to engines over torch.distributed, where the controller asks for it.

Each transfer has a process group of its own: this process and those of one engine, so that an engine that is slow or
gone delays no other. Tensors come from the files of the version, one at a time.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time alone
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup, ProcessGroupGloo, Store

from leyden.libs.faults import fault_point
from leyden.libs.queue.notifications import Notifications, Topic
from leyden.libs.service import pause
from leyden.libs.store import training
from leyden.libs.store.database import Database, Refused, StoreAway
from leyden.libs.store.transfers import Sender, TensorShape, WeightTransfer, accept_transfer, open_transfers
from leyden.libs.telemetry import RateLimitedLogger, logger
from leyden.services.trainer.settings import Settings
from leyden.services.trainer.state.saving import PHASE_SECONDS

log = logger()
limited_log = RateLimitedLogger(log)

TRANSFER_TIMEOUT = timedelta(seconds=120)
"""Longest wait for an engine: to join, or to receive one more tensor."""
WAIT_SECONDS = 0.1
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class WeightSender:
    """Sends the versions of one run."""

    def __init__(
        self, settings: Settings, database: Database, notifications: Notifications, device: torch.device
    ) -> None:
        self._settings, self._database, self._notifications = settings, database, notifications
        self._device = device
        self._threads: list[threading.Thread] = []

    @asynccontextmanager
    async def accepting(self, stop: asyncio.Event) -> AsyncIterator[None]:
        """Accepts requests during the block, then waits for what it sends, unless `stop` is set or the block raised."""
        task = asyncio.create_task(self._accept_all(), name="sender")
        try:
            yield
            while any(thread.is_alive() for thread in self._threads) and not await pause(stop, WAIT_SECONDS):
                pass
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def _accept_all(self) -> None:
        while True:
            try:
                async with self._database.read() as session:
                    requests = await open_transfers(session, self._settings.run_id)
                for transfer in requests:
                    await self._accept(transfer)
            # RuntimeError: torch's errors of connections. The next version may be sent.
            except (StoreAway, Refused, OSError, RuntimeError, SafetensorError) as error:
                limited_log.warning("transfers not accepted", cause=f"{type(error).__name__}: {error}")
            await self._notifications.wait(Topic.TRANSFERS, timeout_seconds=self._settings.poll_seconds)

    async def _accept(self, transfer: WeightTransfer) -> None:
        async with self._database.read() as session:
            version = await training.read_version(session, transfer.run_id, transfer.policy_version)
        if version is None:
            return
        folder = Path(version.path)
        tensors = tuple(await asyncio.to_thread(list_tensors, folder))
        address = self._settings.address
        if address is None:
            address = await asyncio.to_thread(socket.gethostbyname, socket.gethostname())
        # It listens on every interface. This process itself may not reach `address`.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TRANSFER_TIMEOUT)
        sender = Sender("nccl" if self._device.type == "cuda" else "gloo", address, store.port, tensors)
        async with self._database.session() as session:
            if not await accept_transfer(session, transfer, sender):
                return
        # A daemon: a thread that waits for an engine must not delay the end of a process that was asked to stop.
        thread = threading.Thread(target=self._send, args=(transfer, store, folder), daemon=True)
        self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]
        thread.start()

    def _send(self, transfer: WeightTransfer, store: TCPStore, folder: Path) -> None:
        fault_point("trainer.transfer_accepted")
        where = {"url": transfer.engine_url, "version": transfer.policy_version}
        try:
            with PHASE_SECONDS.labels("transfer").time():
                send_tensors(folder, transfer, store, self._device)
        # RuntimeError: torch's errors of connections and time-outs.
        except (RuntimeError, OSError, SafetensorError) as error:
            log.warning("version not sent", cause=str(error), **where)
        else:
            log.info("version sent", **where)


def list_tensors(folder: Path) -> Iterator[TensorShape]:
    """The tensors of a version in the order in which `send_tensors` sends them.

    Raises: OSError: a file is gone, or holds a type that engines do not receive; SafetensorError: it is damaged
    """
    # An engine that receives nothing would serve its old weights under the version's label.
    if not (files := _files(folder)):
        raise OSError(f"{folder} has no weights")
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # no mapping
                part = tensors.get_slice(name)
                if (dtype := DTYPES.get(part.get_dtype())) is None:
                    raise OSError(f"{file}: engines receive no tensor of type {part.get_dtype()}")
                yield TensorShape(name, dtype, tuple(part.get_shape()))


def send_tensors(folder: Path, transfer: WeightTransfer, store: Store, device: torch.device) -> None:
    """Broadcasts the weights of a version to the processes of one engine; one tensor at a time is on the device.

    Raises: RuntimeError: the engine did not join, or went away; OSError, SafetensorError: a file cannot be read
    """
    with _group(transfer, store, device) as group:
        for file in _files(folder):
            with safe_open(file, framework="pt", device=str(device)) as tensors:
                for name in tensors.keys():  # noqa: SIM118  # no mapping
                    group.broadcast(tensors.get_tensor(name).contiguous(), 0).wait()
                    fault_point("trainer.tensor_sent")
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


@contextmanager
def _group(transfer: WeightTransfer, store: Store, device: torch.device) -> Iterator[ProcessGroup]:
    """A group apart from those of the trainer's ranks. Its prefixes are those of a group that torch itself makes."""
    name = transfer.group_name
    for prefix in (name, f"{name}/", f"{device.type}/"):
        store = PrefixStore(prefix, store)
    if device.type == "cuda":
        # A torch for CPUs has no such class.
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = TRANSFER_TIMEOUT
        backend: object = ProcessGroupNCCL(store, 0, transfer.world_size, options)
    else:
        backend = ProcessGroupGloo(store, 0, transfer.world_size, TRANSFER_TIMEOUT)
    # torch declares the collectives of backends on this class.
    group = cast("ProcessGroup", backend)
    try:
        yield group
    finally:
        group.shutdown()
