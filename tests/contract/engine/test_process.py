"""The engine as a process: it starts from its environment alone, answers, and ends when asked to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from tests.fakes.sglang_types import api_types
from tests.support.tiny_model import make_tiny_model


@contextmanager
def served(model: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its address."""
    environment = {
        **os.environ,
        "ENGINE_MODEL_PATH": str(model),
        "ENGINE_PORT": "0",
        "ENGINE_THREADS": "1",
        "ENGINE_MAX_TOTAL_TOKENS": "4096",
        "ENGINE_WEIGHT_VERSION": "run-a:7",
    }
    with subprocess.Popen(
        [sys.executable, "-m", "leyden.services.engine"], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            listening = next(line for line in map(json.loads, process.stdout) if line["event"] == "engine listening")
            yield process, f"http://127.0.0.1:{listening['port']}"
        finally:
            process.kill()


def test_a_process_serves_and_ends_on_sigterm(tiny_model: Path) -> None:
    with served(tiny_model) as (process, url):
        sampling = {"max_new_tokens": 3, "ignore_eos": True}
        answer = httpx.post(f"{url}/generate", json={"text": "hello", "sampling_params": sampling}, timeout=60)
        decoded = api_types().GenerateResponse.from_json_value(answer.json())
        assert [span.version for span in decoded.meta_info.weight_versions] == ["run-a:7"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0


def test_a_process_gives_the_memory_of_earlier_weights_back(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, hidden_size=768, layers=6)
    size_bytes = (model / "model.safetensors").stat().st_size
    with served(model) as (process, url):
        before = psutil.Process(process.pid).memory_info().rss
        for _ in range(2):
            answer = httpx.post(f"{url}/update_weights_from_disk", json={"model_path": str(model)}, timeout=60)
            assert answer.status_code == 200
        assert psutil.Process(process.pid).memory_info().rss - before < size_bytes / 3
