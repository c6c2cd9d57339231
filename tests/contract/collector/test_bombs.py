"""Decompression bombs, repeated fields, long messages: the collector's memory stays within its limits for any body."""

from __future__ import annotations

import asyncio
import gzip
import os
import sys
import time
import zlib
from collections import Counter
from pathlib import Path

import grpc
import httpx

from leyden.libs.capability import KeyRing, sign, write_keys
from leyden.libs.contracts.capability import Capability, Scope
from leyden.libs.store.database import Database
from leyden.services.collector.grpc import MAX_MESSAGE_BYTES
from tests.contract.collector.test_grpc import TRACES
from tests.contract.collector.test_otlp import body as spans_of
from tests.contract.gateway.test_process import free_port
from tests.support import builders
from tests.support.long import long_only
from tests.unit.collector.test_parsers import _field as field

ROOT = Path(__file__).parents[3]
MIB = 2**20
IN_FLIGHT = 256 * MIB
BODY = 64 * MIB


def zeros(size_bytes: int) -> bytes:
    """That many zeros as gzip: a thousandth of their size."""
    packer = zlib.compressobj(9, wbits=31)
    return b"".join([packer.compress(bytes(MIB)) for _ in range(size_bytes // MIB)]) + packer.flush()


def peak_bytes(pid: int) -> int:
    """The most that a process has held."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


async def exported(port: int, bearer: str, content: bytes) -> grpc.StatusCode:
    """The answer to a call of gRPC, on a connection of its own."""
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        return await channel.unary_unary(TRACES)(content, metadata=(("authorization", bearer),)).code()


@long_only
async def test_bombs_cost_the_bound_and_not_their_size(database: Database, tmp_path: Path) -> None:
    keys, port, grpc_port = tmp_path / "keys.json", free_port(), free_port()
    write_keys(keys)
    _, [rollout, _] = await builders.add_group(database, await builders.add_run(database))
    await builders.add_attempt(database, rollout)
    expires = int(time.time()) + 600
    capability = Capability(
        run_id=rollout.run_id, rollout_id=rollout.id, attempt=1, scopes=frozenset(Scope), expires_at=expires
    )
    bearer = f"Bearer {sign(KeyRing(keys), capability)}"
    headers = {"authorization": bearer, "content-type": "application/x-protobuf"}
    environment = {
        "PATH": os.environ["PATH"],
        "COLLECTOR_PORT": str(port),
        "COLLECTOR_GRPC_PORT": str(grpc_port),
        "LEYDEN_DATABASE_URL": database.dsn,
        "LEYDEN_CAPABILITY_KEYS_FILE": str(keys),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "leyden.services.collector", cwd=ROOT, env=environment, stdout=asyncio.subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}/r/{rollout.id}/1/v1/traces"
    try:
        async with httpx.AsyncClient(timeout=120, headers=headers) as http:

            async def send(content: bytes, **more: str) -> int:
                return (await http.post(url, content=content, headers=more)).status_code

            async def at_once(content: bytes, times: int, **more: str) -> Counter[int]:
                return Counter(await asyncio.gather(*(send(content, **more) for _ in range(times))))

            async with asyncio.timeout(60):
                while True:
                    try:
                        assert await send(spans_of({})) == 200
                        break
                    except httpx.ConnectError:
                        await asyncio.sleep(0.05)
            packed = {"content-encoding": "gzip"}
            before = peak_bytes(process.pid)
            assert set(await at_once(zeros(1024 * MIB), 8, **packed)) <= {413, 503}
            empty_spans = gzip.compress(field(1, field(2, b"\x12\x00" * (BODY // 2 - 16))))
            assert set(await at_once(empty_spans, 4, **packed)) <= {413, 503}
            attributes = field(2, b"\x4a\x00" * (4 * MIB))
            assert set(await at_once(gzip.compress(field(1, field(2, attributes))), 8, **packed)) <= {200, 503}
            lists = b"[" + b"[]," * MIB + b"[]]"
            json = {"content-type": "application/json"}
            assert set(await at_once(gzip.compress(lists), 2, **packed, **json)) <= {400, 503}
            assert set(await at_once(bytes(BODY - 16), 4)) <= {400, 503}
            too_long = [exported(grpc_port, bearer, bytes(BODY - MIB)) for _ in range(30)]
            assert {*await asyncio.gather(*too_long)} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
            longest = [exported(grpc_port, bearer, bytes(MAX_MESSAGE_BYTES)) for _ in range(30)]
            assert {*await asyncio.gather(*longest)} <= {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAVAILABLE}
            # What all requests may hold, one body being unpacked and one being decoded, and the allocator's slack.
            assert peak_bytes(process.pid) - before < IN_FLIGHT + BODY + 512 * MIB
            assert await send(spans_of({"name": "after"})) == 200
    finally:
        process.kill()
        await process.wait()
