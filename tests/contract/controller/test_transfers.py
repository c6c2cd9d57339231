"""Versions that a trainer sends to engines over the network: real gloo groups, and processes that are killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY
from pydantic import SecretStr
from safetensors.torch import save_file
from sqlalchemy import func, select
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time alone

from leyden.libs.contracts.weights import weights_sha256
from leyden.libs.faults import FaultInjector
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.store.engines import serving_engines
from leyden.libs.store.transfers import (
    Sender,
    TensorShape,
    WeightTransfer,
    accept_transfer,
    end_transfer,
    open_transfers,
    read_sender,
    request_transfer,
)
from leyden.services.controller.engines import client as engine_client
from leyden.services.controller.engines import network as transfers
from leyden.services.controller.engines.fleet import Fleet
from leyden.services.controller.engines.targets import TargetVersion
from leyden.services.trainer import sender
from leyden.services.trainer.settings import Settings as TrainerSettings
from tests.contract.controller.test_engines import fleet_of
from tests.contract.controller.test_leader import start
from tests.fakes.engine_client import ADMIN_KEY, KEY, EngineClient
from tests.fakes.receiver import Receiver
from tests.fakes.scripted_engine import TRANSFER_ROUTES, ScriptedEngine, running
from tests.fakes.weight_sender import send_for_ever
from tests.support import builders
from tests.support.long import long_only
from tests.support.waiting import eventually

POINTS = ("trainer.transfer_accepted", "trainer.tensor_sent", "controller.bucket_received")
FAILURES = "controller_weight_transfer_failures_total"
WEIGHTS = {
    "embed": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "head": torch.randn(5, 2, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "norm": torch.ones(()),
}


class Case:
    """A run with version 1 on the disk, one engine of two processes, and whoever brings the version to it."""

    def __init__(self, database: Database, redis_url: str, folder: Path) -> None:
        self.database, self.redis_url, self.folder = database, redis_url, folder
        self.injector = FaultInjector(folder / "faults")
        self.receiver = Receiver()
        self.engine = ScriptedEngine(receiver=self.receiver)

    async def open(self, folder: Path) -> None:
        """Version 1 has the weights of a folder."""
        self.run = await builders.add_run(self.database, config=builders.run_document())
        await builders.add_policy_version(self.database, self.run, 0, path=f"{self.folder}/base")
        version = {"path": str(folder), "content_sha256": weights_sha256(folder)}
        await builders.add_policy_version(self.database, self.run, 1, **version)
        self.target = TargetVersion(self.run.id, 1, version["path"], version["content_sha256"])

    @property
    def label(self) -> str:
        return f"{self.run.id}:1"

    @property
    def loaded_from_disk(self) -> bool:
        return f"update {self.target.path} {self.label} flush=True" in self.engine.journal

    def fleet(self, url: str | None = None) -> AbstractAsyncContextManager[Fleet]:
        """Args: url: of another engine than the scripted one, with keys"""
        keys = {"engine_api_key": SecretStr(KEY), "engine_admin_key": SecretStr(ADMIN_KEY)}
        return fleet_of(self.database, self.redis_url, url or self.engine.url, weights="network", **keys)

    @asynccontextmanager
    async def sender(self) -> AsyncIterator[None]:
        settings = TrainerSettings(
            run_id=self.run.id, database_url=self.database.dsn, redis_url=self.redis_url, address="127.0.0.1"
        )
        task = asyncio.create_task(send_for_ever(settings))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def sender_process(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.fakes.weight_sender"),
            env={
                "PATH": os.environ["PATH"],
                "LEYDEN_DATABASE_URL": self.database.dsn,
                "LEYDEN_REDIS_URL": self.redis_url,
                "TRAINER_RUN_ID": self.run.id,
                "TRAINER_ADDRESS": "127.0.0.1",
                **self.injector.environment,
            },
        )

    async def bring(self, url: str) -> None:
        """Brings version 1 to an engine, beside a process that sends."""
        process = await self.sender_process()
        try:
            async with self.fleet(url) as fleet:
                fleet.set_target(self.target)
                await eventually(lambda: fleet.served_version(self.run.id) == 1)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def is_served(self, fleet: Fleet) -> bool:
        return fleet.served_version(self.run.id) == 1 and not self.engine.paused

    async def sender_of(self, transfer: WeightTransfer) -> Sender | None:
        async with self.database.read() as session:
            return await read_sender(session, transfer)

    async def requests(self) -> int:
        async with self.database.read() as session:
            return await session.scalar(select(func.count()).select_from(tables.WeightTransfer)) or 0


@pytest.fixture
async def case(database: Database, redis_url: str, tmp_path: Path) -> AsyncIterator[Case]:
    folder = tmp_path / "versions" / "1"
    folder.mkdir(parents=True)
    save_file(WEIGHTS, folder / "model.safetensors")
    found = Case(database, redis_url, tmp_path)
    await found.open(folder)
    async with running(found.engine):
        yield found


async def test_a_version_arrives_over_the_network_bit_for_bit(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    # 48 bytes of `embed` fill a bucket; `head` and `norm` share one.
    monkeypatch.setattr(engine_client, "BUCKET_BYTES", 48)
    async with case.sender(), case.fleet() as fleet:
        fleet.set_target(TargetVersion(case.run.id, 0, f"{case.folder}/base", "hash"))
        await eventually(lambda: fleet.served_version(case.run.id) == 0)
        before = len(case.engine.journal)
        fleet.set_target(case.target)
        await eventually(lambda: case.is_served(fleet))
        assert case.engine.weight_version == case.label
        assert case.engine.journal[before:] == [
            "init_weights_update_group",
            "pause retract",
            "update_weight_version partial",
            "begin_weight_update",
            *["update_weights_from_distributed"] * 2,
            "end_weight_update",
            f"update_weight_version {case.label}",
            "continue",
            "destroy_weights_update_group",
        ]
    for received in case.receiver.received:
        assert received.keys() == WEIGHTS.keys()
        assert all(received[name].dtype == WEIGHTS[name].dtype for name in WEIGHTS)
        assert all(torch.equal(received[name], WEIGHTS[name]) for name in WEIGHTS)
    assert await case.requests() == 0


async def greedy(engine: EngineClient) -> Any:
    """An answer that depends on the weights alone."""
    prompt = {"input_ids": [72, 69, 76, 76, 79], "return_logprob": True}
    return await engine.generate(**prompt, sampling_params={"temperature": 0, "max_new_tokens": 12})


async def test_weights_of_the_network_answer_as_those_of_the_disk(
    database: Database,
    redis_url: str,
    engine: EngineClient,
    new_weights: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On SGLang, which receives them; the CPU engine has no such routes and reads the disk."""

    case, url = Case(database, redis_url, tmp_path), str(engine.http.base_url).rstrip("/")
    await case.open(new_weights)
    receives = "tp_size" in (await engine.http.get("/server_info")).json()
    monkeypatch.setattr(transfers, "ACCEPT_SECONDS", 60.0)
    first, outcomes = await greedy(engine), list[str]()
    for point in ("trainer.tensor_sent", None) if receives else (None,):
        before = REGISTRY.get_sample_value(FAILURES)
        if point:
            case.injector.arm(point)
        await case.bring(url)
        outcomes.append("disk" if REGISTRY.get_sample_value(FAILURES) != before else "network")
        found = await greedy(engine)
        assert found["meta_info"]["weight_version"] == case.label
        # From the disk, without a trainer.
        body = {"model_path": str(new_weights), "weight_version": "other:0", "flush_cache": True}
        assert (await engine.control("/update_weights_from_disk", **body)).status_code == 200
        expected = await greedy(engine)
        assert found["output_ids"] == expected["output_ids"] != first["output_ids"]
        logprobs = [one["meta_info"]["output_token_logprobs"] for one in (found, expected)]
        assert [entry[0] for entry in logprobs[0]] == pytest.approx([entry[0] for entry in logprobs[1]], abs=1e-6)
        await engine.control("/update_weights_from_disk", **{**body, "model_path": engine.model_path})
    assert outcomes == (["disk", "network"] if receives else ["network"])


