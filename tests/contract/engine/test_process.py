"""The engine as a process: it starts from its environment alone, answers, and ends when asked to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx

from tests.fakes.sglang_types import api_types


def test_a_process_serves_and_ends_on_sigterm(tiny_model: Path) -> None:
    environment = {
        **os.environ,
        "ENGINE_MODEL_PATH": str(tiny_model),
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
            answer = httpx.post(
                f"http://127.0.0.1:{listening['port']}/generate",
                json={"text": "hello", "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}},
                timeout=60,
            )
            decoded = api_types().GenerateResponse.from_json_value(answer.json())
            assert [span.version for span in decoded.meta_info.weight_versions] == ["run-a:7"]
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()
