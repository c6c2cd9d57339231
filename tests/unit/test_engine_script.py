"""docker/sglang.sh: SGLang gets its keys by a file, its log has none of them, and a signal reaches it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.shared import ROOT

LAUNCH_SERVER = """
import os, pathlib, signal, sys, time

def end(*_):
    os.write(1, b"ending\\n")
    sys.exit(7)

signal.signal(signal.SIGTERM, end)
config = pathlib.Path(sys.argv[sys.argv.index("--config") + 1])
print(config.read_text(), sys.argv, file=sys.stderr, flush=True)
if "--end" in sys.argv:
    sys.exit(3)
print("ready", flush=True)
time.sleep(60)
"""
KEYS = {"ENGINE_API_KEY": "a/key.with[marks]*", "ENGINE_ADMIN_API_KEY": "an&other\\key"}


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "launch_server.py").write_text(LAUNCH_SERVER)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {"PATH": path, "PYTHONPATH": str(tmp_path), "ENGINE_MODEL_PATH": "/models/base", **KEYS}


def started(variables: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    command = ["sh", str(ROOT / "docker" / "sglang.sh"), *arguments]
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_the_log_has_no_keys_and_the_status_is_sglangs(variables: dict[str, str]) -> None:
    log, _ = started(variables, "--end").communicate(timeout=60)
    assert 'api-key: "***"' in log
    assert 'model-path: "/models/base"' in log
    assert "--incremental-streaming-output" in log
    assert not [key for key in KEYS.values() if key in log]


def test_a_signal_ends_sglang_and_the_last_lines_are_in_the_log(variables: dict[str, str]) -> None:
    process = started(variables)
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "")
    assert any(line == "ready\n" for line in lines)
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=60)
    assert (rest, process.returncode) == ("ending\n", 7)