async def test_a_version_comes_by_disk_where_no_trainer_sends(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "ACCEPT_SECONDS", 0.2)
    async with case.fleet() as fleet:
        fleet.set_target(case.target)
        await eventually(lambda: case.is_served(fleet))
    assert case.engine.journal == [
        "continue",
        *("pause retract", f"update {case.target.path} {case.label} flush=True", "continue"),
    ]
    assert await case.requests() == 0


@pytest.mark.parametrize("path", TRANSFER_ROUTES)
async def test_a_version_comes_by_disk_where_the_engine_refuses_to_receive(case: Case, path: str) -> None:
    case.engine.failing = {path}
    async with case.sender(), case.fleet() as fleet:
        fleet.set_target(case.target)
        await eventually(lambda: case.is_served(fleet))
    assert case.engine.weight_version == case.label
    assert case.loaded_from_disk == (path != "/destroy_weights_update_group")
    assert await case.requests() == 0


async def test_an_engine_with_a_part_of_a_version_waits_for_a_complete_one(case: Case) -> None:
    case.engine.failing = {"/update_weights_from_distributed"}
    case.engine.bad_paths = {case.target.path}
    async with case.sender():
        async with case.fleet() as fleet:
            fleet.set_target(case.target)
            await eventually(lambda: case.engine.journal.count("pause retract") == 2)
            await eventually(lambda: "no such file" in (fleet.trouble(case.run.id) or ""))
            assert case.engine.journal.count("continue") == 1
        # The next controller finds it so.
        before = len(case.engine.journal)
        async with case.fleet() as fleet:
            fleet.set_target(case.target)
            await eventually(lambda: case.engine.journal[before:].count("pause retract") == 1)
            assert "continue" not in case.engine.journal[before:]
            case.engine.failing = set()
            await eventually(lambda: case.is_served(fleet))
    assert case.engine.weight_version == case.label


