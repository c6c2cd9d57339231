"""Starts SGLang's own server on a CPU, from the environment that `make test-sglang` builds."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from tests.fakes.engine_client import ADMIN_KEY, KEY

ENVIRONMENT = Path(__file__).parents[2] / ".venv-sglang"
PYTHON = ENVIRONMENT / "bin" / "python"
RUNNING, RUNNING_INCREMENTAL = os.environ.get("SGLANG_URL"), os.environ.get("SGLANG_INCREMENTAL_URL")
"""Addresses of servers that run already with the flags and keys of these tests, which then start none."""
HEALTH_SECONDS = 5
"""How long `/health_generate` waits for its token."""
START_SECONDS = 400.0
ON_CPU = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"),
    *("--mem-fraction-static", "0.1", "--max-total-tokens", "8192", "--skip-server-warmup", "--sleep-on-idle"),
)
"""Flags that SGLang needs on a machine without a GPU: float32, so that log-probabilities can be compared; without the
last one an idle server takes a core."""


def is_installed() -> bool:
    """Whether tests run on it, too: `make test-sglang` sets TEST_SGLANG, since other runs have shorter limits."""
    return RUNNING is not None or ("TEST_SGLANG" in os.environ and (ENVIRONMENT / ".ready").exists())


@contextlib.contextmanager
def serving_sglang(model: Path, port: int, log: Path, *flags: str, on: Sequence[str] = ON_CPU) -> Iterator[str]:
    """A server of its own session; yields its address.

    Args:   on: flags of the machine
    Raises: RuntimeError: it ended, or did not start in time; the message holds the end of its log
    """
    keys = ("--api-key", KEY, "--admin-api-key", ADMIN_KEY)
    address = ("--host", "127.0.0.1", "--port", str(port))
    command = [PYTHON, "-m", "sglang.launch_server", "--model-path", model, *address, *on, *keys, *flags]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        # Otherwise `/health` fails while the engine is paused.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "SGLANG_HEALTH_CHECK_TIMEOUT": str(HEALTH_SECONDS),
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(url, process, log)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"SGLang did not start: {log.read_text(errors='replace')[-3000:]}")
        time.sleep(0.5)
