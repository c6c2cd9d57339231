"""A service's and a worker's life as processes: started, asked to stop, gone with status 0."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[3]

PROGRAM = """
import asyncio, sys
from leyden.libs.service import HttpSettings, pause, run_http, run_worker
from leyden.libs.service.app import create_app
from leyden.libs.telemetry import configure_logs, logger

configure_logs("sample")
settings = HttpSettings(shutdown_seconds=1 if sys.argv[1] == "stubborn" else 60)

async def loop(stop, checks):
    await stop.wait()
    logger().info("finishing")
    if sys.argv[1] == "stubborn":
        await asyncio.Event().wait()
    await pause(asyncio.Event(), 0.05)
    logger().info("finished")

async def patient(stop, checks):
    await stop.wait()
    logger().info("finishing")
    try:
        await asyncio.Event().wait()
    finally:
        await pause(asyncio.Event(), 0.05)
        logger().info("given back")

async def failing(stop, checks):
    raise RuntimeError("the loop broke")

match sys.argv[1]:
    case "http":
        run_http("sample", create_app("sample"), settings)
    case "patient":
        run_worker("sample", settings.model_copy(update={"shutdown_seconds": 1000}), patient)
    case "failing":
        run_worker("sample", settings, failing)
    case _:
        run_worker("sample", settings, loop)
"""


@pytest.fixture
def started() -> Iterator[object]:
    processes: list[subprocess.Popen[str]] = []

    def start(kind: str) -> tuple[subprocess.Popen[str], int]:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, kind],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        processes.append(process)
        return process, json.loads(process.stdout.readline())["internal_port"]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("kind", ["http", "worker"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process_with_status_0(started: object, kind: str, number: signal.Signals) -> None:
    process, port = started(kind)
    assert httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=60).status_code == 200
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert ("finished" in output) == (kind == "worker")


def test_a_loop_that_does_not_end_is_cancelled(started: object) -> None:
    process, _ = started("stubborn")
    process.terminate()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "loop cancelled" in output


def test_a_loop_that_breaks_ends_the_process_with_its_traceback(started: object) -> None:
    process, _ = started("failing")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "the loop broke" in output


def test_a_process_raises_its_open_file_limit_to_the_hard_limit() -> None:
    program = """
import resource
from leyden.libs.service.server import run_until_signal

async def main(stop):
    print(resource.getrlimit(resource.RLIMIT_NOFILE))

run_until_signal(main)
"""
    limits = (256, 512)
    said = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits),
    )
    assert said.stdout.strip() == "(512, 512)"


def test_a_second_signal_ends_a_stubborn_loop_before_its_time(started: object) -> None:
    process, _ = started("patient")
    process.terminate()
    assert "finishing" in process.stdout.readline()
    process.terminate()
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, "given back" in output) == (0, True)