@long_only
@pytest.mark.parametrize("point", POINTS[:2])
async def test_a_version_comes_by_disk_where_the_trainer_is_killed_while_it_sends(
    case: Case, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The sender imports torch first.
    monkeypatch.setattr(transfers, "ACCEPT_SECONDS", 60.0)
    case.injector.arm(point)
    process = await case.sender_process()
    try:
        async with case.fleet() as fleet:
            fleet.set_target(case.target)
            async with asyncio.timeout(60):
                assert await process.wait() == -signal.SIGKILL
            await eventually(lambda: case.is_served(fleet))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    assert case.engine.weight_version == case.label
    assert case.loaded_from_disk
    assert await case.requests() == 0


@long_only
async def test_a_controller_killed_between_buckets_leaves_an_engine_that_waits(case: Case) -> None:
    settings = {"CONTROLLER_WEIGHTS": "network", **case.injector.environment}
    case.injector.arm(POINTS[2])
    async with case.sender():
        process = await start(case.database.dsn, case.redis_url, case.engine.url, case.folder, **settings)
        async with asyncio.timeout(120):
            assert await process.wait() == -signal.SIGKILL
        assert (case.engine.weight_version, case.engine.paused) == ("partial", True)
        assert await case.requests() == 1
        before = len(case.engine.journal)
        process = await start(case.database.dsn, case.redis_url, case.engine.url, case.folder, **settings)
        try:
            await eventually(lambda: case.engine.weight_version == case.label and not case.engine.paused)
        finally:
            process.terminate()
            await process.wait()
    # The engine never continued with a part of the weights.
    after = case.engine.journal[before:]
    assert after.index(f"update_weight_version {case.label}") < after.index("continue")


async def test_a_trainer_accepts_the_last_request_for_an_engine_once(database: Database) -> None:
    run = await builders.add_run(database, config=builders.run_document())
    sender = Sender("gloo", "127.0.0.1", 4000, (TensorShape("embed", "float32", (3, 4)),))
    old, new = (WeightTransfer("http://engine", run.id, version, f"group-{version}", 3) for version in (1, 2))
    async with database.session() as session:
        await request_transfer(session, old)
        await request_transfer(session, new)
    async with database.session() as session:
        assert await open_transfers(session, run.id) == [new]
        assert await open_transfers(session, "another") == []
        accepted = [await accept_transfer(session, transfer, sender) for transfer in (old, new, new)]
        assert accepted == [False, True, False]
        assert await open_transfers(session, run.id) == []
        assert [await read_sender(session, transfer) for transfer in (old, new)] == [None, sender]
        await end_transfer(session, old)
        assert await read_sender(session, new) == sender
        await end_transfer(session, new)
        assert await read_sender(session, new) is None


async def test_an_engine_serves_until_it_has_joined(case: Case) -> None:
    async with case.fleet() as fleet:
        fleet.set_target(TargetVersion(case.run.id, 0, f"{case.folder}/base", "hash"))
        await eventually(lambda: fleet.served_version(case.run.id) == 0)
        fleet.set_target(case.target)
        await eventually(lambda: case.requests())
        async with case.database.read() as session:
            assert [row.policy_version for row in await serving_engines(session)] == [0]


async def test_a_version_without_files_is_not_served(case: Case) -> None:
    # The controller sees no folder of the run, and checks no files.
    gone = f"{case.folder}/gone/versions/2"
    await builders.add_policy_version(case.database, case.run, 2, path=gone, content_sha256="hash")
    case.engine.bad_paths = {gone}
    async with case.sender(), case.fleet() as fleet:
        fleet.set_target(TargetVersion(case.run.id, 2, gone, "hash"))
        await eventually(lambda: "no such file" in (fleet.trouble(case.run.id) or ""))
        assert case.engine.weight_version != f"{case.run.id}:2"


async def test_a_damaged_version_does_not_end_the_sender(case: Case) -> None:
    damaged = case.folder / "versions" / "2"
    damaged.mkdir()
    (damaged / "model.safetensors").write_bytes(b"rubbish")
    await builders.add_policy_version(case.database, case.run, 2, path=str(damaged), content_sha256="hash")
    async with case.sender():
        first, second = (WeightTransfer(f"http://{v}", case.run.id, v, f"group-{v}", 2) for v in (2, 1))
        async with case.database.session() as session:
            await request_transfer(session, first)
        # It has met the request; a notification wakes nobody here.
        await asyncio.sleep(1.5)
        async with case.database.session() as session:
            await end_transfer(session, first)
            await request_transfer(session, second)
        async with asyncio.timeout(60):
            while await case.sender_of(second) is None:
                await asyncio.sleep(0.05)


async def test_the_port_closes_with_its_transfer(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    ports = list[int]()

    def store(*arguments: Any, **options: Any) -> TCPStore:
        made = TCPStore(*arguments, **options)
        ports.append(made.port)
        return made

    monkeypatch.setattr(sender, "TCPStore", store)
    async with case.sender(), case.fleet() as fleet:
        fleet.set_target(case.target)
        await eventually(lambda: case.is_served(fleet))
        await eventually(lambda: not _is_open(ports[0]))


def _is_open(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


async def test_an_address_that_the_trainer_itself_cannot_reach_does_not_stop_it(case: Case) -> None:
    settings = TrainerSettings(
        run_id=case.run.id, database_url=case.database.dsn, redis_url=case.redis_url, address="192.0.2.1"
    )
    transfer = WeightTransfer(case.engine.url, case.run.id, 1, "group", 2)
    async with case.database.session() as session:
        await request_transfer(session, transfer)
    task = asyncio.create_task(send_for_ever(settings))
    try:
        async with asyncio.timeout(60):
            while await case.sender_of(transfer) is None:
                await asyncio.sleep(0.05)
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_an_engine_with_its_old_weights_continues(case: Case) -> None:
    case.engine.failing = {"/update_weight_version"}
    case.engine.bad_paths = {case.target.path}
    async with case.sender(), case.fleet() as fleet:
        first = TargetVersion(case.run.id, 0, f"{case.folder}/base", "hash")
        fleet.set_target(first)
        await eventually(lambda: fleet.served_version(case.run.id) == 0)
        fleet.set_target(case.target)
        await eventually(lambda: "no such file" in (fleet.trouble(case.run.id) or ""))
        fleet.set_target(first)
        await eventually(lambda: fleet.served_version(case.run.id) == 0)
        assert not case.engine.paused


async def test_a_version_of_a_deleted_run_is_asked_of_the_disk(case: Case) -> None:
    async with case.fleet() as fleet:
        fleet.set_target(case.target._replace(run_id="run-deleted"))
        await eventually(lambda: fleet.served_version("run-deleted") == 1)
    assert case.engine.weight_version == "run-deleted:1"
